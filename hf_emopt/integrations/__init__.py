"""Trainer, Accelerate, DeepSpeed, PEFT and TRL. Whichever file of it is imported first, ``Trainer`` is imported before it."""

import transformers.trainer  # noqa: F401 - after which hf_emopt registers the optimizers, by way of all files that it needs
