"""A language model with random weights, to be timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from hf_emopt.integrations.meta_model import load_config

__all__ = ["random_language_model"]


def random_language_model(
    source: str | Mapping[str, Any], device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """A causal language model with random float32 weights, whole on ``device`` and in training mode.

    Args:
        source: what :func:`~hf_emopt.integrations.meta_model.load_config` takes, or the arguments of a ``LlamaConfig``.

    Raises:
        FileNotFoundError: when a path does not lead to a configuration.
        ValueError: when there is no such model, or it is no causal language model.
    """
    config: Any
    if isinstance(source, str):
        config = load_config(source, trust_remote_code)
        config.use_cache = False
    else:
        config = transformers.LlamaConfig(tie_word_embeddings=False, use_cache=False, **source)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise ValueError(
            f"{source} is no causal language model ({str(error).splitlines()[0]}): a step is timed on input_ids and labels"
        ) from error
    model.train()
    return model  # type: ignore[no-any-return]
