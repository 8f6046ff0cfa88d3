"""Level `kv_cache`: decoding with keys and values in FP8, compared with the model's bf16.

    copy        the card's copy rate, bytes read plus written, by a program of XLA
    attention   `jax_dora.ops.decode_attention` alone: one layer, all rows of the same length
    write       one token of each row and layer, transformed, coded and appended
    decode      the server's decoding program for the whole model, with random weights

The model has Llama 3 8B's dimensions and 64 rows, of 128 and of 8,192 tokens each. The cache is
full of pseudorandom numbers, since a cache of zeros would draw less power.

A line of `attention` has its device time with a cold L2 cache, the bytes of codes and scales that
it has to read, and `of_copy`, their rate divided by the copy rate. A line of `decode` is one format
at one length: the median wall time of a step, tokens per second, the bytes of the cache,
`of_bf16`, its tokens per second divided by those of the bf16 cache, and the kernels of a step with
the time that they take together, and by name (name: [launches, µs]). A line of `write` has the
kernels of the pass that ends a step, in the same way.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import clock
from benchmarks.results import Row, with_ratio
from benchmarks.step import LLAMA_3_8B, TINY_DECODER
from jax_dora.lm.models import Cache, CausalLM, DecoderConfig, make_cache, make_model
from jax_dora.lm.models.decoder import for_inference
from jax_dora.lm.serve.programs import model_programs
from jax_dora.ops import decode_attention
from jax_dora.quantisation import QTYPE

FORMATS = (None, QTYPE)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      lengths: tokens of each row.
      steps: number of steps in a series; `rounds` series are timed.
      copied: number of bf16 elements whose copying is timed.
    """

    config: DecoderConfig = LLAMA_3_8B
    rows: int = 64
    lengths: tuple[int, ...] = (128, 8192)
    steps: int = 20
    rounds: int = 5
    copied: int = 2**30
    only: tuple[str, ...] = ("attention", "write", "decode")


TINY = Settings(TINY_DECODER, rows=3, lengths=(20, 130), steps=2, rounds=1, copied=2**10)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields the rows of the level."""
    rate = None
    if "attention" in settings.only:
        x = jnp.zeros((settings.copied,), jnp.bfloat16)
        us = _device_time(jax.jit(lambda x: x + 1), (x,), device)
        rate = 2 * x.nbytes / us * 1e6
        yield {"work": "copy", "us": us, "tb_per_s": rate / 1e12}
    if "attention" in settings.only:
        for length in settings.lengths:
            yield _attention(settings, length, device, rate)
    if "write" in settings.only:
        for kv_cache in FORMATS:
            yield _write(settings, settings.lengths[0], kv_cache, device)
    if "decode" in settings.only:
        model = make_model(settings.config)
        for length in settings.lengths:
            base = None
            for kv_cache in FORMATS:
                row = _decode(settings, model, length, kv_cache, device)
                yield with_ratio(row, base, "of_bf16", "tokens_per_s")
                base = base or row


def _device_time(step: Any, operands: tuple[Any, ...], device: str) -> float:
    clock.synchronise(step(*operands))
    return clock.kernel_time("jax", step, [operands], device).median


def _filled(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns pseudorandom numbers between -1 and 1, without temporary memory."""

    def fill() -> jax.Array:
        bits = jnp.zeros(shape, jnp.uint32)
        for axis, odd in zip(
            range(len(shape)), (40503, 9176, 2654435761, 1103515245, 69069), strict=False
        ):
            bits = (bits + lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(odd)
            bits = bits ^ (bits >> 15)
        return (bits.astype(jnp.float32) * 2.0**-31 - 1).astype(dtype)

    return jax.jit(fill)()


def _cache(config: DecoderConfig, rows: int, length: int, room: int, kv_cache: str | None) -> Any:
    """Returns a cache whose rows hold `length` tokens, with room for more."""
    empty = jax.eval_shape(lambda: make_cache(config, rows, length + room, kv_cache))
    keys, values = (
        jax.tree.map(lambda x: _filled(x.shape, x.dtype), one) for one in (empty.keys, empty.values)
    )
    if kv_cache is not None:
        keys, values = (x._replace(scales=jnp.abs(x.scales) + 2.0**-8) for x in (keys, values))
    lengths = jnp.full((rows,), length, jnp.int32)
    return empty._replace(keys=keys, values=values, lengths=lengths)


def _attention(settings: Settings, length: int, device: str, rate: float | None) -> Row:
    config, rows = settings.config, settings.rows
    layer = dataclasses.replace(config, num_hidden_layers=1)
    cache = _cache(layer, rows, length, 0, FORMATS[1])
    heads = config.num_attention_heads, *[config.num_key_value_heads] * 2
    q, key, value = (_filled((rows, n, config.head_dim), config.dtype) for n in heads)
    step = jax.jit(decode_attention, static_argnames=("implementation",))
    us = _device_time(step, (q, key, value, cache.keys, cache.values, cache.lengths, 0), device)
    tokens = 2 * rows * config.num_key_value_heads * length
    amount = tokens * (config.head_dim + 4)
    row: Row = {"work": "attention", "rows": rows, "length": length, "us": us, "bytes": amount}
    return row if rate is None else row | {"of_copy": amount / us * 1e6 / rate}


def _write(settings: Settings, length: int, kv_cache: str | None, device: str) -> Row:
    config, rows = settings.config, settings.rows
    cache = _cache(config, rows, length, 8, kv_cache)
    shape = config.num_hidden_layers, rows, 1, config.num_key_value_heads, config.head_dim
    new = _filled(shape, config.dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def write(cache: Cache, new: jax.Array) -> Cache:
        return cache.with_tokens(new, new, cache.positions(1), None, None)

    def step() -> Any:
        nonlocal cache
        cache = write(cache, new)
        return cache.lengths

    clock.synchronise(step())
    row: Row = {"work": "write", "kv_cache": kv_cache or "bf16", "rows": rows, "length": length}
    return row | (_kernels(step) if device == "cuda" else {})


def _kernels(step: Any) -> Row:
    """Returns the number of kernels of a step, their time, and that by name."""
    kernels = clock.device_clock().kernels(step)
    total = sum(us for _, us in kernels)
    return {
        "kernels": len(kernels),
        "device_ms": total / 1e3,
        "by_name": clock.by_name(kernels),
    }


def _decode(
    settings: Settings, model: CausalLM, length: int, kv_cache: str | None, device: str
) -> Row:
    config, rows = model.config, settings.rows
    room = (settings.rounds + 2) * settings.steps
    cache = _cache(config, rows, length, room, kv_cache)
    graphdef, state = for_inference(model)
    program = model_programs(graphdef, ())[1]
    zeros = jnp.zeros((rows,), jnp.int32)
    logits = jnp.zeros((rows, config.vocab_size), config.dtype)
    row: Row = {"work": "decode", "kv_cache": kv_cache or "bf16", "rows": rows, "length": length}
    row["cache_bytes"] = sum(x.nbytes for x in jax.tree.leaves(cache))
    begin = time.monotonic()

    def step() -> Any:
        nonlocal logits, cache
        logits, cache = program(state, None, cache, logits, zeros - 1, zeros, zeros + 1)
        return logits

    for _ in range(3):
        clock.synchronise(step())
    row["compile_s"] = time.monotonic() - begin
    times, result = [], None
    for _ in range(settings.rounds):
        begin = time.perf_counter()
        for _ in range(settings.steps):
            result = step()
        clock.synchronise(result)
        times.append((time.perf_counter() - begin) / settings.steps)
    seconds = statistics.median(times)
    row |= {"ms": 1e3 * seconds, "spread_ms": 1e3 * (max(times) - min(times))}
    row |= {"tokens_per_s": rows / seconds}
    return row | (_kernels(step) if device == "cuda" else {})
