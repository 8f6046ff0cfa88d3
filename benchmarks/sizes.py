"""Level `sizes`: one layer of DoRA at the sizes that models have, compared with the same of LoRA.

    gradient   forward and backward pass of a layer in training, with the norm in every call
    decode     forward pass of a frozen layer (`jax_dora.freeze`) with few rows

Both are Flax layers, called as a model calls them. One line is one size of one method: the device
time (`us`) with a cold L2 cache, its outer tenths, the number of timings, and `over_lora`, DoRA's
time divided by LoRA's.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from benchmarks.clock import kernel_time
from benchmarks.model.adapters import linear_of
from benchmarks.results import Row, with_ratio


class Size(NamedTuple):
    """rows × fan_in times fan_in × out, and the adapter's rank."""

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
    """The sizes of each task; `only` names the tasks to measure, all of them if it is empty."""

    trained: tuple[Size, ...] = TRAINED
    decoded: tuple[Size, ...] = DECODED
    only: tuple[str, ...] = ()


TINY = Settings((Size(24, 64, 48, 4),), (Size(2, 64, 48, 4),))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each size and method; LoRA and DoRA of a size follow each other."""
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
            yield with_ratio(row, lora, "over_lora", "us")
            lora = row


def _program(task: str, kind: str, size: Size) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted program and its operands."""
    options: Any = {"use_bias": False, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layer = linear_of(kind, size.rank)(size.fan_in, size.out, **options)
    x, dy = (
        jax.random.normal(jax.random.key(seed), (size.rows, width), jnp.bfloat16)
        for seed, width in enumerate((size.fan_in, size.out))
    )
    if task == "decode":
        layer = jax_dora.freeze(layer) if kind == "DoRA" else layer
        graphdef, state = nnx.split(layer)
        return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)), (state, x)
    graphdef, trained, frozen = nnx.split(layer, nnx.LoRAParam, ...)

    def gradient(trained: Any, frozen: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda t, x: nnx.merge(graphdef, t, frozen)(x), trained, x)
        return y, pull(dy)

    return jax.jit(gradient), (trained, frozen, x, dy)
