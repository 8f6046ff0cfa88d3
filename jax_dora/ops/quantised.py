"""Quantised kernels: what a `qwix.QArray` holds, what it stands for, and its rows block by block.

    W = (v(qvalue) - zero_point) ∘ scale     [in, out]

where v takes NF4's codes to the 16 numbers of its codebook (arXiv 2305.14314, appendix E), and is
the identity otherwise. An element of scale and zero_point belongs to a tile of W: scale
[in / t, out / u] has tiles of t × u elements. Leading axes are a stack.

qwix is imported by whoever makes such an array; nothing here imports it.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

FORMATS = ("nf4", "int4", "int8", "float8_e4m3fn")
_STORED_AS = {"nf4": jnp.dtype(jnp.uint4)}
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def bits(dtype: Any) -> int:
    """Returns the bits that an element takes on a device, where two 4-bit ones share a byte."""
    return 4 if jnp.dtype(dtype).name in ("int4", "uint4") else 8 * jnp.dtype(dtype).itemsize


class Format(NamedTuple):
    """The static facts about a quantised matrix.

    Attributes:
      qtype: one of `FORMATS`.
      tile: (t, u), the rows and columns that share a scale.
      scale_dtype: of the scales.
      has_zero_point: whether there are zero points, of the scales' shape.
    """

    qtype: str
    tile: tuple[int, int]
    scale_dtype: Any
    has_zero_point: bool

    @property
    def stored(self) -> Any:
        """Returns the dtype of the codes."""
        return _STORED_AS.get(self.qtype) or jnp.dtype(self.qtype)

    @property
    def packed(self) -> int:
        """The number of elements that share a byte."""
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


def described(kernel: Any) -> str:
    """Returns the format and the number of scales along each axis, for people."""
    return f"{qtype_name(kernel)}, scales {'×'.join(map(str, kernel.scale.shape))}"


def qtype_name(kernel: Any) -> str:
    """Returns the format's name, such as "nf4" or "int8", supported or not."""
    return kernel.qtype if isinstance(kernel.qtype, str) else jnp.dtype(kernel.qtype).name


def stored(kernel: Any) -> Any:
    """Returns the array that says how a kernel is shaped and sharded: itself, or its qvalue."""
    return kernel.qvalue if is_quantised(kernel) else kernel


def check(name: str, kernel: Any) -> None:
    """Checks a quantised array of two axes or more.

    Raises:
      TypeError: its format is none of `FORMATS`, or its arrays have other dtypes than the format's.
      ValueError: its tiles do not divide it, every element has a scale of its own, or a scale that
        is known is not a positive number.
    """
    qtype = qtype_name(kernel)
    told = f"{name} is quantised as {qtype}"
    again = "quantise it with jax_dora.quantize"
    if qtype not in FORMATS:
        raise TypeError(f"{told}; expected one of {', '.join(FORMATS)}: {again}, or dequantise it")
    wanted = _STORED_AS.get(qtype) or jnp.dtype(qtype)
    if kernel.qvalue.dtype != wanted:
        raise TypeError(f"{told} and stored as {kernel.qvalue.dtype}; expected {wanted}: {again}")
    if kernel.scale.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"{told} with scales of {kernel.scale.dtype}; expected float32 or bfloat16: cast them"
        )
    shape, tiles = kernel.qvalue.shape, kernel.scale.shape
    divides = len(shape) == len(tiles) and all(
        count and size % count == 0 for size, count in zip(shape, tiles, strict=True)
    )
    if not divides:
        raise ValueError(
            f"{told}, of shape {tuple(shape)}, with scales of shape {tuple(tiles)}, whose tiles do "
            f"not divide it; expected an axis of scales for each axis, that divides it: {again} "
            "and a tile_size that divides its input features"
        )
    if kernel.zero_point is not None and kernel.zero_point.shape != tiles:
        raise ValueError(
            f"{told} with zero points of shape {tuple(kernel.zero_point.shape)}; expected the "
            f"scales' {tuple(tiles)}: {again}"
        )
    _check_scales(told, kernel.scale)


def check_matrix(name: str, kernel: Any) -> None:
    """Checks a quantised matrix [in, out].

    Raises:
      TypeError, ValueError: as `check`; or the tiles lie along the output axis.
    """
    check(name, kernel)
    shape, tiles = kernel.qvalue.shape, kernel.scale.shape
    if tiles[0] == shape[0] > 1 and tiles[1] < shape[1]:
        raise ValueError(
            f"{name} is quantised as {qtype_name(kernel)} along its output axis: scales of shape "
            f"{tuple(tiles)} for kernel [in, out] {tuple(shape)} give every input feature scales "
            "of its own; expected tiles along the input axis, [in / tile, out] or [1, out]: "
            "quantise the transpose, or quantise it with jax_dora.quantize"
        )


def _check_scales(told: str, scale: Any) -> None:
    """Raises ValueError for a scale that is zero, negative, infinite or NaN, where it is known."""
    if isinstance(scale, Tracer) or not isinstance(scale, jax.Array | np.ndarray):
        return
    if isinstance(scale, jax.Array) and not scale.is_fully_addressable:
        return
    # A constant of a function that is traced has numbers too.
    with jax.ensure_compile_time_eval():
        if bool(_are_positive(scale)):
            return
        known = np.asarray(scale, np.float64)  # whose least is NaN where one is, on every CPU
        least, most = known.min(), known.max()
    raise ValueError(
        f"{told} with scales from {least} to {most}; expected positive finite numbers: a tile of "
        "zeros has any positive scale, 1 say; quantise it again from weights that are finite"
    )


@jax.jit
def _are_positive(scale: jax.Array) -> jax.Array:
    return jnp.all((scale > 0) & jnp.isfinite(scale))


def dense(kernel: Any, dtype: Any) -> jax.Array:
    """Returns a kernel in `dtype`; a quantised one dequantised."""
    return dequantise(kernel, dtype) if is_quantised(kernel) else kernel.astype(dtype)


def dequantise(kernel: Any, dtype: Any) -> jax.Array:
    """Returns W in `dtype`, each element rounded once: products are taken in fp32 (fp64 for scales
    or a `dtype` of fp64)."""
    wide = jnp.float64 if jnp.float64 in (kernel.scale.dtype, dtype) else jnp.float32
    values = _values(kernel.qvalue, qtype_name(kernel), wide)
    if kernel.zero_point is not None:
        values = values - spread(kernel.zero_point.astype(wide), values.shape)
    return (values * spread(kernel.scale.astype(wide), values.shape)).astype(dtype)


def _values(qvalue: jax.Array, qtype: str, dtype: Any) -> jax.Array:
    if qtype != "nf4":
        return qvalue.astype(dtype)
    # The indices are within bounds, whatever the four bits are.
    codebook = jnp.asarray(np.array(NF4), dtype)
    return codebook.at[qvalue.astype(jnp.uint8)].get(mode="promise_in_bounds")


def multiplied(function: Callable[[Any, Any], Any], x: jax.Array, kernel: Any) -> Any:
    """Returns function(x, W) with W in x's dtype. A quantised one is dequantised for it, and again
    for its gradient, so that what is kept is quantised."""
    if not is_quantised(kernel):
        return function(x, kernel.astype(x.dtype))
    return jax.checkpoint(lambda x, kernel: function(x, dequantise(kernel, x.dtype)))(x, kernel)


def spread(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of `shape` from one element for each of its tiles."""
    apart, split = [], []
    for size, count in zip(shape, tiles.shape, strict=True):
        whole = count in (1, size)
        apart += [count] if whole else [count, 1]
        split += [size] if whole else [count, size // count]
    return jnp.broadcast_to(tiles.reshape(apart), split).reshape(shape)


def repeated(tiles: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns scales with `count` elements along `axis`, each as often as it takes."""
    times = count // tiles.shape[axis]
    return tiles if times == 1 else jnp.repeat(tiles, times, axis, total_repeat_length=count)


def rows(kernel: Any, start: Any, count: int) -> Any:
    """Returns `count` rows of a quantised matrix from `start` on, quantised.

    Args:
      start: a multiple of `count`, which may be traced, or a number that `count` rows remain after.
      count: a multiple of the tile's rows or a part of them: `rows_of_block`'s, or what remains.
    """
    tile = format_of(kernel).tile[0]
    of_scale = max(count // tile, 1)

    def cut(tiles: jax.Array) -> jax.Array:
        if tiles.shape[0] == 1:
            return tiles
        return lax.dynamic_slice_in_dim(tiles, start // tile, of_scale)

    return _changed(kernel, lax.dynamic_slice_in_dim(kernel.qvalue, start, count), cut)


def _changed(kernel: Any, qvalue: jax.Array, tiled: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns a quantised array of these codes, and of `tiled` of its scales and zero points."""
    zero_point = None if kernel.zero_point is None else tiled(kernel.zero_point)
    return type(kernel)(qvalue, tiled(kernel.scale), zero_point, kernel.qtype)


def rows_of_block(kernel: Any, elements: int) -> int:
    """Returns how many rows of a matrix a block has: a multiple of the tile's rows, or a part of
    them, of at most `elements` elements, or one row where that has more."""
    in_features, out = kernel.shape
    tile = format_of(kernel).tile[0]
    most = max(elements // max(out, 1), 1)
    if kernel.scale.shape[0] == 1:
        return min(most, in_features)
    if most >= tile:
        return min(most // tile * tile, in_features)
    return next(count for count in range(most, 0, -1) if tile % count == 0)


def as_matrices(kernel: Any, split: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> Any:
    """Returns a quantised array with its axes split, permuted and joined, as quantised.

    Args:
      split: its shape with some axes split.
      groups: of the split axes, those that each axis of the result is made of.

    The scales of axes that are joined are repeated where they could not be told apart otherwise.
    """
    order = [axis for group in groups for axis in group]
    shape = [math.prod(split[axis] for axis in group) for group in groups]

    def arranged(tiles: jax.Array) -> jax.Array:
        tiles = _split_tiles(tiles, kernel.shape, split).transpose(order)
        sizes, first, joined = [split[axis] for axis in order], 0, []
        for group in groups:
            end = first + len(group)
            # Tiles of a joined axis are runs: whole axes behind the one that is tiled, if any.
            tiled = [axis for axis in range(first, end) if tiles.shape[axis] > 1]
            for axis in range(first, tiled[-1] if tiled else first):
                tiles = repeated(tiles, axis, sizes[axis])
            joined.append(math.prod(tiles.shape[first:end]))
            first = end
        return tiles.reshape(joined)

    return _changed(kernel, kernel.qvalue.reshape(split).transpose(order).reshape(shape), arranged)


def _split_tiles(tiles: jax.Array, shape: tuple[int, ...], split: tuple[int, ...]) -> jax.Array:
    """Returns scales of an array of `shape` for that array in the shape `split`."""
    parts = iter(split)
    apart = []
    for axis, size in enumerate(shape):
        sizes = [next(parts)]
        while math.prod(sizes) < size:
            sizes.append(next(parts))
        count = tiles.shape[axis]
        if len(sizes) == 1 or count == 1:
            apart += [count, *(1 for _ in sizes[1:])]
            continue
        tiles = repeated(tiles, axis, size)
        apart += sizes
    return tiles.reshape(apart)


def with_own_scales(kernel: Any) -> Any:
    """Returns a quantised array whose scales have its own size along the first axis, so that
    `jax.vmap` and `jax.lax.scan` take it apart along that."""
    return _changed(kernel, kernel.qvalue, lambda tiles: repeated(tiles, 0, kernel.shape[0]))
