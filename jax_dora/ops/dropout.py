"""Dropout with a mask that is computed from a counter, wherever x is read.

Element (row, column) of x is kept if 16 bits of a hash of (seed, row, column) are at least
rate·2¹⁶. XLA computes the mask inside its fusions, and the Mosaic kernels compute it between their
copies and products. The mask is never stored, and the backward pass computes it again. It depends
on an element's global position, so it does not depend on how x is sharded.

The hash is a chain of 32-bit finalizers, x ^ x>>16, ·0x7feb352d, x ^ x>>15, ·0x846ca68b, x ^ x>>16,
with a bias of 0.17 % (C. Wellons, "Prospecting for hash functions", 2018). Two columns that are 32
apart share one hash, because its arithmetic limits the kernels' speed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dora_common.hyperparameters import DropoutMode


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["seed"], meta_fields=["rate", "mode"]
)
@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of x in `dora_linear`, for training. It is a pytree with the seed as its leaf.

    With d = drop(x), the modes are

        "adapter":  y = base + ((g-1)∘base + g∘(s·dAB)) + bias    as LoRA: d only for the adapter
        "input":    y = base + ((g-1)∘dW + g∘(s·dAB)) + bias      as PEFT's DoRA: d for all of ΔY

    "input" multiplies by the kernel twice.

    Attributes:
      seed: uint32[2], from `draw_seed`; the same seed and shape drop the same elements.
      rate: the probability that an element is dropped, in [0, 1); rounded to a multiple of 2⁻¹⁶.
      mode: "adapter" or "input".
    """

    seed: jax.Array
    rate: float
    mode: DropoutMode = "adapter"


def draw_seed(key: jax.Array) -> jax.Array:
    """Returns a seed uint32[2] that is drawn from a JAX random key."""
    return jax.random.bits(key, (2,), jnp.uint32)


def keep_mask(
    seed: jax.Array,
    shape: tuple[int, ...],
    rate: float,
    start: tuple[Any, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """Returns bool[shape]: which elements of x [..., in] are kept. For a shard of x, `start` is the
    global index of its first element, and `global_shape` the shape of the whole array."""
    starts = [jnp.asarray(index, jnp.uint32) for index in start or (0,) * len(shape)]
    row = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for axis, stride in enumerate(_strides((global_shape or shape)[:-1])):
        row = row + stride * (starts[axis] + lax.broadcasted_iota(jnp.uint32, row.shape, axis))
    column = lax.broadcasted_iota(jnp.uint32, (1,) * (len(shape) - 1) + shape[-1:], len(shape) - 1)
    column = starts[-1] + column
    pair = ((column >> 6) << 5) | (column & 31)
    bits = pair_bits(row_hash(seed[0], seed[1], row), pair)
    return ((bits >> (((column >> 5) & 1) << 4)) & 0xFFFF) >= threshold(rate)


def row_hash(low: jax.Array, high: jax.Array, row: jax.Array) -> jax.Array:
    """Returns uint32, the hash of uint32 row numbers in row-major order, by the seed's two
    numbers."""
    return _mix(_mix(row ^ low) ^ high)


def pair_bits(row_hash: jax.Array, pair: jax.Array) -> jax.Array:
    """Returns uint32, the random bits of the columns c = 64i + j (lower 16) and c + 32 (upper 16)
    with j < 32, given the row's hash and the pair's number, 32i + j."""
    return _mix(row_hash ^ pair)


def threshold(rate: float) -> np.uint32:
    """Returns the smallest 16-bit number with which an element is kept."""
    return np.uint32(min(round(rate * 2**16), 2**16 - 1))


def kept_share(rate: float) -> float:
    """Returns the probability that an element is kept: 1 - the rounded rate."""
    return 1 - int(threshold(rate)) / 2**16


def dropped(
    x: jax.Array,
    seed: jax.Array,
    rate: float,
    start: tuple[Any, ...] | None = None,
    global_shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """Returns x [..., in] / `kept_share(rate)` where x is kept, else 0; see `keep_mask`."""
    kept = x * jnp.asarray(1 / kept_share(rate), x.dtype)
    mask = keep_mask(seed, x.shape, rate, start, global_shape)
    return jnp.where(mask, kept, jnp.zeros((), x.dtype))


drop = jax.custom_vjp(dropped, nondiff_argnums=(2, 4))
"""`dropped`, with a gradient that computes the mask again instead of keeping it."""


def _drop_fwd(x, seed, rate, start, global_shape):
    return drop(x, seed, rate, start, global_shape), (seed, start)


def _drop_bwd(rate, global_shape, kept, dy):
    seed, start = kept
    return drop(dy, seed, rate, start, global_shape), None, None


drop.defvjp(_drop_fwd, _drop_bwd)


def drop_for(implementation: str | None) -> Callable[..., jax.Array]:
    """Returns `drop`, or for "eager" `dropped`, which JAX differentiates to any order."""
    return dropped if implementation == "eager" else drop


def active(dropout: Dropout | None) -> tuple[float, DropoutMode, jax.Array | None]:
    """Returns (rate, mode, seed); (0, "adapter", None) if nothing is dropped. Raises TypeError or
    ValueError if `dropout` is not a `Dropout`, or a field is out of range."""
    if dropout is None:
        return 0.0, "adapter", None
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout is {dropout!r}; expected a jax_dora.ops.Dropout")
    if not 0 <= dropout.rate < 1:
        raise ValueError(f"dropout.rate is {dropout.rate!r}; expected a number in [0, 1)")
    if dropout.mode not in get_args(DropoutMode):
        raise ValueError(f"dropout.mode is {dropout.mode!r}; expected 'adapter' or 'input'")
    if jnp.shape(dropout.seed) != (2,) or dropout.seed.dtype != jnp.uint32:
        raise ValueError(
            f"dropout.seed is {dropout.seed!r}; expected uint32[2]: use jax_dora.ops.draw_seed(key)"
        )
    return (dropout.rate, dropout.mode, dropout.seed) if dropout.rate else active(None)


def _strides(shape: tuple[int, ...]) -> list[np.uint32]:
    """Returns the strides of row-major order, modulo 2³²."""
    return [np.uint32(math.prod(shape[axis + 1 :]) % 2**32) for axis in range(len(shape))]


def _mix(x: jax.Array) -> jax.Array:
    """Returns the 32-bit finalizer of the module's docstring."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
