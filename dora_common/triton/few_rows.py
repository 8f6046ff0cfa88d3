"""A projection of few rows, as in decoding: y = g∘(x W + s·(x A) B) + bias, in two kernels.

    x [rows, in], A [in, r], B [r, out], y [rows, out], all fp16 or all bf16; g f32[out]; bias [out]
    W [in, out] of the same dtype, or σ∘v(q) of codes q [in, out] and scales σ [in / t, out]

v(q) is rounded to x's dtype, and σ applied to the fp32 sums over its rows. `sums` computes parts of
the products over ``in``, f32[splits, rows, out] and f32[splits, rows, r], so that all programs
together read W at the rate of the memory. `finish` adds the parts in a fixed order and computes the
rest. Tiles are computed transposed, because tensor cores multiply at least 16, 64 on Hopper, rows
of the left operand, and as few as 8 columns of the right one.

Traffic: W, σ and A once; x and the parts stay in the level-2 cache. The floor is bytes / read rate:
for 4096×14336 in bf16 28 µs at 4.2 TB/s, in codes of 4 bits 7 µs.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.cards import CARDS
from dora_common.triton.codes import decoded
from dora_common.triton.jit import WIDEN, cdiv, jit, next_power_of_2, number

# A scale belongs to a multiple of this many rows of W, or to all of them.
DEPTH = 64
MOST_ROWS, MOST_RANK = 64, 128
# `finish` adds this many parts in registers.
_MOST_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """A program of `sums` adds up products for ``columns`` columns, `DEPTH` inputs at a time;
    ``resident`` programs run on a multiprocessor at a time. One of `finish` computes
    ``finish_columns`` columns."""

    columns: int = 64
    warps: int = 4
    stages: int = 4
    resident: int = 4
    finish_columns: int = 64

    def split(self, in_features: int, columns: int, capability: int) -> tuple[int, int]:
        """Returns the number of parts, and of steps of one."""
        card = CARDS.get(capability, CARDS[90])
        steps, tiles = cdiv(in_features, DEPTH), cdiv(columns, self.columns)
        splits = max(1, min(steps, _MOST_SPLITS, self.resident * card.multiprocessors // tiles))
        each = cdiv(steps, splits)
        return cdiv(steps, each), each


CONFIG = Config()


def tile_rows(rows: int) -> int:
    """Returns the rows of a tile."""
    return max(16, next_power_of_2(rows))


@jit
def sums(
    x_ptr,  # [rows, in]
    weight_ptr,  # [in, out], or codes
    levels_ptr,  # f32[16], for codes of 4 bits
    scales_ptr,  # [in / RUN, out], for codes
    lora_a_ptr,  # [in, r] or None
    parts_ptr,  # f32[splits, rows, out]
    z_ptr,  # f32[splits, rows, r], not written without lora_a
    rows,
    in_features,
    out_features,
    CODES: tl.constexpr,  # the kind of codes, see `codes`
    RUN: tl.constexpr,
    RANK: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(out_features, COLUMNS)
    tile, first = tl.program_id(0), tl.program_id(1) * STEPS
    at = tl.program_id(1).to(tl.int64) * rows
    if tile < tiles:
        total = _sum(
            *(x_ptr, weight_ptr, levels_ptr, scales_ptr, tile, first, rows, in_features),
            *(out_features, CODES, RUN, STEPS, ROWS, COLUMNS, DEPTH, STAGES),
        )
        _store(parts_ptr + at * out_features, total, tile, rows, out_features, ROWS, COLUMNS)
    elif lora_a_ptr is not None:
        total = _sum(
            *(x_ptr, lora_a_ptr, levels_ptr, scales_ptr, tile - tiles, first, rows, in_features),
            *(RANK, "", RUN, STEPS, ROWS, COLUMNS, DEPTH, STAGES),
        )
        _store(z_ptr + at * RANK, total, tile - tiles, rows, RANK, ROWS, COLUMNS)


@jit
def _sum(
    x_ptr,
    weight_ptr,
    levels_ptr,
    scales_ptr,
    tile,
    first,
    rows,
    in_features,
    features,
    CODES: tl.constexpr,
    RUN: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the transposed sums of a tile's columns over some steps, f32[COLUMNS, ROWS]."""
    is_packed: tl.constexpr = CODES == "int4" or CODES == "high4"  # pyright: ignore
    per: tl.constexpr = 2 if is_packed else 1  # pyright: ignore[reportAssignmentType]
    width = features // per
    item = tile * (COLUMNS // per) + tl.arange(0, COLUMNS // per)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        start = (first + step) * DEPTH
        index = start + tl.arange(0, DEPTH)
        inside = index < in_features
        # in·out may exceed 2³¹.
        wide = index.to(tl.int64)[:, None]
        mask = inside[:, None] & (item < width)[None, :]
        stored = tl.load(weight_ptr + wide * width + item[None, :], mask=mask, other=0)
        weight = decoded(stored, levels_ptr, CODES).to(x_ptr.dtype.element_ty)
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * in_features + index[None, :], mask=mask, other=0.0)
        weight, x = tl.trans(weight), tl.trans(x)
        if WIDEN:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        if CODES == "":
            total = tl.dot(weight, x, total)
        else:
            there = (column < features) & (start < in_features)
            at = scales_ptr + (start // RUN).to(tl.int64) * features + column
            scales = tl.load(at, mask=there, other=0.0).to(tl.float32)
            total += scales[:, None] * tl.dot(weight, x)
    return total


@jit
def _store(target_ptr, total, tile, rows, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < features)[None, :]
    offset = row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(target_ptr + offset, tl.trans(total), mask=mask)


@jit
def finish(
    parts_ptr,  # f32[splits, rows, out]
    z_ptr,  # f32[splits, rows, r]
    lora_b_ptr,  # [r, out]
    g_ptr,  # f32[out] or None
    bias_ptr,  # [out] or None
    y_ptr,  # [rows, out]
    rows,
    features,
    scale,  # a number or its address
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, r = tl.arange(0, ROWS), tl.arange(0, PADDED_RANK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    mask = (row < rows)[:, None] & column_mask[None, :]
    z_mask = (row < rows)[:, None] & (r < RANK)[None, :]
    offset = row.to(tl.int64)[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    z_offset = row[:, None] * RANK + r[None, :]
    base = tl.zeros((ROWS, COLUMNS), tl.float32)
    z = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    for split in tl.static_range(0, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        at = split * tl.cast(rows, tl.int64)
        base += tl.load(parts_ptr + at * features + offset, mask=mask, other=0.0)
        z += tl.load(z_ptr + at * RANK + z_offset, mask=z_mask, other=0.0)
    b_mask = (r < RANK)[:, None] & column_mask[None, :]
    b = tl.load(lora_b_ptr + r[:, None] * features + column[None, :], mask=b_mask, other=0.0)
    z = z.to(b.dtype)
    if WIDEN:
        z, b = z.to(tl.float32), b.to(tl.float32)
    y = base + number(scale) * tl.dot(z, b)
    if g_ptr is not None:
        y *= tl.load(g_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
