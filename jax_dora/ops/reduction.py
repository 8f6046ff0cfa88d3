"""The adapter's reduction of x to the rank, z = drop(x) A, and its gradient dA = drop(x)ᵀ dz.

Without dropout, drop(x) is x. A mask is a function of an element's position in the whole of x, of
which a device may have a part.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import choose
from jax_dora.ops.dropout import drop_for, kept_share
from jax_dora.ops.mosaic import dropped_product, dropped_product_back
from jax_dora.ops.operands import Static
from jax_dora.ops.shard import Op, Shard


class Reduction(NamedTuple):
    """The operands: x [..., in]; right, lora_a [in, r] or dz [..., r]; seed uint32[2] or None."""

    x: Any
    right: Any
    seed: Any


def _reduce(static: Static, shard: Shard, operands: Reduction) -> tuple[jax.Array]:
    """Returns drop(x) lora_a in x's dtype."""
    x, lora_a, _ = operands
    found = _by_kernel(dropped_product, static, shard, operands)
    if found is None:
        found = dot_general(static.precision, _seen(static, shard, operands), lora_a, (-1, 0))
    return (shard.sum(found.reshape(*x.shape[:-1], lora_a.shape[-1]).astype(x.dtype)),)


def _reduce_back(static: Static, shard: Shard, operands: Reduction) -> tuple[jax.Array]:
    """Returns drop(x)ᵀ dz."""
    x, dz, seed = operands
    found = _by_kernel(dropped_product_back, static, shard, operands)
    if found is None:
        # XLA may not take the dropped x from the forward pass: that would keep it.
        x, seed = lax.optimization_barrier((x, seed))
        seen = _seen(static, shard, Reduction(x, dz, seed))
        rows = tuple(range(x.ndim - 1))
        found = dot_general(static.precision, seen, dz, (rows, rows), static.dtype)
    return (shard.sum(found.astype(static.dtype)),)


REDUCE = Op("reduce", _reduce, Reduction("t i", "i r", "s"), ("t r",), contracted="i")
REDUCE_BACK = Op(
    "reduce_back", _reduce_back, Reduction("t i", "t r", "s"), ("i r",), contracted="t"
)


def _seen(static: Static, shard: Shard, operands: Reduction) -> jax.Array:
    x, _, seed = operands
    if seed is None:
        return x
    drop = drop_for(static.implementation)
    return drop(x, seed, static.rate, _start(shard, x), static.whole)


def _start(shard: Shard, x: jax.Array) -> tuple[Any, ...]:
    """Returns where a device's part of x starts in the whole."""
    names = [f"t{axis}" for axis in range(x.ndim - 1)]
    return tuple(map(shard.start, [*names, "i"], x.shape))


def _by_kernel(kernel: Any, static: Static, shard: Shard, operands: Reduction) -> jax.Array | None:
    """Returns f32: drop(x) right, or drop(x)ᵀ right, of x's rows; None where XLA makes it."""
    x, right, seed = operands
    if seed is None:
        return None
    rows, right = x.reshape(-1, x.shape[-1]), right.reshape(-1, right.shape[-1])
    call = (*rows.shape, right.shape[-1], x.dtype)
    named = static.op, static.implementation
    choice = choose.choose(*named, (kernel, call), optional=True)
    if choice is None or x.shape[1:-1] != static.whole[1:-1]:
        return None  # The kernel counts rows that follow each other.
    *first, column = _start(shard, x)
    start = (first[0] * math.prod(x.shape[1:-1]) if first else 0, column)
    product = dropped_product.launch(
        rows,
        right.astype(x.dtype),
        seed,
        jnp.stack([jnp.asarray(at, jnp.uint32) for at in start]),
        rate=static.rate,
        transposed=kernel is dropped_product_back,
        **choice.knobs,
    )
    return product * jnp.float32(1 / kept_share(static.rate))


def dot_general(precision, a, b, axes, dtype=None):
    """Returns a and b, in a's dtype, contracted over `axes`, accumulated in fp32, in `dtype`."""
    left, right = (
        [axis % operand.ndim for axis in ((ax,) if isinstance(ax, int) else ax)]
        for ax, operand in zip(axes, (a, b), strict=True)
    )
    return lax.dot_general(
        a,
        b.astype(a.dtype),
        ((left, right), ((), ())),
        precision=precision,
        preferred_element_type=dtype or a.dtype,
    )


def static_precision(precision: jax.lax.PrecisionLike) -> Any:
    """Returns a precision of `lax.dot_general` in a form that can be static, a string's too."""
    return lax.Precision(precision) if isinstance(precision, str) else precision
