"""Which parameters embed the inputs, and which are output heads: asked of the model, and read off its structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hf_emopt.routing.parameter import ParameterInfo, class_names, global_shape

HEAD_NAMES = frozenset({"lm_head", "classifier", "score", "qa_outputs", "embed_out", "head", "fc", "logits", "unembed"})
"""Names that a head has as a child of the model itself, compared with whole components."""

_TASK_CLASS = re.compile(r"For[A-Z]|LMHead|DoubleHeads")


def is_linear(module: nn.Module) -> bool:
    """A linear map ``(out, in)``: ``nn.Linear``, or a class that has its attributes and a weight of that shape."""
    if isinstance(module, nn.Linear):
        return True
    weight, out, inp = (getattr(module, name, None) for name in ("weight", "out_features", "in_features"))
    return isinstance(weight, nn.Parameter) and isinstance(out, int) and global_shape(weight) == (out, inp)


def is_embedding(module: nn.Module) -> bool:
    """A table of vectors: ``nn.Embedding``, ``nn.EmbeddingBag``, or a class that has their attributes."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return all(isinstance(getattr(module, name, None), int) for name in ("num_embeddings", "embedding_dim"))


def _asked(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """What the model, and every module inside it that has ``method``, returns."""
    for module in model.modules():
        get = getattr(module, method, None)
        if not callable(get):
            continue
        try:
            found = get()
        except (NotImplementedError, AttributeError, TypeError, KeyError):
            continue  # the library's way to say that this model has none
        if isinstance(found, nn.Module):
            yield found


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold the weight of an answer: itself, modules that an adapter wraps or copies, members of a list."""
    yield module
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        children: Iterable[nn.Module] = module.children()
    else:
        wrapped: list[Any] = [module._modules.get(name) for name in ("base_layer", "original_module")]
        copies = module._modules.get("modules_to_save")
        children = [child for child in wrapped if child is not None] + (list(copies.children()) if copies else [])
    for child in children:
        yield from _leaves(child)


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    for leaf in _leaves(module):
        yield from (p for p in leaf._parameters.values() if p is not None and len(global_shape(p)) > 1)


def _sizes_of_outputs(module: nn.Module) -> set[int]:
    """Output sizes that mark a head: labels (one more for "no object") and vocabulary."""
    config = getattr(module, "config", None)
    sizes: set[int] = set()
    labels = getattr(config, "num_labels", None)
    if isinstance(labels, int) and labels > 0:
        sizes |= {labels, labels + 1}
    for holder in (config, getattr(config, "text_config", None)):
        vocabulary = getattr(holder, "vocab_size", None)
        if isinstance(vocabulary, int) and vocabulary > 0:
            sizes.add(vocabulary)
    return sizes


def _is_pretrained(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_model_prefix", None), str) and hasattr(module, "config")


def _outside_body(module: nn.Module, body: nn.Module | None) -> Iterator[nn.Module]:
    """Modules of a task model that are not in its body (nor in another pretrained model inside it)."""
    for child in module._modules.values():
        if child is None or child is body or _is_pretrained(child):
            continue
        yield child
        yield from _outside_body(child, body)


def _task_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Linear maps and convolutions of a ``*For*`` model, outside its body, that give labels or words.

    Their outputs count as many, or they are children of the model named ``*_head``.
    """
    for module in model.modules():
        if not (_is_pretrained(module) and any(_TASK_CLASS.search(name) for name in class_names(module)[:1])):
            continue
        prefix = module.base_model_prefix
        sizes = _sizes_of_outputs(module)
        named = {id(child) for name, child in module._modules.items() if name.endswith("_head")}
        for candidate in _outside_body(module, module._modules.get(prefix) if isinstance(prefix, str) else None):
            weight = getattr(candidate, "weight", None)
            if not isinstance(weight, nn.Parameter):
                continue
            convolution = isinstance(candidate, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
            if (is_linear(candidate) or convolution) and (global_shape(weight)[0] in sizes or id(candidate) in named):
                yield candidate


def _named_head(info: ParameterInfo) -> bool:
    """``lm_head``, ``classifier`` ... as a child of the model, or the last map of a ``Sequential`` of that name."""
    path = info.path
    if not (is_linear(info.owner) and info.leaf == "weight") or len(path) not in (2, 3) or path[0] not in HEAD_NAMES:
        return False
    if len(path) == 2:
        return True
    if path[:2] == ("head", "fc"):
        return True
    maps = [m for m in info.parent.modules() if is_linear(m)] if isinstance(info.parent, nn.Sequential) else []
    return bool(maps) and maps[-1] is info.owner


def _mirrors_embedding(infos: list[ParameterInfo]) -> Iterator[ParameterInfo]:
    """Linear maps shaped like the largest embedding of the module that holds both: ``(vocabulary, width)``.

    A map inside a layer never qualifies, since the embedding is not inside the layer.
    """
    largest: dict[int, tuple[int, ...]] = {}
    for info in infos:
        if is_embedding(info.owner) and len(info.shape) == 2:
            for _, module in info.chain[1:]:
                largest[id(module)] = max(largest.get(id(module), (0, 0)), info.shape)
    for info in infos:
        if info.leaf != "weight" or info.parent is None or not is_linear(info.owner) or len(info.shape) != 2:
            continue
        if info.shape[0] != info.shape[1] and largest.get(id(info.parent)) == info.shape:
            yield info


def special_parameters(model: nn.Module, infos: list[ParameterInfo]) -> dict[int, tuple[str, str]]:
    """Role (``"embedding"`` or ``"head"``) and reason of embeddings and heads, by ``id(parameter)``: a tied weight is found
    whatever its first name. ``infos`` are :func:`iter_parameters` of the model."""
    found: dict[int, tuple[str, str]] = {}
    for info in infos:
        if is_embedding(info.owner) and len(info.shape) > 1:
            found.setdefault(id(info.parameter), ("embedding", class_names(info.owner)[0]))
    answers: tuple[tuple[str, str, Iterator[nn.Module]], ...] = (
        ("embedding", "input embedding (get_input_embeddings)", _asked(model, "get_input_embeddings")),
        ("head", "output head (get_output_embeddings)", _asked(model, "get_output_embeddings")),
        ("head", "output head: its outputs are labels or words", _task_heads(model)),
    )
    for role, reason, modules in answers:
        for weight in (weight for module in modules for weight in _weights(module)):
            found.setdefault(id(weight), (role, reason))
    for info in infos:
        if _named_head(info):
            found.setdefault(id(info.parameter), ("head", f"output head ({info.path[0]} of the model)"))
    for info in _mirrors_embedding(infos):
        found.setdefault(id(info.parameter), ("head", "output head: shaped like the token embedding"))
    return found
