"""A whole optimizer step of `jax_dora.models`, timed: loss on all tokens, AdamW on the adapters."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_dora
from benchmarks.model.decoder import LoRALinear
from benchmarks.results import Row
from jax_dora.models import DecoderConfig, next_token_loss
from jax_dora.models.config import Rope

Loss = Callable[..., jax.Array]
OPTIMIZER = optax.adamw(1e-4)
LORA_B_INIT = nnx.initializers.normal(0.0035)
LLAMA_3_8B = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=Rope(theta=500_000.0),
)
TINY = DecoderConfig(256, 64, 96, 2, 4, 2, 16)


def linear_of(kind: str, config: DecoderConfig, rank: int, **options: Any) -> Any:
    """Returns what makes a projection: kind "LoRA" or "DoRA", the latter with further options."""
    if kind == "LoRA":
        return functools.partial(LoRALinear, rank=rank, scale=2.0, b_init=LORA_B_INIT)
    adapter = {"rank": rank, "alpha": 2 * rank, "adapter_dtype": config.dtype}
    return functools.partial(jax_dora.DoRALinear, **adapter, lora_b_init=LORA_B_INIT, **options)


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
            times.append(1e3 * (time.perf_counter() - begin))
    ms = statistics.median(times)
    row |= {"ms": ms, "spread_ms": max(times) - min(times), "loss": float(jnp.asarray(value))}
    row["tokens_per_s"] = shape[0] * shape[1] / ms * 1e3
    return row | (profile(lambda: run(trained, frozen, state, *data)) if profile else {})


def mean_loss(model: Any, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """Returns the mean cross-entropy of all tokens, in chunks whose gradient is taken in the same
    pass."""
    weights = jnp.ones(tokens.shape, jnp.float32)
    targets = jnp.roll(tokens, -1, 1)
    found = next_token_loss(model, tokens, targets, weights, segment_ids=segments)
    return found.total / found.weight


def update(graphdef: Any, loss: Loss, trained: Any, frozen: Any, state: Any, *data: Any) -> Any:
    """Returns the loss of `data` before an optimizer step, and the adapters and the optimizer's
    state after it."""

    def of_adapters(trained: Any) -> jax.Array:
        # Dropout counts its draws in what is merged.
        return loss(nnx.merge(graphdef, trained, frozen, copy=True), *data)

    value, gradients = jax.value_and_grad(of_adapters)(trained)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return value, optax.apply_updates(trained, updates), state
