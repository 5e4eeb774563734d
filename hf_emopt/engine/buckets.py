"""What the steps of all kinds of buckets share."""

from __future__ import annotations

from torch import Tensor

from hf_emopt.distributed.exchange import Exchange
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.pipeline import Task


def _gather(engine: Engine, mine: list[Tensor], everyone: list[Tensor], exchange: Exchange) -> Task:
    arrival = exchange.share(exchange.give(mine))
    yield
    with engine.landing(everyone[0], arrival):
        exchange.take(arrival, everyone)
