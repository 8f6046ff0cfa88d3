"""The demands of a Hopper on every kernel: alignment, room in shared memory, registers."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.quantised import bits

# Rows of 16 bytes are what the copy engine can address.
ALIGNMENT = 8
# Tensor cores read shared memory in blocks of 8 rows, which the copy engine can make of whole ones.
ROW_ALIGNMENT = 8
# A slice along a contracted axis is a 128-byte row, the widest swizzle.
TILE_K = 64
SHARED_MEMORY = 232_448
# What vectors, barriers and sums over warps may take of it.
RESERVED = 3_072
# Registers a thread, of the 512 that 128 threads of each of a multiprocessor's warpgroups share.
REGISTERS = 512
FETCH_REGISTERS = 40


def consume_registers(consumers: int) -> int:
    """Returns the registers of each thread of `consumers` warpgroups beside one that fetches."""
    return (REGISTERS - FETCH_REGISTERS) // consumers // 8 * 8


def slices(rank: int) -> int:
    """Returns how many slices of `TILE_K` the rank takes."""
    return pl.cdiv(rank, TILE_K)


def padded_rank(rank: int) -> int:
    """Returns the rank that the copy engine can address: of whole slices, or of one short one."""
    step = ALIGNMENT if rank < TILE_K else TILE_K
    return pl.cdiv(rank, step) * step


def balanced(length: int, pieces: int, sm_count: int, *, overhead: int, most: int) -> int:
    """Returns into how many parts, at `most`, to cut each of `pieces` of `length` steps so that the
    device is done first; a part costs `overhead` steps more than it has."""

    def time(parts: int) -> int:
        return pl.cdiv(pieces * parts, sm_count) * (pl.cdiv(length, parts) + overhead)

    return min(range(1, min(length, most) + 1), key=time)


def tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, gmem_cols: int | None = None):
    """Returns shared memory for [..., rows, cols], laid out for the copy engine and tensor cores.

    `gmem_cols` is the width of the matrix that is copied to or from; no block may straddle its end.
    """
    cols = math.gcd(shape[-1], gmem_cols or shape[-1])
    # Columns are worked on 64 at a time.
    swizzle = plgpu.find_swizzle(bits(dtype) * math.gcd(cols, TILE_K))
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits(dtype)))  # pyright: ignore[reportAbstractUsage]
    # A swizzle of 16 bytes is none.
    swizzles = () if swizzle == 16 else (plgpu.SwizzleTransform(swizzle),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzles))


def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike):
    """Returns shared memory for [..., rows, cols], of columns that are one swizzled row, laid out
    for the copy engine alone, which takes any number of such rows."""
    swizzle = plgpu.SwizzleTransform(shape[-1] * bits(dtype) // 8)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(swizzle,))


def pad(array: jax.Array, *shape: int) -> jax.Array:
    """Returns `array` with zeros up to `shape`; itself where it has that shape already."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)])
