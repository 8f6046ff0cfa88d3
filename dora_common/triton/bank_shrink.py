"""Multiplies each row by the A of its slot, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.

x: [batch, time, in] and A: [slots, ranks, in], both fp16 or bf16; parts: f32[splits, batch·time,
ranks]. The sum of the parts is z, which is zero beyond the rank of a row's slot.

All tokens of a program use one slot: they are tokens of one row of the batch or, if every row is
one token, a group of rows. An adapter has the first ranks of its slot, or the last ones if AT_END.

Traffic: x once; A once per program, up to its real rank, from the level-2 cache after the first
read. No adapter is copied.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import WIDEN, cdiv, jit, next_power_of_2

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


def parts_of(tiles: int, features: int) -> tuple[int, int]:
    """Returns the number of parts and the features of one, a power of two of `depth`, so that many
    sizes share a compiled kernel."""
    steps = cdiv(features, CONFIG.depth)
    splits = max(1, min(steps, PROGRAMS // max(1, tiles)))
    chunk = next_power_of_2(cdiv(steps, splits)) * CONFIG.depth
    return cdiv(features, chunk), chunk


@jit
def program_rows(groups_ptr, time, program, ROWS: tl.constexpr, GROUPED: tl.constexpr):
    """Returns a program's row of the batch, or -1 if it has none, the indices of its tokens [ROWS],
    and a mask of the valid ones."""
    if GROUPED:
        index = tl.load(groups_ptr + program * ROWS + tl.arange(0, ROWS))
        row_mask = index >= 0
        row = tl.load(groups_ptr + program * ROWS)
        index = tl.where(row_mask, index, 0).to(tl.int64)
    else:
        tiles = tl.cdiv(time, ROWS)
        row = program // tiles
        token = (program % tiles) * ROWS + tl.arange(0, ROWS)
        row_mask, index = token < time, row.to(tl.int64) * time + token
    return row, index, row_mask


@jit
def row_slot(ids_ptr, rank_ptr, first_ptr, row, slots, RANKS: tl.constexpr, AT_END: tl.constexpr):
    """Returns a row's id, whether that is a slot's number, the slot, and the rank of its
    adapter."""
    if AT_END:
        row_id = tl.load(ids_ptr + row, mask=row >= 0, other=-1)
    else:
        row_id = tl.load(ids_ptr + row)
    known = (row_id >= 0) & (row_id < slots)
    slot = tl.where(known, row_id, 0).to(tl.int64)
    if first_ptr is not None:
        slot += tl.load(first_ptr)
    if rank_ptr is not None:
        rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    else:
        rank = tl.where(known, RANKS, 0)
    return row_id, known, slot, rank


@jit
def rank_mask(r, rank, RANKS: tl.constexpr, AT_END: tl.constexpr):
    """Returns which ranks of a slot are those of its adapter."""
    if AT_END:
        # In groups of 8, as `jax_dora.ops.bank_slots` has them.
        return (r >= RANKS - (rank + 7) // 8 * 8) & (r < RANKS)
    else:
        return r < rank


@jit
def kernel(
    x_ptr,  # [batch, time, in]
    a_ptr,  # [slots, ranks, in]
    ids_ptr,  # [batch]
    groups_ptr,  # i32[programs, ROWS], not read unless GROUPED
    rank_ptr,  # i32[slots] or None, if every adapter has all ranks
    first_ptr,  # i32[], the slot that id 0 stands for, or None
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
    AT_END: tl.constexpr,
):
    split = tl.program_id(1)
    row, index, row_mask = program_rows(groups_ptr, time, tl.program_id(0), ROWS, GROUPED)
    _, _, slot, rank = row_slot(ids_ptr, rank_ptr, first_ptr, row, slots, RANKS, AT_END)
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
                mask=rank_mask(r, rank, RANKS, AT_END)[None, :] & inside[:, None],
                other=0.0,
            )
            if WIDEN:
                x, a = x.to(tl.float32), a.to(tl.float32)
            sums = tl.dot(x, a, sums)
    target = parts_ptr + (split.to(tl.int64) * batch * time + index[:, None]) * RANKS + r[None, :]
    tl.store(target, sums, mask=row_mask[:, None] & (r < RANKS)[None, :])
