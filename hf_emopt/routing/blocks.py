"""Rules for modules other than attention: parts of equal size, state space models, gated MLPs, experts, modules of torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_emopt.routing.layouts import Parts, expert_stack, grouped_rows, rows
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import ArchitectureRule, Decision, ParameterInfo, class_names, matrix, setting


def concatenated(
    name: str, parts_of: Callable[[ParameterInfo, nn.Module], Parts | None], role: str
) -> ArchitectureRule:
    """Parts along the outputs whose sizes come from the module."""

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        if relative != f"{name}.weight" or len(parameter.shape) != 2:
            return None
        parts = parts_of(parameter, module)
        if parts is None:
            return None
        return matrix(rows(parameter.shape, parts), f"fused {', '.join(part for part, _ in parts)}, split", role)

    return rule


def equal(*names: str) -> Callable[[ParameterInfo, nn.Module], Parts | None]:
    def parts(parameter: ParameterInfo, module: nn.Module) -> Parts | None:
        out = parameter.shape[0]
        return None if out % len(names) else tuple((name, out // len(names)) for name in names)

    return parts


# --- linear attention and state space models --------------------------------------------------------------------------


def delta_parts(parameter: ParameterInfo, module: nn.Module) -> Parts | None:
    """Qwen3.5's ``in_proj_qkv``: q and k of ``key_dim`` rows, v the rest."""
    key = setting(module, "key_dim")
    return None if key is None else (("q", key), ("k", key), ("v", parameter.shape[0] - 2 * key))


def mamba2_parts(parameter: ParameterInfo, module: nn.Module) -> Parts | None:
    """Mamba-2's ``in_proj``: gate z, x, B, C and the time step dt (one row per head, a matrix like the others)."""
    inner, state = setting(module, "intermediate_size"), setting(module, "ssm_state_size")
    heads, groups = setting(module, "num_heads"), setting(module, "n_groups")
    if not (inner and state and heads and groups):
        return None
    return (("z", inner), ("x", inner), ("B", groups * state), ("C", groups * state), ("dt", heads))


def mamba_parts(parameter: ParameterInfo, module: nn.Module) -> Parts | None:
    """Mamba's ``x_proj``: time step of low rank, B and C."""
    state = setting(module, "ssm_state_size")
    return None if state is None else (("dt", parameter.shape[0] - 2 * state), ("B", state), ("C", state))


def zamba_in_proj(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """Zamba's ``in_proj``: rows of x and of the gate take turns."""
    if relative != "in_proj.weight" or parameter.shape[0] % 2:
        return None
    views = grouped_rows(parameter.shape, parameter.shape[0] // 2, (("x", 1), ("z", 1)))
    return matrix(views, "fused x, z row by row, split")


# --- gated MLPs and experts -------------------------------------------------------------------------------------------


def has_layout_flags(module: nn.Module) -> bool:
    flags = ("is_transposed", "is_concatenated", "has_gate")
    return all(isinstance(getattr(module, flag, None), bool) for flag in flags)


def flagged_experts(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """Experts that carry their layout: transformers sets ``is_transposed``, ``is_concatenated``, ``has_gate``."""
    if len(parameter.shape) != 3 or "." in relative:
        return None
    fused = relative == "gate_up_proj" and bool(module.has_gate)
    return _experts(parameter, fused, bool(module.is_transposed), not module.is_concatenated)


def _experts(parameter: ParameterInfo, fused: bool, transposed: bool, interleaved: bool = False) -> Decision:
    """A stack of experts, with gate and up fused along the outputs or not."""
    names = ("gate", "up") if fused else ()
    views = expert_stack(parameter.shape, names, transposed=transposed, interleaved=interleaved)
    layout = ("interleaved " if interleaved else "") + "gate, up, split; " if fused else ""
    reason = f"expert stack, {layout}batch of experts" + ("; stored (in, out)" if transposed else "")
    return matrix(views, reason, "expert")


def plain_experts(*, transposed: bool) -> ArchitectureRule:
    """Stacks ``gate_up_proj`` and ``down_proj`` of a class that carries no flags."""

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        if relative not in ("gate_up_proj", "down_proj") or len(parameter.shape) != 3:
            return None
        return _experts(parameter, relative == "gate_up_proj", transposed)

    return rule


def bare_projection(name: str) -> ArchitectureRule:
    """A bare 2-D parameter applied as ``x @ weight``: stored (in, out)."""

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        if relative != name:
            return None
        return matrix((MatrixView.whole(parameter.shape, transposed=True),), "bare projection stored (in, out)")

    return rule


def dbrx_experts(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """DBRX: ``w1``, ``v1``, ``w2`` are 2-D ``(E * ffn, H)``; ``w2`` is applied as ``x @ w2``: stored (in, out)."""
    count = setting(module, "moe_num_experts")
    if relative not in ("w1", "v1", "w2") or not count or parameter.shape[0] % count:
        return None
    view = (count, parameter.shape[0] // count, parameter.shape[1])
    views = expert_stack(view, transposed=relative == "w2")
    return matrix(views, "expert stack in two dimensions, batch of experts", "expert")


def jetmoe_input(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """JetMoE: ``input_linear`` is a stack ``(E, 2 I, H)`` of [gate; up]."""
    if relative != "input_linear.weight" or len(parameter.shape) != 3:
        return None
    views = expert_stack(parameter.shape, ("gate", "up"))
    return matrix(views, "expert stack, gate, up, split; batch of experts", "expert")


def xlnet(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """XLNet: bare ``(d_model, heads, head_dim)``; q, k, v, r map d_model to heads, o maps heads to d_model."""
    if relative not in ("q", "k", "v", "o", "r") or len(parameter.shape) != 3:
        return None
    if relative == "o":
        view, reason = MatrixView("o", parameter.shape, rows=(0,), cols=(1, 2)), "projection of all heads"
    elif parameter.per_head:
        view = MatrixView(relative, parameter.shape, rows=(2,), cols=(0,), batch=(1,))
        reason = "one matrix per head; stored (in, out)"
    else:
        view, reason = MatrixView(relative, parameter.shape, (1, 2), (0,)), "projection; stored (in, out)"
    return matrix((view,), reason, "attention")


# --- modules of torch itself ------------------------------------------------------------------------------------------


def multihead_attention(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """``nn.MultiheadAttention``: ``in_proj_weight`` is ``[q; k; v]``; ``{q,k,v}_proj_weight`` are bare."""
    head = setting(module, "head_dim") if parameter.per_head else None
    if relative == "in_proj_weight":
        size = parameter.shape[0] // 3
        views = rows(parameter.shape, (("q", size), ("k", size), ("v", size)), head_dim=head)
        return matrix(views, "fused q, k, v, one matrix per head" if head else "fused q, k, v, split", "attention")
    if relative in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        views = rows(parameter.shape, ((relative[0], parameter.shape[0]),), head_dim=head)
        return matrix(views, "one matrix per head" if head else "projection", "attention")
    return None


def recurrent(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells: the gates are stored one after the other along the outputs."""
    if not relative.startswith(("weight_ih", "weight_hh")) or len(parameter.shape) != 2:
        return None
    hidden = setting(module, "hidden_size") or parameter.shape[0]
    kind = next((name for name in class_names(module) if name.startswith(("LSTM", "GRU"))), "")
    gates = ("i", "f", "g", "o") if kind.startswith("LSTM") else ("r", "z", "n") if kind else ("",)
    if parameter.shape[0] != len(gates) * hidden:
        return None
    if len(gates) == 1:
        return matrix((MatrixView.whole(parameter.shape),), "recurrent weight")
    views = rows(parameter.shape, tuple((gate, hidden) for gate in gates))
    return matrix(views, f"fused gates {', '.join(gates)}, split")
