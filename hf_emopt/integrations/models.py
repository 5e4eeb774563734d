"""Models from a configuration alone: on the meta device for their shapes, and with random weights to be timed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

_FALLBACKS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")


def load_config(source: str, trust_remote_code: bool = False) -> transformers.PreTrainedConfig:
    """A model's configuration. Arguments and errors as for :func:`load_meta_model`."""
    path = Path(source)
    local = path.suffix == ".json" or path.exists()
    file = path / "config.json" if path.is_dir() else path
    if local and not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give a folder with a config.json, such a file, or a Hub id")
    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except OSError as error:
        if local:
            raise ValueError(f"{source} cannot be read as a configuration: {error}") from error
        problem = f"no configuration for {source!r}: it is no local path, and the Hub gave none ({error})"
        raise ValueError(problem) from error


def load_meta_model(source: str, trust_remote_code: bool = False) -> nn.Module:
    """The model that a configuration describes, on the meta device: shapes and dtypes, no memory, no weights.

    Args:
        source: a Hub id, a folder with a ``config.json``, or the path of such a file. Paths need no network.

    Returns:
        The class that the configuration names under ``architectures``, else the first of transformers' auto classes that
        takes it; weights are tied as in the real model.

    Raises:
        FileNotFoundError: when a path does not lead to a configuration.
        ValueError: when the Hub id cannot be had, or no class takes the configuration.
    """
    config = load_config(source, trust_remote_code)
    names = [n for n in (getattr(config, "architectures", None) or []) if hasattr(transformers, n)]
    failures = []
    with torch.device("meta"):
        for name in names:
            try:
                return _tied(getattr(transformers, name)._from_config(config))
            except Exception as error:  # whatever a model's constructor makes of a value that it cannot use
                raise ValueError(f"{name} cannot be built from the configuration of {source!r}: {error}") from error
        for name in _FALLBACKS:
            try:
                return _tied(getattr(transformers, name).from_config(config, trust_remote_code=trust_remote_code))
            except ValueError as error:
                failures.append(f"{name}: {str(error).splitlines()[0]}")
    raise ValueError(f"no model class takes the configuration of {source!r}:\n" + "\n".join(failures))


def _tied(model: nn.Module) -> nn.Module:
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    return model


def random_language_model(
    source: str | Mapping[str, Any], device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """A causal language model with random float32 weights, whole on ``device`` and in training mode.

    Args:
        source: what :func:`load_config` takes, with its errors, or the arguments of a ``LlamaConfig``.

    Raises:
        ValueError: when it is no causal language model.
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
