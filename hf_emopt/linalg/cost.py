"""The cost of transforms: operations, bytes, messages, and seconds on the machine for which choices are made.

Products are counted as general ones, also where kernels compute half of a symmetric result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_emopt.linalg.coefficients import CoefficientSpec, resolve_coefficients
from hf_emopt.linalg.gram_newton_schulz import find_restart_steps

Method = Literal["standard", "gram"]
"""The iteration on a sharded matrix, or on its Gram matrix."""

Form = Literal["polynomial", "gram_twice", "shared_polynomial"]

# One H100 with NVLink: products in 16 bits, bytes of an all-reduce as they leave a rank, and the start of a message.
FLOPS_PER_SECOND = 600e12
BYTES_PER_SECOND = 300e9
SECONDS_PER_MESSAGE = 2e-5

# An element of an s x s exchange has to save this many operations: its two bytes are worth about 4,000 at the rates above.
_EXCHANGE_FLOPS = 4096


@dataclass(frozen=True)
class Cost:
    """The work of one rank in a step: operations, bytes received from other ranks, and collectives (a fraction of one where
    several parameters share it)."""

    flops: float
    bytes: float
    messages: float

    @property
    def seconds(self) -> float:
        """Time on one H100 a rank with NVLink between them, where nothing hides behind anything."""
        return self.flops / FLOPS_PER_SECOND + self.bytes / BYTES_PER_SECOND + self.messages * SECONDS_PER_MESSAGE


@dataclass(frozen=True)
class ShardedCost:
    """The operations and all-reduces of one rank to transform one sharded matrix.

    Attributes:
        flops: of the rank with the longest slice.
        reductions: elements of each all-reduce of float32 numbers (float64 for that dtype).
        exchanged: elements of each all-reduce in the dtype of the products.
    """

    flops: int
    reductions: tuple[int, ...]
    exchanged: tuple[int, ...] = ()

    @property
    def messages(self) -> int:
        return len(self.reductions) + len(self.exchanged)

    @property
    def bytes(self) -> int:
        """Bytes in the buffers of all-reduces, with products in 16 bits."""
        return 4 * sum(self.reductions) + 2 * sum(self.exchanged)

    def on(self, parts: int) -> Cost:
        """The cost of each of ``parts`` ranks: each number of an all-reduce leaves a rank and returns."""
        return Cost(self.flops, 2 * (parts - 1) / parts * self.bytes, self.messages)


def cheapest_form(short: int, long: int, parts: int) -> tuple[Form, int]:
    """How a step of the sharded iteration is done, and its operations on the rank with the longest slice.

    With ``l`` columns on the rank, the Gram matrix is ``2 s^2 l`` in each of

    * ``"polynomial"``: ``b A + c A A`` on every rank and one product: ``2 s^3 + 2 s^2 l``;
    * ``"gram_twice"``: ``(b X + c A X)`` and ``A`` times that: ``4 s^2 l``, which falls with ``l`` alone;
    * ``"shared_polynomial"``: each rank computes its part of the rows of ``b A + c A A``, which are exchanged:
      ``2 s^3 / k + 2 s^2 l``, where the saving is worth the exchange.
    """
    columns, rows = -(-long // parts), -(-short // parts)
    base = 2 * short * short * columns
    flops: dict[Form, int] = {
        "polynomial": base + 2 * short**3 + base,
        "gram_twice": base + 2 * base,
        "shared_polynomial": base + 2 * short * short * rows + base,
    }
    price = {"shared_polynomial": _EXCHANGE_FLOPS * short * short}
    form = min(flops, key=lambda name: flops[name] + price.get(name, 0))
    return form, flops[form]


def gram_segments(steps: int, coefficients: CoefficientSpec = "jordan") -> int:
    """Segments of the Gram form's iteration: one more than it has restarts."""
    return len(find_restart_steps(resolve_coefficients(coefficients, steps).steps)) + 1


def sharded_cost(
    m: int, n: int, parts: int, steps: int = 5, coefficients: CoefficientSpec = "jordan", method: Method = "standard"
) -> ShardedCost:
    """The cost for each of ``parts`` ranks to orthogonalize one ``(m, n)`` matrix with ``"scale_free"`` normalization.

    For one part and the standard method, operations equal those of
    :func:`~hf_emopt.linalg.newton_schulz.newton_schulz_flops`. Those of square matrices scale as ``1 / parts``; for
    others up to half as much again is spent, or an exchange more.
    """
    short, long = min(m, n), max(m, n)
    triangle = short * (short + 1) // 2
    if method == "standard":
        form, flops = cheapest_form(short, long, parts)
        exchanged = (triangle,) * steps if form == "shared_polynomial" else ()
        return ShardedCost(steps * flops, (1, 1) + (triangle,) * steps, exchanged)
    segments = gram_segments(steps, coefficients)
    square = steps + 3 * (steps - segments)  # P of each step; Q and R where a segment goes on
    flops = segments * 4 * short * short * -(-long // parts) + 2 * square * short**3
    return ShardedCost(flops, (2 * parts,) + (triangle,) * segments)
