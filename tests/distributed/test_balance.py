"""How evenly work is shared, by the planner's arithmetic alone, on the matrices of public models.

``python tests/distributed/test_balance.py`` prints the table.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hf_emopt.distributed.load_balance import ShardCost, assign
from hf_emopt.linalg.cost import sharded_cost
from hf_emopt.linalg.newton_schulz import newton_schulz_flops

WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512)
Shapes = dict[str, tuple[int, int]]


def decoder(layers: int, hidden: int, queries: int, keys: int, intermediate: int) -> Shapes:
    """Matrices of a decoder with grouped queries and a gated MLP, as ``torch.nn.Linear`` stores them."""
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}


# From config.json of each model: layers, hidden_size, heads x head_dim, key-value heads x head_dim, intermediate_size.
MODELS = {
    "Qwen3-0.6B": decoder(28, 1024, 16 * 128, 8 * 128, 3072),
    "Llama-3-8B": decoder(32, 4096, 32 * 128, 8 * 128, 14336),
    "Llama-3-70B": decoder(80, 8192, 64 * 128, 8 * 128, 28672),
}

# Largest load over the mean of other layer-wise rules on these models: padding by shape, round robin by size, back and
# forth by size, longest first by size, longest first by operations.
OTHER_RULES = {
    ("Qwen3-0.6B", 8): (1.07, 1.03, 1.03, 1.01, 1.01),
    ("Qwen3-0.6B", 32): (1.14, 1.14, 1.27, 1.08, 1.08),
    ("Qwen3-0.6B", 64): (1.67, 1.36, 1.48, 1.11, 1.11),
    ("Qwen3-0.6B", 128): (3.34, 1.48, 1.73, 1.24, 1.24),
    ("Llama-3-8B", 8): (1.00, 1.00, 1.00, 1.00, 1.00),
    ("Llama-3-8B", 32): (1.00, 1.00, 1.00, 1.00, 1.00),
    ("Llama-3-8B", 64): (1.26, 1.26, 1.26, 1.06, 1.06),
    ("Llama-3-8B", 128): (2.53, 1.45, 1.45, 1.06, 1.06),
    ("Llama-3-70B", 64): (1.31, 1.09, 1.09, 1.04, 1.01),
    ("Llama-3-70B", 128): (1.60, 1.17, 1.17, 1.07, 1.01),
    ("Llama-3-70B", 256): (2.03, 1.17, 1.71, 1.28, 1.17),
}


def rank_loads(
    ranks: dict[str, tuple[int, ...]],
    costs: dict[str, int],
    world_size: int,
    shard_cost: ShardCost = lambda name, k: pytest.fail(f"{name} is cut over {k} ranks"),
) -> list[int]:
    """Operations of each rank under an assignment."""
    result = [0] * world_size
    for name, compute_group in ranks.items():
        part = costs[name] if len(compute_group) == 1 else shard_cost(name, len(compute_group))
        for rank in compute_group:
            result[rank] += part
    return result


def imbalance(
    costs: dict[str, int], world_size: int, shard_cost: Callable[[str, int], int] | None = None
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """Largest load over the ideal (all work done on whole matrices, shared evenly), and the assignment."""
    ranks = assign(costs, world_size, shard_cost)
    loads = rank_loads(ranks, costs, world_size, shard_cost or uncut(costs))
    return max(loads) * world_size / sum(costs.values()), ranks


def muon_costs(shapes: Shapes) -> dict[str, int]:
    return {name: newton_schulz_flops(*shape) for name, shape in shapes.items()}


def uncut(costs: dict[str, int]) -> Callable[[str, int], int]:
    return lambda name, k: costs[name]


def cut(shapes: Shapes) -> Callable[[str, int], int]:
    return lambda name, k: sharded_cost(*shapes[name], k).flops


def balance_table() -> str:
    """Imbalance for each model and world size, in Markdown: longest first, whole matrices, and compute groups with their
    sizes."""
    lines = [
        "| model | ranks | longest first | whole matrices | with compute groups | ranks a matrix |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for model, shapes in MODELS.items():
        costs = muon_costs(shapes)
        for world_size in WORLD_SIZES:
            first = imbalance(costs, world_size)[0]
            whole = imbalance(costs, world_size, uncut(costs))[0]
            compute_groups, ranks = imbalance(costs, world_size, cut(shapes))
            sizes = {
                name.split(".")[-2].removesuffix("_proj"): len(compute_group) for name, compute_group in ranks.items()
            }
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"
            lines.append(f"| {model} | {world_size} | {first:.2f} | {whole:.2f} | {compute_groups:.2f} | {listed} |")
    return "\n".join(lines)


class TestModels:
    def test_shapes_add_up_to_the_published_sizes(self) -> None:
        """Parameters without embeddings, heads and norms."""
        millions = {name: sum(m * n for m, n in shapes.values()) / 1e6 for name, shapes in MODELS.items()}
        # 0.44 billion "non-embedding" by Qwen3-0.6B's card; 8.03 and 70.55 billion less two 128256 x hidden.
        assert millions["Qwen3-0.6B"] == pytest.approx(440, abs=1)
        assert millions["Llama-3-8B"] == pytest.approx(8030 - 2 * 128.256 * 4.096, abs=1)
        assert millions["Llama-3-70B"] == pytest.approx(70554 - 2 * 128.256 * 8.192, abs=2)

    @pytest.mark.parametrize("model", MODELS)
    def test_whole_matrices_are_balanced_to_64_ranks(self, model: str) -> None:
        costs = muon_costs(MODELS[model])
        for world_size in (w for w in WORLD_SIZES if w <= 64):
            value, ranks = imbalance(costs, world_size, uncut(costs))
            assert value <= 1.11
            assert all(len(compute_group) == 1 for compute_group in ranks.values())

    @pytest.mark.parametrize(("model", "world_size"), OTHER_RULES)
    def test_no_other_rule_is_better(self, model: str, world_size: int) -> None:
        costs = muon_costs(MODELS[model])
        others = OTHER_RULES[model, world_size]
        for shard_cost in (uncut(costs), cut(MODELS[model])):
            assert round(imbalance(costs, world_size, shard_cost)[0], 2) <= min(others)
        # The last column is plain longest first by operations, so the other columns are of the same costs.
        assert round(imbalance(costs, world_size)[0], 2) == others[-1]

    @pytest.mark.parametrize("model", MODELS)
    def test_compute_groups_balance_up_to_512_ranks(self, model: str) -> None:
        costs = muon_costs(MODELS[model])
        for world_size in WORLD_SIZES:
            value, ranks = imbalance(costs, world_size, cut(MODELS[model]))
            assert value <= 1.25
            assert list(ranks) == list(costs)
            if world_size <= 128:
                assert all(len(compute_group) == 1 for compute_group in ranks.values())

    def test_whole_matrices_cannot_do_so(self) -> None:
        """What compute groups are for: the largest matrix alone is more than a share."""
        for model, least in (("Qwen3-0.6B", 3.45), ("Llama-3-8B", 4.22), ("Llama-3-70B", 1.70)):
            costs = muon_costs(MODELS[model])
            assert imbalance(costs, 512, uncut(costs))[0] >= max(costs.values()) * 512 / sum(costs.values()) >= least

    def test_the_table_has_a_row_for_each_model_and_size(self) -> None:
        rows = balance_table().splitlines()
        assert len(rows) == 2 + len(MODELS) * len(WORLD_SIZES)
        assert "| Llama-3-8B | 256 | 2.11 | 2.11 | 1.06 | gate 4, up 4, down 4 |" in rows


def cubes(m: int, n: int, limit: int | None) -> int:
    """Sum of the cubes of the sides of all factors when a matrix is cut into blocks of at most ``limit``."""

    def sides(size: int) -> list[int]:
        whole, rest = divmod(size, limit or size)
        return [limit or size] * whole + [rest] * (rest > 0)

    return sum(a**3 + b**3 for a in sides(m) for b in sides(n))


# Largest load over the mean at 64, 128 and 256 ranks.
FACTOR_BALANCE = {
    ("Qwen3-0.6B", None): (1.21, 1.21, 2.42),
    ("Qwen3-0.6B", 2048): (1.12, 1.50, 1.83),
    ("Qwen3-0.6B", 1024): (1.07, 1.22, 1.83),
    ("Llama-3-8B", None): (1.28, 1.28, 2.55),
    ("Llama-3-8B", 8192): (1.16, 1.16, 2.32),
    ("Llama-3-8B", 4096): (1.04, 1.04, 2.08),
    ("Llama-3-8B", 1024): (1.08, 1.08, 2.15),
    ("Llama-3-70B", None): (1.02, 1.02, 1.02),
    ("Llama-3-70B", 8192): (1.01, 1.01, 1.07),
    ("Llama-3-70B", 4096): (1.00, 1.02, 1.11),
    ("Llama-3-70B", 1024): (1.00, 1.00, 1.13),
}


@pytest.mark.parametrize(("model", "limit"), FACTOR_BALANCE)
def test_factors_of_whole_matrices(model: str, limit: int | None) -> None:
    """Shampoo and SOAP keep matrices whole: what can be reached with blocks of a largest side. Finer blocks cost a matrix
    less of its share only until its cost goes with its size; beyond 128 ranks the largest matrix decides.
    """
    costs = {name: cubes(*shape, limit) for name, shape in MODELS[model].items()}
    for world_size, recorded in zip((64, 128, 256), FACTOR_BALANCE[model, limit]):
        value, _ = imbalance(costs, world_size, uncut(costs))
        assert value == pytest.approx(recorded, abs=0.0051)
        assert value >= max(costs.values()) * world_size / sum(costs.values())


class TestAssign:
    @staticmethod
    def random_costs(rng: random.Random, most: int = 60) -> dict[str, int]:
        return {f"p{i}": rng.choice((rng.randint(0, 50), rng.randint(1, 1000))) for i in range(rng.randint(0, most))}

    def test_without_shard_cost_it_is_longest_first(self) -> None:
        rng = random.Random(0)
        for _ in range(100):
            costs, world_size = self.random_costs(rng), rng.randint(1, 12)
            loads = [0] * world_size
            owners: dict[str, tuple[int, ...]] = {}
            for name in sorted(costs, key=lambda name: (-costs[name], name)):
                owner = loads.index(min(loads))
                loads[owner] += costs[name]
                owners[name] = (owner,)
            assert assign(costs, world_size) == owners

    def test_compute_groups_are_aligned_blocks_of_a_divisor(self) -> None:
        rng = random.Random(1)
        cut_items = 0
        for _ in range(60):
            costs, world_size = self.random_costs(rng, most=20), rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
            shard_cost = lambda name, k: -(-costs[name] * 5 // (4 * k)) if k > 1 else costs[name]  # noqa: E731, B023
            loads = [rng.randint(0, 300) for _ in range(world_size)]
            ranks = assign(costs, world_size, shard_cost, loads)
            assert list(ranks) == list(costs)
            for compute_group in ranks.values():
                k = len(compute_group)
                cut_items += k > 1
                assert world_size % k == 0
                assert compute_group[0] % k == 0
                assert compute_group == tuple(range(compute_group[0], compute_group[0] + k))
        assert cut_items > 50

    def test_the_result_depends_on_names_and_costs_only(self) -> None:
        rng = random.Random(2)
        costs = self.random_costs(rng)
        shuffled = list(costs.items())
        rng.shuffle(shuffled)
        shard_cost = lambda name, k: -(-costs[name] // k)  # noqa: E731
        assert assign(dict(shuffled), 8, shard_cost) == assign(costs, 8, shard_cost)
        assert assign(dict(shuffled), 8) == assign(costs, 8)

    def test_one_large_item_is_cut_over_as_few_ranks_as_help(self) -> None:
        costs = {"large": 800, **{f"small{i}": 100 for i in range(8)}}
        halves = lambda name, k: costs[name] // k if name == "large" and k <= 4 else costs[name]  # noqa: E731
        ranks = assign(costs, 8, halves)
        assert len(ranks["large"]) == 4
        assert max(rank_loads(ranks, costs, 8, halves)) == 200
        assert max(rank_loads(assign(costs, 8), costs, 8)) == 800

    def test_nothing_is_cut_for_less_than_a_tenth(self) -> None:
        """Nine equal items on four ranks end at 3 where 2.25 is possible; forty-one at 11 where 10.25 is."""
        even = lambda name, k: 100 // k  # noqa: E731
        few, many = ({f"p{i}": 100 for i in range(n)} for n in (9, 41))
        assert any(len(compute_group) > 1 for compute_group in assign(few, 4, even).values())
        assert all(len(compute_group) == 1 for compute_group in assign(many, 4, even).values())

    def test_what_ranks_carry_already_counts(self) -> None:
        costs = {"a": 10, "b": 10, "c": 10}
        assert assign(costs, 4, None, [0, 100, 0, 0]) == {"a": (0,), "b": (2,), "c": (3,)}
        half = lambda name, k: costs[name] // k  # noqa: E731
        ranks = assign({"a": 40}, 4, lambda name, k: 40 // k, [0, 15, 0, 0])
        assert ranks["a"] in ((2, 3), (0, 1, 2, 3))
        assert 0 not in {
            rank for compute_group in assign(costs, 4, half, [100, 0, 0, 0]).values() for rank in compute_group
        }

    def test_equal_items_are_packed_better_than_longest_first(self) -> None:
        """Graham's example: longest first ends at 11 where 9 is possible."""
        costs = dict(zip("abcdefg", (5, 5, 4, 4, 3, 3, 3)))
        assert max(rank_loads(assign(costs, 3), costs, 3)) == 11
        assert max(rank_loads(assign(costs, 3, uncut(costs)), costs, 3)) == 9

    @pytest.mark.parametrize(
        ("costs", "world_size", "loads", "message"),
        [
            ({}, 0, None, "world_size=0"),
            ({"a": 1}, 2, [0], "loads has 1 entries for 2 ranks"),
            ({"a": -1}, 2, None, "a$"),
            ({"a": 1}, 2, [0, -3], "load -3"),
        ],
    )
    def test_bad_arguments(self, costs: dict[str, int], world_size: int, loads: list[int] | None, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            assign(costs, world_size, None, loads)


if __name__ == "__main__":
    print(balance_table())
