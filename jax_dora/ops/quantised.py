"""Quantised kernels, `qwix.QArray`s: their formats, their dequantisation and their slices.

    W = (v(qvalue) - zero_point) ∘ scale     [in, out]

v maps NF4's codes to the 16 numbers of its codebook (arXiv 2305.14314, appendix E), and is the
identity for other formats. Each element of scale and zero_point belongs to a tile of W: a scale of
shape [in / t, out / u] has tiles of t × u elements. Leading axes stack several matrices.

This module does not import qwix: a caller that has a `QArray` has imported it.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.ops.dispatch import mesh as meshes

FORMATS = ("nf4", "int4", "int8", "float8_e4m3fn")
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def bits(dtype: Any) -> int:
    """Returns the bits per element in a device's memory, where two 4-bit elements share a byte."""
    return 4 if jnp.dtype(dtype).name in ("int4", "uint4") else 8 * jnp.dtype(dtype).itemsize


def stored_dtype(qtype: str) -> Any:
    """Returns the dtype of the codes of a format."""
    return jnp.dtype(jnp.uint4 if qtype == "nf4" else qtype)


class Format(NamedTuple):
    """The format of a quantised matrix, as a static argument: one of `FORMATS`, the tile (t, u) of
    rows and columns that share a scale, the scales' dtype, and whether there are zero points."""

    qtype: str
    tile: tuple[int, int]
    scale_dtype: Any
    has_zero_point: bool

    @property
    def stored(self) -> Any:
        """Returns the dtype of the codes."""
        return stored_dtype(self.qtype)

    @property
    def packed(self) -> int:
        """Returns the number of elements per byte."""
        return 8 // bits(self.stored)

    def __str__(self) -> str:
        rows, columns = self.tile
        return f"{self.qtype} in tiles of {rows}×{columns}"


def is_quantised(array: Any) -> bool:
    """Returns whether `array` is a `qwix.QArray`."""
    qwix = sys.modules.get("qwix")
    return qwix is not None and isinstance(array, getattr(qwix, "QArray", ()))


def format_of(kernel: Any) -> Format:
    """Returns the format of a quantised matrix [in, out]."""
    rows, columns = (
        size // max(count, 1)
        for size, count in zip(kernel.shape[-2:], kernel.scale.shape[-2:], strict=True)
    )
    has_zero_point = kernel.zero_point is not None
    return Format(qtype_name(kernel), (rows, columns), kernel.scale.dtype, has_zero_point)


def describe(kernel: Any) -> str:
    """Returns the format and the number of scales along each axis, for messages."""
    return f"{qtype_name(kernel)}, scales {'×'.join(map(str, kernel.scale.shape))}"


def qtype_name(kernel: Any) -> str:
    """Returns the name of a format, such as "nf4" or "int8"; the format may be unsupported."""
    return kernel.qtype if isinstance(kernel.qtype, str) else jnp.dtype(kernel.qtype).name


def stored(kernel: Any) -> Any:
    """Returns the array that has the kernel's shape and sharding: the kernel itself, or the qvalue
    of a quantised kernel."""
    return kernel.qvalue if is_quantised(kernel) else kernel


def dense(kernel: Any, dtype: Any) -> jax.Array:
    """Returns a kernel in `dtype`, dequantised if it is quantised."""
    return dequantise(kernel, dtype) if is_quantised(kernel) else kernel.astype(dtype)


def dequantise(kernel: Any, dtype: Any) -> jax.Array:
    """Returns W in `dtype`. It is computed in fp32 (fp64 if the scales or `dtype` are fp64), and
    each element is rounded once."""
    wide = jnp.float64 if jnp.float64 in (kernel.scale.dtype, dtype) else jnp.float32
    values = _values(kernel.qvalue, qtype_name(kernel), wide)
    if kernel.zero_point is not None:
        values = values - broadcast_tiles(kernel.zero_point.astype(wide), values.shape)
    return (values * broadcast_tiles(kernel.scale.astype(wide), values.shape)).astype(dtype)


def _values(qvalue: jax.Array, qtype: str, dtype: Any) -> jax.Array:
    if qtype != "nf4":
        return qvalue.astype(dtype)
    # All 16 values of four bits are valid indices.
    codebook = jnp.asarray(np.array(NF4), dtype)
    # On explicit axes, JAX requires the sharding of the numbers.
    sharding = jax.typeof(qvalue).sharding if meshes.explicit(qvalue) else None
    return codebook.at[qvalue.astype(jnp.uint8)].get(
        mode="promise_in_bounds", out_sharding=sharding
    )


def apply_dense(function: Callable[[Any, Any], Any], x: jax.Array, kernel: Any) -> Any:
    """Returns function(x, W) with W in x's dtype. A quantised kernel is dequantised in the forward
    pass and again in the backward pass, and kept only in its quantised form."""
    if not is_quantised(kernel):
        return function(x, kernel.astype(x.dtype))
    return jax.checkpoint(lambda x, kernel: function(x, dequantise(kernel, x.dtype)))(x, kernel)


def broadcast_tiles(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of `shape` in which each tile is filled with its element of `tiles`."""
    split, wide = [], []
    for size, count in zip(shape, tiles.shape, strict=True):
        untiled = count in (1, size)
        split += [count] if untiled else [count, 1]
        wide += [size] if untiled else [count, size // count]
    return jnp.broadcast_to(tiles.reshape(split), wide).reshape(shape)


def repeated(tiles: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns scales that are repeated along `axis`, such that it has `count` elements."""
    times = count // tiles.shape[axis]
    return tiles if times == 1 else jnp.repeat(tiles, times, axis, total_repeat_length=count)


def with_tiles_for(kernel: Any, devices: tuple[int, ...]) -> Any:
    """Returns a quantised array whose tiles divide over as many `devices` along each axis as its
    elements do: tiles are split, by repeating their scales, if they divide the elements. Otherwise
    XLA would send each device with a part of a tile the whole matrix."""

    def split(tiles: jax.Array) -> jax.Array:
        for axis, (size, parts) in enumerate(zip(kernel.shape, devices, strict=True)):
            count = tiles.shape[axis]
            wanted = math.lcm(count, parts)
            if count > 1 and size % wanted == 0:
                tiles = repeated(tiles, axis, wanted)
        return tiles

    return _replaced(kernel, kernel.qvalue, split)


def slice_rows(kernel: Any, start: Any, count: int) -> Any:
    """Returns rows `start` (a multiple of `rows_per_block`, perhaps traced) to `start + count` of a
    quantised matrix [in, out], quantised; `count` is `rows_per_block` or what remains."""
    tile = format_of(kernel).tile[0]
    scale_rows = max(count // tile, 1)

    def slice_tiles(tiles: jax.Array) -> jax.Array:
        if tiles.shape[0] == 1:
            return tiles
        return lax.dynamic_slice_in_dim(tiles, start // tile, scale_rows)

    qvalue = kernel.qvalue
    is_float = jnp.issubdtype(qvalue.dtype, jnp.floating)
    # On a CPU, XLA would convert all of an FP8 array to fp16 before it slices it.
    codes = lax.bitcast_convert_type(qvalue, jnp.uint8) if is_float else qvalue
    codes = lax.dynamic_slice_in_dim(codes, start, count)
    codes = lax.bitcast_convert_type(codes, qvalue.dtype) if is_float else codes
    return _replaced(kernel, codes, slice_tiles)


def _replaced(kernel: Any, qvalue: jax.Array, tiled: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns a quantised array with new codes, and with `tiled` of its scales and zero points."""
    zero_point = None if kernel.zero_point is None else tiled(kernel.zero_point)
    return type(kernel)(qvalue, tiled(kernel.scale), zero_point, kernel.qtype)


def rows_per_block(kernel: Any, elements: int) -> int:
    """Returns the number of rows of a block with at most `elements` elements, or with one row: a
    multiple or a divisor of the tile's number of rows."""
    in_features, out = kernel.shape
    tile = format_of(kernel).tile[0]
    most = max(elements // max(out, 1), 1)
    if kernel.scale.shape[0] == 1:
        return min(most, in_features)
    if most >= tile:
        return min(most // tile * tile, in_features)
    return next(count for count in range(most, 0, -1) if tile % count == 0)


def as_matrices(kernel: Any, split: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> Any:
    """Returns a quantised array, still quantised, with its axes reshaped to `split` and each of the
    `groups` of these axes joined to one. Scales are repeated along joined axes where a tile would
    not be contiguous."""
    order = [axis for group in groups for axis in group]
    shape = [math.prod(split[axis] for axis in group) for group in groups]

    def arranged(tiles: jax.Array) -> jax.Array:
        tiles = _split_tiles(tiles, kernel.shape, split).transpose(order)
        sizes, first, joined = [split[axis] for axis in order], 0, []
        for group in groups:
            end = first + len(group)
            # Tiles of a joined axis must be contiguous, so only its last tiled axis can keep tiles
            # of several elements: scales are repeated along the axes before.
            tiled = [axis for axis in range(first, end) if tiles.shape[axis] > 1]
            for axis in range(first, tiled[-1] if tiled else first):
                tiles = repeated(tiles, axis, sizes[axis])
            joined.append(math.prod(tiles.shape[first:end]))
            first = end
        return tiles.reshape(joined)

    return _replaced(kernel, kernel.qvalue.reshape(split).transpose(order).reshape(shape), arranged)


def _split_tiles(tiles: jax.Array, shape: tuple[int, ...], split: tuple[int, ...]) -> jax.Array:
    """Returns the scales of an array of `shape`, reshaped for the array in the shape `split`."""
    parts = iter(split)
    result = []
    for axis, size in enumerate(shape):
        sizes = [next(parts)]
        while math.prod(sizes) < size:
            sizes.append(next(parts))
        count = tiles.shape[axis]
        if len(sizes) == 1 or count == 1:
            result += [count, *(1 for _ in sizes[1:])]
        else:
            tiles = repeated(tiles, axis, size)
            result += sizes
    return tiles.reshape(result)


def with_own_scales(kernel: Any, axes: int = 1) -> Any:
    """Returns a quantised array with its scales repeated to the array's size along the first `axes`
    axes, so that `jax.vmap` and `jax.lax.scan` can map over them."""

    def repeat(tiles: jax.Array) -> jax.Array:
        for axis in range(axes):
            tiles = repeated(tiles, axis, kernel.shape[axis])
        return tiles

    return _replaced(kernel, kernel.qvalue, repeat)
