"""Level `sizes`: one layer at the sizes that models have, beside LoRA's: kernel time.

    gradient   forward and backward of a trained layer, its norm in every call
    decode     forward of a frozen layer (`jax_dora.freeze`) and of few rows

Both sides are layers, called as models call them; nothing of a step is left out but the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from benchmarks.clock import kernel_time
from benchmarks.model.adapters import linear_of
from benchmarks.results import Row, over


class Size(NamedTuple):
    """rows × in by in × out, and the adapter's rank."""

    rows: int
    fan_in: int
    out: int
    rank: int


TRAINED = (
    Size(12_608, 768, 3072, 16),
    Size(12_608, 768, 768, 16),
    Size(8192, 1024, 3072, 8),
    Size(8192, 3584, 14_336, 128),
    Size(4100, 4096, 4096, 64),
    Size(4096, 4096, 4096, 64),
)
DECODED = tuple(Size(rows, 4096, 4096, 64) for rows in (1, 8, 32, 128, 256))


class Settings(NamedTuple):
    """The settings of each size; of the tasks those are measured that `only` names."""

    trained: tuple[Size, ...] = TRAINED
    decoded: tuple[Size, ...] = DECODED
    only: tuple[str, ...] = ()


TINY = Settings((Size(24, 64, 48, 4),), (Size(2, 64, 48, 4),))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a size and side; DoRA's and LoRA's one after the other."""
    works = [("decode", size) for size in settings.decoded]
    works += [("gradient", size) for size in settings.trained]
    for task, size in works:
        if settings.only and task not in settings.only:
            continue
        programs = [_program(task, kind, size) for kind in ("LoRA", "DoRA")]
        with ThreadPoolExecutor(2) as pool:
            compiled = list(pool.map(lambda one: one[0].lower(*one[1]).compile(), programs))
        lora = None
        for kind, run, (_, operands) in zip(("LoRA", "DoRA"), compiled, programs, strict=True):
            jax.block_until_ready(run(*operands))
            spread = kernel_time("jax", run, [operands], device)
            row: Row = {"kind": kind, "task": task, **size._asdict(), "us": spread.median}
            row |= {"p10_us": spread.p10, "p90_us": spread.p90, "samples": spread.samples}
            yield over(row, lora, "over_lora", "us")
            lora = row


def _program(task: str, kind: str, size: Size) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted program and its operands."""
    layer = linear_of(kind, size.rank)(
        size.fan_in, size.out, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x, dy = (
        jax.random.normal(jax.random.key(seed), (size.rows, width), jnp.bfloat16)
        for seed, width in enumerate((size.fan_in, size.out))
    )
    if task == "decode":
        if kind == "DoRA":
            layer = jax_dora.freeze(layer)
        graphdef, state = nnx.split(layer)
        return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)), (state, x)
    graphdef, trained, frozen = nnx.split(layer, nnx.LoRAParam, ...)

    def gradient(trained: Any, frozen: Any, x: jax.Array, dy: jax.Array) -> Any:
        call: Callable[..., Any] = lambda trained, x: nnx.merge(graphdef, trained, frozen)(x)  # noqa: E731
        y, pull = jax.vjp(call, trained, x)
        return y, pull(dy)

    return jax.jit(gradient), (trained, frozen, x, dy)
