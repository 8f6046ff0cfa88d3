"""The norm in one pass over the weight: computes tiles of W + s·BA in registers and squares them.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; norm: f32[out]. Tensor
cores compute a tile of BA, and W is added in fp32. Each program writes one sum of squares per
output feature, [in/columns, out] in fp32. ``column_sums`` adds these and takes the square root.
There is no cancellation between terms, so nothing needs clamping, and a NaN stays a NaN.

fp32 adapters are multiplied as three products of float16 pieces, which ``adapter_pieces`` makes:
BA is then within 3·2⁻²² of its sum of absolute products, by each row's and column's largest number.

W may also be 4-bit codes, u8[out·in/2], the first of two in the upper half of a byte. An element is
its code's level times the scale of its run.

Traffic: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s; the partial sums, 2/columns of that each
way. Flops: 2·out·in·r, 64 µs at r = 384 and 800 TFLOP/s: bound by the tensor cores.
"""

import triton.language as tl

from dora_common.triton.expand_compose import Config
from dora_common.triton.jit import WIDEN, jit, next_power_of_2, number


def config(
    rank: int, *, is_in_pieces: bool, is_coded: bool, axis: int, capability: int = 90
) -> Config:
    """Returns the fastest config (H100 and H200, 4096 to 14336 features at ranks 16, 64 and 384).

    High tiles have fewer loads of the adapter, and spill registers on other cards than Hopper,
    which were not measured. Tiles of two pieces take twice the memory, and so less of the rank at a
    time. A sum over rows, axis 0, is added up across warps: for it wide tiles were slower.
    """
    depth = min(64, max(16, next_power_of_2(rank)))
    rows = 128 if capability == 90 else 64
    if is_in_pieces:
        if rank <= 16 or rows == 64:
            return Config(depth=min(depth, 32), warps=4 if rank <= 16 else 8, stages=2)
        return Config(rows=128, depth=32)
    if rank <= 16:
        return Config(rows=64 if axis == 0 else 32, depth=depth, stages=2)
    if rank > 128:
        return Config(rows=rows, warps=8 if is_coded or rows == 64 else 4)
    if is_coded:
        return Config(depth=depth, warps=8, stages=2)
    if axis == 0:
        return Config(rows=rows, depth=depth, stages=2)
    return Config(columns=256, depth=depth, warps=8, stages=2)


@jit
def kernel(
    weight_ptr,  # [rows, columns], or codes u8[rows, columns / 2]
    levels_ptr,  # f32[16], for codes
    scales_ptr,  # f32[rows·columns / RUN], for codes
    right_ptr,  # [r, columns], or pieces f16[2, r, columns]
    left_ptr,  # [rows, r], or pieces f16[2, rows, r]
    unit_right_ptr,  # f32[columns], for pieces
    unit_left_ptr,  # f32[rows], for pieces
    partial_ptr,  # f32[tiles along AXIS, the other axis]
    rows,
    columns,
    scale,  # a number or its address
    AXIS: tl.constexpr,  # the axis of W that is summed over
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,  # how many codes share a scale; 0 for floats
    GROUP: tl.constexpr,  # a row is read in groups of this size, each within a run
    PIECES: tl.constexpr,  # whether the adapter is in pieces
):
    column_tiles = tl.cdiv(columns, COLUMNS)
    block, strip = tl.program_id(0) % column_tiles, tl.program_id(0) // column_tiles
    row = strip * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_mask, column_mask = row < rows, column < columns
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    wide_row = row.to(tl.int64)[:, None]
    left_ptrs = left_ptr + wide_row * RANK + inside[None, :]
    right_ptrs = right_ptr + inside.to(tl.int64)[:, None] * columns + column[None, :]
    # rows·columns may exceed 2³¹.
    if RUN:
        width, item = columns // 2, block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        width, item = columns, column
    offset = wide_row * width + item[None, :]  # [ROWS, COLUMNS], or [ROWS, COLUMNS / 2] for codes
    mask = row_mask[:, None] & (item < width)[None, :]
    # This load comes before the products, so that it runs in parallel with them.
    weight = tl.load(weight_ptr + offset, mask=mask, other=0)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        inner = inside < RANK - first
        left_mask, right_mask = (
            row_mask[:, None] & inner[None, :],
            inner[:, None] & column_mask[None, :],
        )
        left = tl.load(left_ptrs, mask=left_mask, other=0.0)
        right = tl.load(right_ptrs, mask=right_mask, other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        product = tl.dot(left, right, product)
        if PIECES:
            low_left = tl.load(
                left_ptrs + tl.cast(rows, tl.int64) * RANK, mask=left_mask, other=0.0
            )
            low_right = tl.load(
                right_ptrs + tl.cast(columns, tl.int64) * RANK, mask=right_mask, other=0.0
            )
            if WIDEN:
                low_left, low_right = low_left.to(tl.float32), low_right.to(tl.float32)
            product = tl.dot(left, low_right, product)
            product = tl.dot(low_left, right, product)
        left_ptrs += DEPTH
        right_ptrs += DEPTH * columns
    if PIECES:
        unit_left = tl.load(unit_left_ptr + row, mask=row_mask, other=0.0)
        unit_right = tl.load(unit_right_ptr + column, mask=column_mask, other=0.0)
        product = product * unit_left[:, None] * unit_right[None, :]

    if RUN:
        group = block * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        shared = (wide_row * columns + group[None, :] * GROUP) // RUN
        mask = row_mask[:, None] & (group * GROUP < columns)[None, :]
        scales = tl.load(scales_ptr + shared, mask=mask, other=0.0)
        code = weight.to(tl.int32)
        levels = tl.interleave(tl.load(levels_ptr + (code >> 4)), tl.load(levels_ptr + (code & 15)))
        groups = levels.reshape(ROWS, COLUMNS // GROUP, GROUP) * scales[:, :, None]
        weight = groups.reshape(ROWS, COLUMNS)
    adapted = weight.to(tl.float32) + number(scale) * product
    squares = tl.sum(adapted * adapted, axis=AXIS)
    if AXIS == 1:
        tl.store(partial_ptr + block.to(tl.int64) * rows + row, squares, mask=row_mask)
    else:
        tl.store(partial_ptr + strip.to(tl.int64) * columns + column, squares, mask=column_mask)
