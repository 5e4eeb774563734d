"""The cost of a run from shapes alone: state bytes and floating-point operations of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace

from hf_emopt.distributed.assignment import make_plan
from hf_emopt.distributed.layout import Storage
from hf_emopt.formats.kronecker_factors import FACTOR_STORAGE
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.routing.packing import adapter_at, unpack_matrix_views
from hf_emopt.state.forms import state_bytes


@dataclass(frozen=True)
class StepEstimate:
    """Figures of one optimizer on one model.

    Attributes:
        matrices: whole matrices transformed in a step; a LoRA pair that is stepped as one is one.
        matrix_numel, aux_numel: elements trained by the rule and by AdamW; their state is that of all ranks together.
        adamw_state_bytes: state of ``torch.optim.AdamW`` for the same parameters.
        transform_flops, rank_flops: operations of the transforms in a step, all ranks together and each.
        imbalance: largest over mean of ``rank_flops``.
    """

    matrices: int
    matrix_numel: int
    aux_numel: int
    matrix_state_bytes: int
    aux_state_bytes: int
    adamw_state_bytes: int
    transform_flops: int
    world_size: int
    rank_flops: tuple[int, ...]
    imbalance: float

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        total = self.matrix_state_bytes + self.aux_state_bytes
        numel = max(1, self.matrix_numel + self.aux_numel)
        lines = [
            f"optimizer state: {_bytes(total)} ({total / numel:.2f} bytes a parameter), AdamW's: "
            f"{_bytes(self.adamw_state_bytes)} ({self.adamw_state_bytes / numel:.2f}), ratio "
            f"{total / max(1, self.adamw_state_bytes):.2f}",
            f"  matrices {_bytes(self.matrix_state_bytes)}, everything else {_bytes(self.aux_state_bytes)}",
            f"transforms a step: {self.matrices:,} matrices, {self.transform_flops / 1e12:.4g} TFLOP",
        ]
        if self.world_size > 1:
            lines.append(
                f"on {self.world_size} ranks, one owner a matrix: at most {max(self.rank_flops) / 1e12:.4g} TFLOP a rank, "
                f"{self.imbalance:.3f} of the mean"
            )
        return "\n".join(lines)


def estimate(optimizer: MatrixOptimizer, world_size: int = 1) -> StepEstimate:
    """Figures for an optimizer's parameters, on the meta device too; raises ``ValueError`` for a ``world_size`` below 1."""
    numel: Counter[str] = Counter()
    held: Counter[str] = Counter()
    reference = matrices = 0
    for group in optimizer.param_groups:
        for position, param in enumerate(group["params"]):
            if param.numel() == 0:
                continue
            reference += 2 * param.numel() * param.element_size() + 4
            kind = group["kind"]
            shapes = [v.shape for v in unpack_matrix_views(group["units"][position])] if kind == "matrix" else []
            held[kind] += state_bytes(optimizer.rule, group, param, shapes)
            numel[kind] += param.numel()
            adapter = adapter_at(group, position) if kind == "matrix" else None
            if adapter is None or not adapter.joint or adapter.side == "B":  # a pair counts once
                matrices += sum(shape[0] for shape in shapes)
    whole = optimizer.planned_parameters()
    plan = make_plan([replace(p, storage=Storage.whole(p.storage.shape, world_size)) for p in whole])
    return StepEstimate(
        matrices, numel["matrix"], numel["aux"], held["matrix"], held["aux"], reference, plan.cost, world_size,
        tuple(plan.loads()), plan.imbalance,
    )  # fmt: skip


def storage_choices(optimizer: MatrixOptimizer) -> dict[str, float]:
    """Bytes of state for each trained element, for every ``factor_storage``; empty for rules without factors."""
    groups = [g for g in optimizer.param_groups if "factor_storage" in g]
    chosen = [g["factor_storage"] for g in groups]
    result = {}
    try:
        for storage in FACTOR_STORAGE if groups else ():
            for group in groups:
                group["factor_storage"] = storage
            figures = estimate(optimizer)
            total = figures.matrix_state_bytes + figures.aux_state_bytes
            result[storage] = total / max(1, figures.matrix_numel + figures.aux_numel)
    finally:
        for group, storage in zip(groups, chosen):
            group["factor_storage"] = storage
    return result


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
