"""Limits of Hopper GPUs that every kernel obeys: alignment, shared memory, registers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.quantised import bits

# TMA copies rows of whole 16 bytes: 8 numbers of 16 bits.
ALIGNMENT = 8
# Tensor cores read shared memory in blocks of 8 rows, and TMA copies whole blocks.
ROW_ALIGNMENT = 8
# The width of a slice along a contracted axis: 128 bytes, the widest swizzle.
TILE_K = 64
SHARED_MEMORY = 232_448
# Shared memory that is reserved for vectors, barriers and sums over warps.
RESERVED = 3_072
# Registers per thread, added up over the warpgroups of a thread block.
REGISTERS = 512
FETCH_REGISTERS = 40
# For kernels that state the layouts of their arrays: Pallas does not infer them, which takes a
# third of the time to lower a kernel.
STATED_LAYOUTS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def consume_registers(consumers: int) -> int:
    """Returns the registers per thread of `consumers` warpgroups if one more warpgroup fetches."""
    # A thread block starts with the same multiple of 8 for all threads, and cannot get more.
    together = REGISTERS // (consumers + 1) // 8 * 8 * (consumers + 1)
    return (together - FETCH_REGISTERS) // consumers // 8 * 8


def slices(rank: int) -> int:
    """Returns the number of slices of `TILE_K` that the rank needs."""
    return pl.cdiv(rank, TILE_K)


def padded_rank(rank: int) -> int:
    """Returns the rank padded for TMA: to whole slices, or to 8 if it is less than one slice."""
    step = ALIGNMENT if rank < TILE_K else TILE_K
    return pl.cdiv(rank, step) * step


def balanced(
    length: int, pieces: int, sm_count: int, *, overhead: int, most: int, sum_overhead: int = 0
) -> int:
    """Returns the number of parts, at most `most`, of each piece for the shortest run time.

    Args:
      length: the steps of a piece.
      pieces: the number of pieces.
      overhead: the cost of a part in addition to its steps, in steps.
      most: the maximum number of parts.
      sum_overhead: the further cost of a part, in steps, if a piece has more than one and their
        results are added.
    """

    def time(parts: int) -> int:
        cost = overhead + (sum_overhead if parts > 1 else 0)
        return pl.cdiv(pieces * parts, sm_count) * (pl.cdiv(length, parts) + cost)

    return min(range(1, min(length, most) + 1), key=time)


def tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, gmem_cols: int | None = None):
    """Returns shared memory for [..., rows, cols] in the layout of TMA and tensor cores.

    `gmem_cols` is the width of the matrix in global memory. No swizzled block may cross its end.
    """
    cols = math.gcd(shape[-1], gmem_cols or shape[-1])
    # Columns are worked on 64 at a time.
    swizzle = plgpu.find_swizzle(bits(dtype) * math.gcd(cols, TILE_K))
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits(dtype)))  # pyright: ignore[reportAbstractUsage]
    # A swizzle of 16 bytes is none.
    swizzles = () if swizzle == 16 else (plgpu.SwizzleTransform(swizzle),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzles))


def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike):
    """Returns shared memory for [..., rows, cols] in the layout of TMA alone, where all columns are
    one swizzled row. Any number of rows is allowed."""
    swizzle = plgpu.SwizzleTransform(shape[-1] * bits(dtype) // 8)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(swizzle,))


def row_transforms(columns: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Returns the transforms of tiles [..., rows, columns] whose rows are swizzled, in blocks of 8
    rows. `columns` must divide the columns in global memory."""
    tiling = plgpu.TilingTransform((ROW_ALIGNMENT, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(columns * bits(dtype) // 8)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def pad(array: jax.Array, *shape: int) -> jax.Array:
    """Returns `array` padded with zeros to `shape`, or `array` itself if it has that shape."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)])
