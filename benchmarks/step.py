"""Level `step`: a whole optimizer step of `jax_dora.models` by how much of it is kept in memory.

Llama 3 8B's dimensions, rank 16 on all projections, 2 × 4096 tokens, loss on all tokens, AdamW on
the adapters. LoRA and DoRA take the same decoder and the same budget; random weights cost what
others do.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.model.adapters import linear_of
from benchmarks.model.decoder import OPTIMIZER, Loss, update
from benchmarks.model.protocol import LLAMA3
from benchmarks.results import Row, attempted, milliseconds, over
from jax_dora.models import DecoderConfig, activations, make_model, next_token_loss

LLAMA_3_8B = DecoderConfig.from_hf(LLAMA3.hf_config(LLAMA3.layers, 8192) | {"model_type": "llama"})
TINY_DECODER = DecoderConfig(256, 64, 96, 2, 4, 2, 16)


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
            yield over(row, lora, "over_lora")
            lora = row


def _measured(kind: str, budget: Budget, settings: Settings, device: str) -> Row:
    attention = "cudnn" if device == "cuda" else "xla"
    changes = {"attention": attention, "memory": budget.memory, "unroll": budget.unroll}
    config = dataclasses.replace(settings.decoder, **changes)
    made = make_model(config, linear=linear_of(kind, settings.rank))
    kept = activations.plan(config, *settings.shape)
    row = {"kept": [one.name + (f" {one.width}" if one.width else "") for one in kept]}
    return timed(made, config.vocab_size, settings.shape, settings.rounds) | row


def timed(
    model: nnx.Module,
    vocabulary: int,
    shape: tuple[int, int],
    rounds: int,
    loss: Loss | None = None,
    segments: jax.Array | None = None,
    profile: Callable[[Callable[[], Any]], Row] | None = None,
) -> Row:
    """Returns the wall time of an optimizer step of a model's adapters, its memory and its loss,
    and what `profile` finds in one more step."""
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    state = OPTIMIZER.init(trained)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape)
    data = (jnp.asarray(tokens, jnp.int32), segments)
    begin = time.monotonic()
    one = jax.jit(functools.partial(update, graphdef, loss or mean_loss), donate_argnums=(0, 2))
    run = one.lower(trained, frozen, state, *data).compile()
    memory: Any = run.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    row: Row = {
        "compile_s": time.monotonic() - begin,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": held + memory.temp_size_in_bytes,
    }
    times, value = [], None
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        value, trained, state = run(trained, frozen, state, *data)
        jax.block_until_ready((value, trained))
        if turn > 1:  # The first two warm up.
            times.append(time.perf_counter() - begin)
    row |= milliseconds(times) | {"loss": float(jnp.asarray(value))}
    row["tokens_per_s"] = shape[0] * shape[1] / row["ms"] * 1e3
    return row | (profile(lambda: run(trained, frozen, state, *data)) if profile else {})


def mean_loss(model: Any, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """Returns the mean cross-entropy of all tokens, in chunks whose gradient is taken in the same
    pass."""
    weights = jnp.ones(tokens.shape, jnp.float32)
    targets = jnp.roll(tokens, -1, 1)
    found = next_token_loss(model, tokens, targets, weights, segment_ids=segments)
    return found.total / found.weight
