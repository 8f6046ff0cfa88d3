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

import dataclasses

import triton.language as tl

from dora_common.triton import expand_compose
from dora_common.triton.expand_compose import Config
from dora_common.triton.jit import WIDEN, jit


def config(rank: int, is_in_pieces: bool, is_coded: bool) -> Config:
    """Returns the fastest config (H100, 4096 and 14336 features; H200 for codes, 8192, and for
    pieces, 4096 × 12288 at ranks 16, 64 and 384).

    The tiles are those of expand_compose, for the same reasons, but wider for float weights and
    medium ranks. Tiles of two pieces take twice the memory, and so less of the rank at a time.
    """
    if is_in_pieces:
        return Config(rows=64, depth=16, stages=2) if rank <= 16 else Config(depth=32)
    tiles = expand_compose.config(rank)
    columns = 256 if 16 < rank <= 128 and not is_coded else tiles.columns
    return dataclasses.replace(tiles, columns=columns)


@jit
def kernel(
    weight_ptr,  # [out, in], or codes u8[out, in / 2]
    levels_ptr,  # f32[16], for codes
    scales_ptr,  # f32[out·in / RUN], for codes
    lora_a_ptr,  # [r, in], or pieces f16[2, r, in]
    lora_b_ptr,  # [out, r], or pieces f16[2, out, r]
    unit_a_ptr,  # f32[in], for pieces
    unit_b_ptr,  # f32[out], for pieces
    partial_ptr,  # f32[in / COLUMNS, out]
    out_features,
    in_features,
    scale,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,  # how many codes share a scale; 0 for floats
    GROUP: tl.constexpr,  # a row is read in groups of this size, each within a run
    PIECES: tl.constexpr,  # whether the adapter is in pieces
):
    column_tiles = tl.cdiv(in_features, COLUMNS)
    block = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_mask, column_mask = row < out_features, column < in_features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    wide_row = row.to(tl.int64)[:, None]
    b_ptrs = lora_b_ptr + wide_row * RANK + inside[None, :]
    a_ptrs = lora_a_ptr + inside.to(tl.int64)[:, None] * in_features + column[None, :]
    # out·in may exceed 2³¹.
    if RUN:
        width, item = in_features // 2, block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        width, item = in_features, column
    offset = wide_row * width + item[None, :]  # [ROWS, COLUMNS], or [ROWS, COLUMNS / 2] for codes
    mask = row_mask[:, None] & (item < width)[None, :]
    # This load comes before the products, so that it runs in parallel with them.
    weight = tl.load(weight_ptr + offset, mask=mask, other=0)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        b_mask, a_mask = row_mask[:, None] & left[None, :], left[:, None] & column_mask[None, :]
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        if WIDEN:
            b, a = b.to(tl.float32), a.to(tl.float32)
        product = tl.dot(b, a, product)
        if PIECES:
            low_b = tl.load(b_ptrs + tl.cast(out_features, tl.int64) * RANK, mask=b_mask, other=0.0)
            low_a = tl.load(a_ptrs + tl.cast(in_features, tl.int64) * RANK, mask=a_mask, other=0.0)
            if WIDEN:
                low_b, low_a = low_b.to(tl.float32), low_a.to(tl.float32)
            product = tl.dot(b, low_a, product)
            product = tl.dot(low_b, a, product)
        b_ptrs += DEPTH
        a_ptrs += DEPTH * in_features
    if PIECES:
        unit_b = tl.load(unit_b_ptr + row, mask=row_mask, other=0.0)
        unit_a = tl.load(unit_a_ptr + column, mask=column_mask, other=0.0)
        product = product * unit_b[:, None] * unit_a[None, :]

    if RUN:
        group = block * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        shared = (wide_row * in_features + group[None, :] * GROUP) // RUN
        mask = row_mask[:, None] & (group * GROUP < in_features)[None, :]
        scales = tl.load(scales_ptr + shared, mask=mask, other=0.0)
        code = weight.to(tl.int32)
        levels = tl.interleave(tl.load(levels_ptr + (code >> 4)), tl.load(levels_ptr + (code & 15)))
        groups = levels.reshape(ROWS, COLUMNS // GROUP, GROUP) * scales[:, :, None]
        weight = groups.reshape(ROWS, COLUMNS)
    adapted = weight.to(tl.float32) + scale * product
    squares = tl.sum(adapted * adapted, axis=1)
    tl.store(partial_ptr + block.to(tl.int64) * out_features + row, squares, mask=row_mask)
