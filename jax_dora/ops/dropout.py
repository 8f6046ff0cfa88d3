"""Dropout whose mask is drawn where x is read, and drawn again for the gradient.

Element (row, column) of x is kept where 16 bits of a hash of (seed, row, column) are at least
rate·2¹⁶. The mask is a function of four numbers, so whatever reads x computes it: XLA inside its
fusions, the Mosaic kernels between their copies and their products. No array of it is ever in
memory, nor saved for the backward pass. Being a function of the global position, it does not depend
on how x is sharded.

The hash is a chain of 32-bit finalizers, x ^ x>>16, ·0x7feb352d, x ^ x>>15, ·0x846ca68b, x ^ x>>16,
whose bias is 0.17 % (C. Wellons, "Prospecting for hash functions", 2018). Two columns, 32 apart,
share one: the kernels are bound by its arithmetic.
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
    """Says how `dora_linear` drops x in training; a pytree of its seed. With d = drop(x):

        "adapter":  y = base + ((g-1)∘base + g∘(s·dAB)) + bias        LoRA's: only the adapter's x
        "input":    y = base + ((g-1)∘dW + g∘(s·dAB)) + bias          PEFT's: x for all of ΔY

    The second multiplies by the kernel twice.

    Attributes:
      seed: uint32[2], of `draw_seed`; the same seed and shape drop the same elements.
      rate: the probability of being dropped, in [0, 1); rounded to a multiple of 2⁻¹⁶.
      mode: "adapter" or "input".
    """

    seed: jax.Array
    rate: float
    mode: DropoutMode = "adapter"


def draw_seed(key: jax.Array) -> jax.Array:
    """Returns uint32[2] of a JAX random key."""
    return jax.random.bits(key, (2,), jnp.uint32)


def keep_mask(
    seed: jax.Array,
    shape: tuple[int, ...],
    rate: float,
    start: tuple[Any, ...] | None = None,
    whole: tuple[int, ...] | None = None,
) -> jax.Array:
    """Returns bool[shape]: which elements of x [..., in] are kept.

    Args:
      start, whole: of a part of x, where it starts in the whole and the whole's shape.
    """
    starts = [jnp.asarray(one, jnp.uint32) for one in start or (0,) * len(shape)]
    row = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for axis, stride in enumerate(_strides((whole or shape)[:-1])):
        row = row + stride * (starts[axis] + lax.broadcasted_iota(jnp.uint32, row.shape, axis))
    column = lax.broadcasted_iota(jnp.uint32, (1,) * (len(shape) - 1) + shape[-1:], len(shape) - 1)
    column = starts[-1] + column
    pair = ((column >> 6) << 5) | (column & 31)
    bits = pair_bits(row_hash(seed[0], seed[1], row), pair)
    return ((bits >> (((column >> 5) & 1) << 4)) & 0xFFFF) >= threshold(rate)


def row_hash(low: jax.Array, high: jax.Array, row: jax.Array) -> jax.Array:
    """Returns uint32: the hash of rows' numbers (uint32, in row-major order) for a seed."""
    return _mix(_mix(row ^ low) ^ high)


def pair_bits(row_hash: jax.Array, pair: jax.Array) -> jax.Array:
    """Returns uint32: 16 bits each, the lower first, of columns c and c + 32.

    c is 64i + j with j below 32, and `pair` is 32i + j.
    """
    return _mix(row_hash ^ pair)


def threshold(rate: float) -> np.uint32:
    """Returns the least 16 bits with which an element is kept."""
    return np.uint32(min(round(rate * 2**16), 2**16 - 1))


def kept_share(rate: float) -> float:
    """Returns the probability of being kept: 1 - rate, with the rate as rounded."""
    return 1 - int(threshold(rate)) / 2**16


def dropped(
    x: jax.Array,
    seed: jax.Array,
    rate: float,
    start: tuple[Any, ...] | None = None,
    whole: tuple[int, ...] | None = None,
) -> jax.Array:
    """Returns x over the share that is kept, where it is kept, else 0.

    Args:
      x: [..., in].
      seed: uint32[2], of `draw_seed`.
      rate: in [0, 1).
      start, whole: as `keep_mask`'s.
    """
    kept = x * jnp.asarray(1 / kept_share(rate), x.dtype)
    return jnp.where(keep_mask(seed, x.shape, rate, start, whole), kept, jnp.zeros((), x.dtype))


drop = jax.custom_vjp(dropped, nondiff_argnums=(2, 4))
"""`dropped`, with a gradient that keeps no mask."""


def _drop_fwd(x, seed, rate, start, whole):
    return drop(x, seed, rate, start, whole), (seed, start)


def _drop_bwd(rate, whole, kept, dy):
    seed, start = kept
    return drop(dy, seed, rate, start, whole), None, None


drop.defvjp(_drop_fwd, _drop_bwd)


def drop_for(implementation: str | None) -> Callable[..., jax.Array]:
    """Returns the `drop` of an implementation."""
    return dropped if implementation == "eager" else drop


def active(dropout: Dropout | None) -> tuple[float, DropoutMode, jax.Array | None]:
    """Returns (rate, mode, seed); (0, "adapter", None) where nothing is dropped.

    Raises:
      TypeError, ValueError: `dropout` is no `Dropout`, or a field is out of range.
    """
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
            f"dropout.seed is {dropout.seed!r}; expected uint32[2], of jax_dora.ops.draw_seed(key)"
        )
    return (dropout.rate, dropout.mode, dropout.seed) if dropout.rate else active(None)


def _strides(shape: tuple[int, ...]) -> list[np.uint32]:
    """Returns the strides of row-major order, wrapping around as uint32 does."""
    return [np.uint32(math.prod(shape[axis + 1 :]) % 2**32) for axis in range(len(shape))]


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
