"""The register layout of the sums of a product of few rows, and their transfer to memory.

Lane 4g + t of warp w has, of every 8 rows of x, rows 2t and 2t + 1, and of a tile of W

- of codes, with 32·word columns (word is 4 or 8): `word` adjacent columns from word·(8w + g) on,
- of 16-bit numbers, with 64 columns: columns 16w + g and 16w + 8 + g.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode.decode_fragments import ROWS, warp
from jax_dora.ops.mosaic.hopper import ptx

THREADS = 128
FP32_BYTES = 4
# The columns of a tile of 16-bit numbers.
HALF_COLUMNS = 64


def layout(columns: int) -> Any:
    """Returns the register layout of the sums f32[8·n, columns] of a tile of W."""
    if columns == HALF_COLUMNS:
        tiles = ((ROWS, 64), (ROWS, 16), (ROWS, 8), (2, 1))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-7,), lane_dims=(-3, -4), vector_dim=-1
        )
    word = columns // ptx.LANES
    tiles = ((ROWS, columns), (ROWS, 8 * word), (2, word), *[(4,)] * (word > 4))
    extra = word > 4  # One more level, of 4 columns.
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(-5 - extra,),
        lane_dims=(-3 - extra, -4 - extra),
        vector_dim=-1,
    )


def to_scalars(sums: mgpu.FragmentedArray) -> np.ndarray:
    """Returns a thread's sums as scalars [rows / 8, 2 rows, columns]."""
    (size,) = ir.VectorType(sums.registers.flat[0].type).shape
    scalars = [
        vector.extract(register, [], [index])
        for register in sums.registers.flat
        for index in range(size)
    ]
    total = np.array(scalars, object)
    if size == 1:
        return total.reshape(-1, 2, 2).transpose(0, 2, 1)
    return total.reshape(-1, 2, sums.shape[1] // ptx.LANES)


def from_scalars(sums: mgpu.FragmentedArray, total: np.ndarray) -> mgpu.FragmentedArray:
    """Returns an array like `sums` from the scalars `total`; the inverse of `to_scalars`."""
    (size,) = ir.VectorType(sums.registers.flat[0].type).shape
    if size == 1:
        total = total.transpose(0, 2, 1)
    vectors = ir.VectorType.get((size,), ir.F32Type.get())
    registers = np.empty_like(sums.registers)
    for index, scalars in enumerate(total.reshape(-1, size)):
        registers.flat[index] = vector.from_elements(vectors, list(scalars))
    return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)


def store(sums: jax.Array, smem: Any) -> None:
    """Writes sums [n, columns] to shared memory that is not swizzled.

    Plain assignment raises for this, because several lanes write to the same bank.

    Args:
      sums: the sums, laid out by `layout`.
      smem: the destination.
    """
    if choose.interpreted():
        smem[...] = sums
        return

    @plgpu.inline_mgpu(arg_types=(layout(sums.shape[1]), plgpu.RefType()))
    def write(_, sums, smem):
        sums.store_untiled(smem, optimized=False)

    call: Callable[..., Any] = write
    call(sums, smem)


def store_first_rows(sums: jax.Array, gmem: Any) -> None:
    """Writes the first rows of sums [n, columns] from registers to gmem [rows, columns].

    Args:
      sums: the sums, laid out by `layout`.
      gmem: the destination, in fp32, with at most n rows; for W of codes also in 16 bits.
    """
    rows = gmem.shape[0]
    if choose.interpreted():
        gmem[...] = sums[:rows].astype(gmem.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(layout(sums.shape[1]), plgpu.RefType()))
    def write(_, sums, gmem):
        total = to_scalars(sums)
        stored = ir.MemRefType(gmem.type)
        (pitch, _), _ = stored.get_strides_and_offset()
        item = FP32_BYTES if isinstance(stored.element_type, ir.F32Type) else FP32_BYTES // 2
        g, t = arith.shrui(ptx.lane(), ptx.i32(2)), arith.andi(ptx.lane(), ptx.i32(3))
        row = arith.shli(t, ptx.i32(1))
        # A lane's columns are adjacent and stored 4 at a time; for 16-bit W they are 8 apart.
        columns = total.shape[2]
        distance, per_store = (8, 1) if columns == 2 else (1, 4)
        column = arith.muli(warp(), ptx.i32(ROWS * columns))
        column = arith.addi(column, arith.muli(g, ptx.i32(columns if per_store == 4 else 1)))
        offset = arith.addi(arith.muli(row, ptx.i32(pitch)), column)
        start = ptx.further(mgpu.utils.memref_ptr(gmem), arith.muli(offset, ptx.i32(item)))
        for block, odd in np.ndindex(total.shape[:2]):
            row_offset = ROWS * block + odd
            remaining = arith.subi(ptx.i32(rows - row_offset), row)
            for first in range(0, columns, per_store):
                to = ptx.further(start, item * (row_offset * pitch + distance * first))
                values = list(total[block, odd, first : first + per_store])
                if item < FP32_BYTES:
                    values = _in_pairs(values, stored.element_type)
                ptx.store_if_positive(remaining, to, values)

    call: Callable[..., Any] = write
    call(sums, gmem)


def _in_pairs(values: list[ir.Value], kind: ir.Type) -> list[ir.Value]:
    """Returns the bits of two numbers each, rounded to the 16-bit type `kind`, as f32."""
    rounded = [arith.truncf(kind, value) for value in values]
    two = ir.VectorType.get((2,), kind)
    return [
        llvm.bitcast(ir.F32Type.get(), vector.from_elements(two, rounded[first : first + 2]))
        for first in range(0, len(rounded), 2)
    ]


def store_exchange(sums: jax.Array, smem: Any) -> None:
    """Writes sums to smem f32[n, 128] for `add_exchanged`, without bank conflicts.

    Args:
      sums: the sums, laid out by `layout`.
      smem: the destination.
    """
    if choose.interpreted():
        smem[...] = sums.reshape(smem.shape)
        return

    @plgpu.inline_mgpu(arg_types=(layout(sums.shape[1]), plgpu.RefType()))
    def write(_, sums, smem):
        total = to_scalars(sums)
        for pointer, value in zip(_thread_column(smem, total.size), total.flat, strict=True):
            llvm.store(value, pointer)

    call: Callable[..., Any] = write
    call(sums, smem)


def add_exchanged(sums: jax.Array, smem: Any) -> jax.Array:
    """Returns sums plus the sums that another warpgroup wrote with `store_exchange`."""
    if choose.interpreted():
        return sums + smem[...].reshape(sums.shape)
    sums_layout = layout(sums.shape[1])
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=sums_layout)

    @plgpu.inline_mgpu(arg_types=(sums_layout, plgpu.RefType()), return_type=result)
    def add(_, sums, smem):
        total = to_scalars(sums)
        others = [llvm.load(ir.F32Type.get(), p) for p in _thread_column(smem, total.size)]
        added = [arith.addf(*pair) for pair in zip(total.flat, others, strict=True)]
        return from_scalars(sums, np.array(added, object).reshape(total.shape))

    call: Callable[..., Any] = add
    return call(sums, smem)


def _thread_column(smem: Any, count: int) -> list[ir.Value]:
    """Returns the pointers to the elements of the thread's column of f32[count, 128]."""
    thread = arith.andi(mgpu.utils.thread_idx(), ptx.i32(THREADS - 1))
    column = ptx.further(mgpu.utils.memref_ptr(smem), arith.muli(thread, ptx.i32(FP32_BYTES)))
    return [ptx.further(column, FP32_BYTES * THREADS * row) for row in range(count)]
