"""Level `step`: an optimizer step of `jax_dora.lm.models`, for several memory budgets.

LoRA and DoRA of rank 16 on all projections of a decoder of Llama 3 8B's dimensions with random bf16
weights; 2 × 4096 tokens, the loss on all of them, AdamW on the adapters. A budget says how much of
a layer's results is kept for the gradient: all that fits into memory, 12 GiB, or nothing, with the
layers unrolled or in a scan.

One line is one method with one budget: the median wall time of a step (`ms`) and the largest minus
the smallest (`spread_ms`), tokens per second, XLA's account of memory, compile time, the last loss,
what was kept, and `over_lora`, DoRA's time divided by LoRA's with the same budget.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.model.adapters import linear_of
from benchmarks.model.decoder import OPTIMIZER, update
from benchmarks.model.protocol import LLAMA3
from benchmarks.results import Row, attempt, milliseconds, with_ratio
from jax_dora.lm.models import CausalLM, DecoderConfig, activations, make_model, next_token_loss
from jax_dora.lm.models.decoder import step_options

LLAMA_3_8B = DecoderConfig.from_hf(LLAMA3.hf_config(LLAMA3.layers, 8192) | {"model_type": "llama"})
TINY_DECODER = DecoderConfig(256, 64, 96, 2, 4, 2, 16)


class Budget(NamedTuple):
    """`memory` and `unroll` are those of `DecoderConfig`."""

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
    """Yields one row for each budget and method; LoRA and DoRA of a budget follow each other."""
    for budget in BUDGETS:
        lora = None
        for kind in ("LoRA", "DoRA"):
            row: Row = {"kind": kind, "budget": budget.name, "unroll": budget.unroll}
            row |= {"batch": settings.shape[0], "time": settings.shape[1], "rank": settings.rank}
            row = attempt(row, functools.partial(_measured, kind, budget, settings, device))
            yield with_ratio(row, lora, "over_lora")
            lora = row


def _measured(kind: str, budget: Budget, settings: Settings, device: str) -> Row:
    attention = "cudnn" if device == "cuda" else "xla"
    changes = {"attention": attention, "memory": budget.memory, "unroll": budget.unroll}
    config = dataclasses.replace(settings.decoder, **changes)
    model = make_model(config, linear=linear_of(kind, settings.rank))
    plan = activations.plan(config, *settings.shape)
    row = {"kept": [kept.name + (f" {kept.width}" if kept.width else "") for kept in plan]}
    return timed(model, config.vocab_size, settings.shape, settings.rounds) | row


def timed(model: CausalLM, vocabulary: int, shape: tuple[int, int], rounds: int) -> Row:
    """Returns the wall time, memory and loss of optimizer steps of a model's adapters.

    Args:
      shape: batch and time.
      rounds: number of timed steps, after two that are not timed.
    """
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    state = OPTIMIZER.init(trained)
    options: dict[str, Any] = {}
    drawn = np.random.default_rng(0).integers(0, vocabulary, shape)
    tokens = jnp.asarray(drawn, jnp.int32)
    if (sharding := model.config.sharding) is not None:
        tokens, state = jax.device_put(tokens, sharding.rows), sharding.placed(state)
        kept = jax.tree.map(lambda array: array.sharding, (trained, state))
        options = {"out_shardings": (None, *kept)}
    begin = time.monotonic()
    make = functools.partial(update, graphdef, _mean_loss)
    step = jax.jit(make, donate_argnums=(0, 2), **options)
    run = step.lower(trained, frozen, state, tokens).compile(dict(step_options(model)))
    memory: Any = run.memory_analysis()
    arrays = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    row: Row = {
        "compile_s": time.monotonic() - begin,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": arrays + memory.temp_size_in_bytes,
    }
    times, value = [], None
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        value, trained, state = run(trained, frozen, state, tokens)
        jax.block_until_ready((value, trained))
        if turn > 1:  # The first two steps are warm-up.
            times.append(time.perf_counter() - begin)
    row |= milliseconds(times) | {"loss": float(jnp.asarray(value))}
    return row | {"tokens_per_s": shape[0] * shape[1] / row["ms"] * 1e3}


def _mean_loss(model: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of all tokens, computed in chunks that also compute their
    gradient."""
    weights = jnp.ones(tokens.shape, jnp.float32)
    targets = jnp.roll(tokens, -1, 1)
    loss = next_token_loss(model, tokens, targets, weights)
    return loss.total / loss.weight
