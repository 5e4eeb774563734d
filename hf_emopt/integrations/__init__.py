"""Trainer, Accelerate, DeepSpeed, PEFT and TRL. Whichever file of it is imported first, ``Trainer`` is imported before it."""

from importlib import import_module

# hf_emopt then registers the optimizers, which takes most files of this package. (`import` would bind the name of one.)
import_module("transformers.trainer")
