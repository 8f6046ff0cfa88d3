"""Level `step`: a whole optimizer step of `jax_dora.models` by how much of it is kept in memory.

Llama 3 8B's dimensions, rank 16 on all projections, 2 × 4096 tokens, loss on all tokens, AdamW.
LoRA and DoRA take the same decoder and the same budget; random weights cost what others do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.results import Row, attempted
from benchmarks.step import LLAMA_3_8B, linear_of, timed
from benchmarks.step import TINY as TINY_DECODER
from jax_dora.models import DecoderConfig, activations, make_model


class Budget(NamedTuple):
    """A point of the curve: `memory` and `unroll` as in `DecoderConfig`."""

    name: str
    memory: Any
    unroll: bool


BUDGETS = (
    Budget("all kept that fits, unrolled", "auto", True),
    Budget("every layer rematerialised", None, False),
    Budget("all kept that fits", "auto", False),
    Budget("12 GiB", 12.0, False),
)


class Settings(NamedTuple):
    decoder: DecoderConfig = LLAMA_3_8B
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    rounds: int = 10


TINY = Settings(TINY_DECODER, (2, 32), rounds=1)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; DoRA's and LoRA's of a budget one after the other."""
    for budget in BUDGETS:
        lora = None
        for kind in ("LoRA", "DoRA"):
            row: Row = {"kind": kind, "budget": budget.name, "unroll": budget.unroll}
            row |= {"batch": settings.shape[0], "time": settings.shape[1], "rank": settings.rank}
            row = attempted(row, functools.partial(_measured, kind, budget, settings, device))
            if kind == "LoRA":
                lora = row.get("ms")
            elif lora and "ms" in row:
                row["over_lora"] = row["ms"] / lora
            yield row


def _measured(kind: str, budget: Budget, settings: Settings, device: str) -> Row:
    attention = "cudnn" if device == "cuda" else "xla"
    changes = {"attention": attention, "memory": budget.memory, "unroll": budget.unroll}
    config = dataclasses.replace(settings.decoder, **changes)
    made = make_model(config, linear=linear_of(kind, config, settings.rank))
    kept = activations.plan(config, *settings.shape)
    row = {"kept": [one.name + (f" {one.width}" if one.width else "") for one in kept]}
    return timed(made, config.vocab_size, settings.shape, settings.rounds) | row
