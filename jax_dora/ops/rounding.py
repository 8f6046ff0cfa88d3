"""Rounding a kernel to a quantised one: symmetric, by the largest magnitude of each tile.

    scale = max |W| / bound      qvalue = round(W / scale)

bound is NF4's 1, an fp8's largest number, and half a step beyond an integer's, so that its last
step is as wide as the others: what `qwix.quantize` does by default, computed in fp32 whatever W's
dtype is, with the very scales that are stored.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.ops import quantised

# The least number of a tile is a tie, in int4 -7.5 between -7 and -8. Which it becomes would depend
# on the last bit of the quotient, and so on the program, such as that of a mesh.
_INWARDS = np.float32(1 - 2.0**-20)
_MIDPOINTS = np.add(quantised.NF4[1:], quantised.NF4[:-1], dtype=np.float32) / 2


def bound(qtype: str) -> float:
    """Returns the number that the largest magnitude of a tile is divided by."""
    if qtype == "nf4":
        return 1.0
    if qtype.startswith("int"):
        return float(jnp.iinfo(qtype).max) + 0.5
    return float(jnp.finfo(qtype).max)


def round_to(array: jax.Array, qtype: str, tile: tuple[int, ...], scale_dtype: Any) -> Any:
    """Returns `array` as a `qwix.QArray`.

    Args:
      array: a float array.
      qtype: one of `quantised.FORMATS`.
      tile: the size of a tile along each axis; it divides the axis.
      scale_dtype: of the scales.
    """
    qvalue, scale = _rounded(array, qtype, tile, jnp.dtype(scale_dtype))
    return make(qvalue, scale, qtype)


def make(qvalue: Any, scale: Any, qtype: str) -> Any:
    """Returns the `qwix.QArray` of these arrays.

    Raises:
      ModuleNotFoundError: qwix is not installed.
    """
    try:
        from qwix import QArray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "quantised kernels are qwix.QArrays, and qwix is not installed; install the extra "
            "'quantised': pip install 'jax-dora[quantised]'"
        ) from error
    return QArray(qvalue, scale, None, qtype if qtype == "nf4" else jnp.dtype(qtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rounded(
    array: jax.Array, qtype: str, tile: tuple[int, ...], scale_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    tiles = [size // width for size, width in zip(array.shape, tile, strict=True)]
    apart = [part for pair in zip(tiles, tile, strict=True) for part in pair]
    inner = tuple(range(1, len(apart), 2))
    array_of_tiles = array.reshape(apart)
    largest = jnp.max(jnp.abs(array_of_tiles), axis=inner).astype(jnp.float32)
    # XLA's largest of NaN and numbers is one of the numbers on some CPUs.
    largest = jnp.where(jnp.isnan(array_of_tiles).any(axis=inner), jnp.nan, largest)
    scale = (largest / bound(qtype)).astype(scale_dtype)
    # A tile of zeros has any scale.
    least = math.sqrt(jnp.finfo(scale_dtype).tiny)
    scale = jnp.where(scale < least, jnp.ones_like(scale), scale)
    wide = quantised.spread(scale.astype(jnp.float32), array.shape)
    return _values(array.astype(jnp.float32) / wide, qtype), scale


def _values(ratio: jax.Array, qtype: str) -> jax.Array:
    """Returns the qvalues nearest to numbers in units of the scale."""
    if qtype == "nf4":
        code = jnp.zeros(ratio.shape, jnp.int32)
        for midpoint in _MIDPOINTS:
            code = code + (ratio > midpoint).astype(jnp.int32)
        return code.astype(jnp.uint4)
    if qtype.startswith("int"):
        least, most = jnp.iinfo(qtype).min, jnp.iinfo(qtype).max
        return jnp.clip(jnp.round(ratio * _INWARDS), least, most).astype(qtype)
    most = bound(qtype)
    return jnp.clip(ratio, -most, most).astype(qtype)
