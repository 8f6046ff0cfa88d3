"""How sums of a product of few rows lie in registers, and how they get from there to memory.

Of every 8 rows of x lane 4g + t of warp w has the rows 2t and 2t + 1; of a tile of codes it has as
many columns as a word has codes, 4 or 8, from word·(8w + g) on, of one of 16 bits the columns
16w + g and 16w + 8 + g.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_dora.ops import choose
from jax_dora.ops.mosaic import ptx
from jax_dora.ops.mosaic.few_rows_reads import ROWS, TILE_BYTES, warp
from jax_dora.ops.quantised import bits

THREADS = 128
FP32 = 4


def columns(dtype: Any) -> int:
    """Returns the columns of sums of a tile of `dtype`: as many as 128 bytes have."""
    return 8 * TILE_BYTES // bits(dtype)


def layout(dtype: Any) -> Any:
    """Returns how the sums f32[8·n, columns] of a tile of `dtype` lie in registers."""
    if bits(dtype) == 16:
        tiles = ((ROWS, 64), (ROWS, 16), (ROWS, 8), (2, 1))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-7,), lane_dims=(-3, -4), vector_dim=-1
        )
    word = 32 // bits(dtype)
    tiles = ((ROWS, 32 * word), (ROWS, 8 * word), (2, word), *[(4,)] * (word > 4))
    behind = word > 4
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(-5 - behind,),
        lane_dims=(-3 - behind, -4 - behind),
        vector_dim=-1,
    )


def taken_apart(sums: mgpu.FragmentedArray) -> np.ndarray:
    """Returns a thread's sums by [rows of x / 8, row of two, column]."""
    (size,) = ir.VectorType(sums.registers.flat[0].type).shape
    apart = [vector.extract(one, [], [at]) for one in sums.registers.flat for at in range(size)]
    total = np.array(apart, object)
    if size == 1:
        return total.reshape(-1, 2, 2).transpose(0, 2, 1)
    return total.reshape(-1, 2, sums.shape[1] // ptx.LANES)


def put_together(sums: mgpu.FragmentedArray, total: np.ndarray) -> mgpu.FragmentedArray:
    """Reverses `taken_apart` of `sums`, with other numbers."""
    (size,) = ir.VectorType(sums.registers.flat[0].type).shape
    if size == 1:
        total = total.transpose(0, 2, 1)
    vectors = ir.VectorType.get((size,), ir.F32Type.get())
    result = np.empty_like(sums.registers)
    for at, some in enumerate(total.reshape(-1, size)):
        result.flat[at] = vector.from_elements(vectors, list(some))
    return mgpu.FragmentedArray(_registers=result, _layout=sums.layout, _is_signed=None)


def store(sums: jax.Array, smem: Any, of: Any) -> None:
    """Writes sums [n, columns] of a tile of dtype `of` to shared memory that is not swizzled;
    several lanes want the same bank, which plain assignment refuses."""
    if choose.interpreted():
        smem[...] = sums
        return

    @plgpu.inline_mgpu(arg_types=(layout(of), plgpu.RefType()))
    def write(_, sums, smem):
        sums.store_untiled(smem, optimized=False)

    call: Callable[..., Any] = write
    call(sums, smem)


def store_first_rows(sums: jax.Array, gmem: Any, of: Any) -> None:
    """Writes the first rows of sums [n, columns] of a tile of dtype `of` to gmem [rows, columns]
    from registers."""
    rows = gmem.shape[0]
    if choose.interpreted():
        gmem[...] = sums[:rows]
        return

    @plgpu.inline_mgpu(arg_types=(layout(of), plgpu.RefType()))
    def write(_, sums, gmem):
        total = taken_apart(sums)
        (pitch, _), _ = ir.MemRefType(gmem.type).get_strides_and_offset()
        group, at = arith.shrui(ptx.lane(), ptx.i32(2)), arith.andi(ptx.lane(), ptx.i32(3))
        row = arith.shli(at, ptx.i32(1))
        # A lane's columns are neighbours, or one of either eight.
        columns = total.shape[2]
        between, run = (8, 1) if columns == 2 else (1, 4)
        column = arith.muli(warp(), ptx.i32(ROWS * columns))
        column = arith.addi(column, arith.muli(group, ptx.i32(columns if run == 4 else 1)))
        place = arith.addi(arith.muli(row, ptx.i32(pitch)), column)
        place = ptx.further(mgpu.utils.memref_ptr(gmem), arith.muli(place, ptx.i32(FP32)))
        for eight, odd in np.ndindex(total.shape[:2]):
            further = ROWS * eight + odd
            left = arith.subi(ptx.i32(rows - further), row)
            for first in range(0, columns, run):
                to = ptx.further(place, FP32 * (further * pitch + between * first))
                ptx.store_if_positive(left, to, list(total[eight, odd, first : first + run]))

    call: Callable[..., Any] = write
    call(sums, gmem)


def hand_over(sums: jax.Array, smem: Any, of: Any) -> None:
    """Writes sums of a tile of dtype `of` to f32[n, 128] for `added_to`, without a conflict."""
    if choose.interpreted():
        smem[...] = sums.reshape(smem.shape)
        return

    @plgpu.inline_mgpu(arg_types=(layout(of), plgpu.RefType()))
    def write(_, sums, smem):
        total = taken_apart(sums)
        for place, one in zip(_own_column(smem, total.size), total.flat, strict=True):
            llvm.store(one, place)

    call: Callable[..., Any] = write
    call(sums, smem)


def added_to(sums: jax.Array, smem: Any, of: Any) -> jax.Array:
    """Returns sums plus those that another warpgroup handed over."""
    if choose.interpreted():
        return sums + smem[...].reshape(sums.shape)
    of_sums = layout(of)
    found = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=of_sums)

    @plgpu.inline_mgpu(arg_types=(of_sums, plgpu.RefType()), return_type=found)
    def add(_, sums, smem):
        total = taken_apart(sums)
        others = [llvm.load(ir.F32Type.get(), one) for one in _own_column(smem, total.size)]
        added = [arith.addf(*two) for two in zip(total.flat, others, strict=True)]
        return put_together(sums, np.array(added, object).reshape(total.shape))

    call: Callable[..., Any] = add
    return call(sums, smem)


def _own_column(smem: Any, count: int) -> list[ir.Value]:
    """Returns the places of a thread's column of f32[count, 128]."""
    thread = arith.andi(mgpu.utils.thread_idx(), ptx.i32(THREADS - 1))
    column = ptx.further(mgpu.utils.memref_ptr(smem), arith.muli(thread, ptx.i32(FP32)))
    return [ptx.further(column, FP32 * THREADS * row) for row in range(count)]
