"""The adapter's first product, z = drop(x) A, and its gradient, dA = drop(x)ᵀ dz.

Without dropout, drop(x) is x. The dropout mask depends on an element's global position, so a device
that holds a shard of x needs the shard's start.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dropout import drop_for, kept_share
from jax_dora.ops.dtypes import dot_general
from jax_dora.ops.mosaic.projection import dropout_shrink, dropout_shrink_back, shrink


class ReductionSettings(NamedTuple):
    """The settings of `REDUCE` and `REDUCE_BACK`: see `dora_linear`; the dropout's rate, the shape
    of the whole x, of which a device may hold a shard, and the dtype of the result of
    `REDUCE_BACK`."""

    implementation: str | None
    precision: Any
    rate: float
    global_shape: tuple[int, ...]
    dtype: Any = None


class Reduction(NamedTuple):
    """The operands of `REDUCE` and `REDUCE_BACK`: x [..., in]; lora_a [in, r], or dz [..., r] for
    `REDUCE_BACK`; a seed uint32[2] or None; and for `REDUCE` the kernel [in, out], only to wait for
    it."""

    x: Any
    right: Any
    seed: Any
    kernel: Any = None


def _reduce(settings: ReductionSettings, shard: Shard, operands: Reduction) -> tuple[jax.Array]:
    """Returns drop(x) lora_a in x's dtype. Mosaic's product waits for the gather of kernel: XLA,
    which starts a gather as late as it can, would hide it behind this short product."""
    x, lora_a, seed, kernel = operands
    z = _with_kernel(dropout_shrink, settings, shard, operands)
    if z is None and seed is None and shard.gathered:
        call = (x.size // max(x.shape[-1], 1), *lora_a.shape, x.dtype)
        candidate = (shrink, call)
        choice = choose.choose(REDUCE.name, settings.implementation, candidate, optional=True)
        if choice is not None:
            x, _ = lax.optimization_barrier((x, kernel))
            z = choice.during_collectives(True).launch(x, lora_a)
    if z is None:
        z = dot_general(settings.precision, _dropped(settings, shard, operands), lora_a, (-1, 0))
    return (shard.sum(z.reshape(*x.shape[:-1], lora_a.shape[-1]).astype(x.dtype)),)


def _reduce_back(
    settings: ReductionSettings, shard: Shard, operands: Reduction
) -> tuple[jax.Array]:
    """Returns drop(x)ᵀ dz in `settings.dtype`."""
    x, dz, seed, *_ = operands
    d_lora_a = _with_kernel(dropout_shrink_back, settings, shard, operands)
    if d_lora_a is None:
        # Without this barrier XLA may keep drop(x) from the forward pass instead of computing it.
        x, seed = lax.optimization_barrier((x, seed))
        dropped = _dropped(settings, shard, Reduction(x, dz, seed))
        rows = tuple(range(x.ndim - 1))
        d_lora_a = dot_general(settings.precision, dropped, dz, (rows, rows), settings.dtype)
    return (shard.sum(d_lora_a.astype(settings.dtype)),)


REDUCE = Op("reduce", _reduce, Reduction("t i", "i r", "s", "i o"), ("t r",), contracted="i")
REDUCE_BACK = Op(
    "reduce_back", _reduce_back, Reduction("t i", "t r", "s", ""), ("i r",), contracted="t"
)


def _dropped(settings: ReductionSettings, shard: Shard, operands: Reduction) -> jax.Array:
    """Returns drop(x)."""
    x, seed = operands.x, operands.seed
    if seed is None:
        return x
    drop = drop_for(settings.implementation)
    return drop(x, seed, settings.rate, _start(shard, x), settings.global_shape)


def _start(shard: Shard, x: jax.Array) -> tuple[Any, ...]:
    """Returns the global index of the first element of a device's shard of x."""
    names = [f"t{axis}" for axis in range(x.ndim - 1)]
    return tuple(map(shard.start, [*names, "i"], x.shape))


def _with_kernel(
    kernel: Any, settings: ReductionSettings, shard: Shard, operands: Reduction
) -> jax.Array | None:
    """Returns f32 drop(x) right or drop(x)ᵀ right for x [rows, in]; None if XLA computes it."""
    x, right, seed, *_ = operands
    if seed is None:
        return None
    rows, right = x.reshape(-1, x.shape[-1]), right.reshape(-1, right.shape[-1])
    call = (*rows.shape, right.shape[-1], x.dtype)
    choice = choose.choose(REDUCE.name, settings.implementation, (kernel, call), optional=True)
    if choice is None or x.shape[1:-1] != settings.global_shape[1:-1]:
        return None  # The kernel requires that the global numbers of x's rows are consecutive.
    *first, column = _start(shard, x)
    start = (first[0] * math.prod(x.shape[1:-1]) if first else 0, column)
    product = choice.launch(
        rows,
        right.astype(x.dtype),
        seed,
        jnp.stack([jnp.asarray(index, jnp.uint32) for index in start]),
        rate=settings.rate,
        transposed=kernel is dropout_shrink_back,
    )
    return product * jnp.float32(1 / kept_share(settings.rate))
