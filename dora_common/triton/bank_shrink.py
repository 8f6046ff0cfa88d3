"""Multiplies each row by the A of its slot, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.

x: [batch, time, in] and A: [slots, ranks, in], both fp16 or bf16; parts: f32[splits, batch·time,
ranks]. The sum of the parts is z, which is zero beyond the rank of a row's slot.

All tokens of a program use one slot: they are tokens of one row of the batch or, if every row is
one token, a group of rows from `group_rows`.

Traffic: x once; A once per program, up to its real rank, from the level-2 cache after the first
read. No adapter is copied.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import WIDEN, jit, next_power_of_2

# Tensor cores multiply at least 16 rows.
MIN_ROWS = 16
MAX_RANK = 256
# This many programs keep a GPU busy. More parts would only add more sums.
PROGRAMS = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """A program multiplies up to ``rows`` tokens of one row of the batch, ``depth`` features at a
    time."""

    rows: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 3


CONFIG = Config()


def tile_rows(time: int) -> int:
    """Returns how many tokens a program computes."""
    return min(CONFIG.rows, max(MIN_ROWS, next_power_of_2(time)))


@jit
def program_rows(groups_ptr, time, program, ROWS: tl.constexpr, GROUPED: tl.constexpr):
    """Returns a program's row of the batch, the indices of its tokens [ROWS], and a mask of the
    valid ones."""
    if GROUPED:
        index = tl.load(groups_ptr + program * ROWS + tl.arange(0, ROWS))
        row_mask = index >= 0
        # Every program has at least one row.
        row = tl.load(groups_ptr + program * ROWS)
        index = tl.where(row_mask, index, 0).to(tl.int64)
    else:
        tiles = tl.cdiv(time, ROWS)
        row = program // tiles
        token = (program % tiles) * ROWS + tl.arange(0, ROWS)
        row_mask, index = token < time, row.to(tl.int64) * time + token
    return row, index, row_mask


@jit
def kernel(
    x_ptr,  # [batch, time, in]
    a_ptr,  # [slots, ranks, in]
    ids_ptr,  # i64[batch]
    groups_ptr,  # i32[programs, ROWS], not read unless GROUPED
    rank_ptr,  # i32[slots]
    parts_ptr,  # f32[splits, batch·time, ranks]
    batch,
    time,
    features,
    slots,
    CHUNK: tl.constexpr,  # features per part
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
):
    split = tl.program_id(1)
    row, index, row_mask = program_rows(groups_ptr, time, tl.program_id(0), ROWS, GROUPED)
    slot = tl.load(ids_ptr + row)
    known = (slot >= 0) & (slot < slots)
    slot = tl.where(known, slot, 0).to(tl.int64)
    rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    r = tl.arange(0, PADDED_RANKS)  # [PADDED_RANKS]
    sums = tl.zeros((ROWS, PADDED_RANKS), tl.float32)
    if rank > 0:
        for start in range(0, CHUNK, DEPTH):
            k = split * CHUNK + start + tl.arange(0, DEPTH)  # [DEPTH]
            inside = k < features
            x = tl.load(
                x_ptr + index[:, None] * features + k[None, :],
                mask=row_mask[:, None] & inside[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptr + (slot * RANKS + r[None, :]) * features + k[:, None],
                mask=(r < rank)[None, :] & inside[:, None],
                other=0.0,
            )
            if WIDEN:
                x, a = x.to(tl.float32), a.to(tl.float32)
            sums = tl.dot(x, a, sums)
    target = parts_ptr + (split.to(tl.int64) * batch * time + index[:, None]) * RANKS + r[None, :]
    tl.store(target, sums, mask=row_mask[:, None] & (r < RANKS)[None, :])
