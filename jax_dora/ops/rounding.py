"""Quantises a kernel: symmetrically, by the largest magnitude of each tile.

    scale = max |W| / bound      qvalue = round(W / scale)

bound is 1 for NF4, and the largest number of an FP8 format. For an integer format it is the largest
integer plus one half, so that the outermost step is as wide as the others. `qwix.quantize` does the
same by default. Here W / scale is computed in fp32 for every dtype of W, with the scale as it is
stored, after its rounding to the scales' dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.ops import quantised

# A number of the largest magnitude is halfway between two integers: -7.5 in int4. How it is rounded
# would depend on the quotient's last bit, which differs between programs, as with and without a
# mesh. This factor moves quotients towards zero before they are rounded.
_INWARDS = np.float32(1 - 2.0**-20)
_MIDPOINTS = np.add(quantised.NF4[1:], quantised.NF4[:-1], dtype=np.float32) / 2


def bound(qtype: str) -> float:
    """Returns the number that the largest magnitude of a tile is divided by to get the scale."""
    if qtype == "nf4":
        return 1.0
    if qtype.startswith("int"):
        return float(jnp.iinfo(qtype).max) + 0.5
    return float(jnp.finfo(qtype).max)


def round_to(array: jax.Array, qtype: str, tile: tuple[int, ...], scale_dtype: Any) -> Any:
    """Returns a float array as a `qwix.QArray` of format `qtype`, with scales of `scale_dtype` and
    tiles of the size `tile`, which must divide the axes."""
    qvalue, scale = _rounded(array, qtype, tile, jnp.dtype(scale_dtype))
    return make(qvalue, scale, qtype)


def make(qvalue: Any, scale: Any, qtype: str) -> Any:
    """Returns a `qwix.QArray` without zero points. Raises ModuleNotFoundError if qwix is not
    installed."""
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
    split = [size for pair in zip(tiles, tile, strict=True) for size in pair]
    inner = tuple(range(1, len(split), 2))
    array_of_tiles = array.reshape(split)
    largest = jnp.max(jnp.abs(array_of_tiles), axis=inner).astype(jnp.float32)
    # On some CPUs XLA's maximum of NaN and numbers is a number.
    largest = jnp.where(jnp.isnan(array_of_tiles).any(axis=inner), jnp.nan, largest)
    scale = (largest / bound(qtype)).astype(scale_dtype)
    # A tile of zeros gets the scale 1.
    least = math.sqrt(jnp.finfo(scale_dtype).tiny)
    scale = jnp.where(scale < least, jnp.ones_like(scale), scale)
    wide = quantised.broadcast_tiles(scale.astype(jnp.float32), array.shape)
    return _values(array.astype(jnp.float32) / wide, qtype), scale


def _values(ratio: jax.Array, qtype: str) -> jax.Array:
    """Returns the qvalues nearest to `ratio`, W / scale."""
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
