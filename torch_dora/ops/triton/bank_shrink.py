"""Each row's product with the A of its slot, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.

x: [batch, time, in] and A: [slots, ranks, in], both fp16 or bf16; parts: f32[splits, batch·time,
ranks], whose sum over splits is z, zero beyond the rank of a row's slot.

A program takes tokens of one slot: of one row of the batch, or, where every row is one token, of
rows that `together` has brought together.

Bytes: A once for each program's tokens, from the level-2 cache but for the first, of the real rank;
x once. No adapter is copied.
"""

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.triton.jit import cdiv, jit, next_power_of_2

# Tensor cores multiply 16 rows or more.
LEAST_ROWS = 16
MOST_RANK = 256
# So many programs keep a GPU busy; more parts are only more to add up.
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


def refuses(call: Call) -> str | None:
    """Returns why the kernels cannot take a call, or None. The call's features are the rank that
    the bank has room for; its dtypes are those of x, of the bank and of the result."""
    wanted, *others = call.dtypes
    if wanted not in (torch.float16, torch.bfloat16):
        return f"multiplies on tensor cores, float16 or bfloat16; got {wanted}"
    if any(one != wanted for one in others):
        return f"x is {wanted}, the bank {others[0]} and the result {others[1]}; takes one dtype"
    if call.features > MOST_RANK:
        return f"the bank has room for rank {call.features}; takes at most {MOST_RANK}"
    return None


def wins(call: Call) -> bool:
    """Returns True: eager torch copies an adapter for every row."""
    return True


def rows_of(time: int) -> int:
    """Returns how many tokens a program takes."""
    return min(CONFIG.rows, max(LEAST_ROWS, next_power_of_2(time)))


def together(ids: Tensor) -> Tensor:
    """Returns i32[programs, 16], rows of a batch by their ids i64[batch], which lie on the CPU: a
    program's are of one id, and -1 fills it up."""
    order = ids.argsort(stable=True)
    _, counts = torch.unique_consecutive(ids[order], return_counts=True)
    programs = (counts + LEAST_ROWS - 1) // LEAST_ROWS
    ends, first = counts.cumsum(0), programs.cumsum(0) - programs
    group = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(len(ids)) - (ends - counts)[group]
    rows = torch.full((int(programs.sum()), LEAST_ROWS), -1, dtype=torch.int32)
    rows.view(-1)[first[group] * LEAST_ROWS + number] = order.to(torch.int32)
    return rows


@jit
def places(order_ptr, time, program, ROWS: tl.constexpr, ORDERED: tl.constexpr):
    """Returns a program's row of the batch, its tokens' places [ROWS], and which there are."""
    if ORDERED:
        place = tl.load(order_ptr + program * ROWS + tl.arange(0, ROWS))
        here = place >= 0
        # A program has one row or more.
        row = tl.load(order_ptr + program * ROWS)
        place = tl.where(here, place, 0).to(tl.int64)
    else:
        tiles = tl.cdiv(time, ROWS)
        row = program // tiles
        token = (program % tiles) * ROWS + tl.arange(0, ROWS)
        here, place = token < time, row.to(tl.int64) * time + token
    return row, place, here


@jit
def _kernel(
    x_ptr,  # [batch, time, in]
    a_ptr,  # [slots, ranks, in]
    ids_ptr,  # i64[batch]
    order_ptr,  # i32[programs, ROWS], not read unless ORDERED
    rank_ptr,  # i32[slots]
    parts_ptr,  # f32[splits, batch·time, ranks]
    batch,
    time,
    features,
    slots,
    CHUNK: tl.constexpr,  # features of a part
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ORDERED: tl.constexpr,
    WIDEN: tl.constexpr,  # the same products; the interpreter has none of bf16
):
    split = tl.program_id(1)
    row, place, here = places(order_ptr, time, tl.program_id(0), ROWS, ORDERED)
    slot = tl.load(ids_ptr + row)
    known = (slot >= 0) & (slot < slots)
    slot = tl.where(known, slot, 0).to(tl.int64)
    rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    r = tl.arange(0, ROOM)  # [ROOM]
    sums = tl.zeros((ROWS, ROOM), tl.float32)
    if rank > 0:
        for start in range(0, CHUNK, DEPTH):
            k = split * CHUNK + start + tl.arange(0, DEPTH)  # [DEPTH]
            inside = k < features
            x = tl.load(
                x_ptr + place[:, None] * features + k[None, :],
                mask=here[:, None] & inside[None, :],
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
    target = parts_ptr + (split.to(tl.int64) * batch * time + place[:, None]) * RANKS + r[None, :]
    tl.store(target, sums, mask=here[:, None] & (r < RANKS)[None, :])


def launch(x: Tensor, lora_a: Tensor, ids: Tensor, order: Tensor | None, rank: Tensor) -> Tensor:
    """Returns z f32[batch, time, ranks]; `order` is that of rows of one token."""
    batch, time, features = x.shape
    slots, ranks, _ = lora_a.shape
    rows = rows_of(time)
    tiles = batch * cdiv(time, rows) if order is None else order.shape[0]
    steps = cdiv(features, CONFIG.depth)
    splits = max(1, min(steps, PROGRAMS // max(1, tiles)))
    # A power of two, so that few numbers of rows have a program of their own.
    chunk = next_power_of_2(cdiv(steps, splits)) * CONFIG.depth
    splits = cdiv(features, chunk)
    parts = torch.empty(splits, batch, time, ranks, dtype=torch.float32, device=x.device)
    if parts.numel() == 0:
        return parts.new_zeros(batch, time, ranks)
    _kernel[(tiles, splits)](
        x,
        lora_a,
        ids,
        ids if order is None else order,
        rank,
        parts,
        batch,
        time,
        features,
        slots,
        CHUNK=chunk,
        RANKS=ranks,
        ROOM=max(LEAST_ROWS, next_power_of_2(ranks)),
        ROWS=rows,
        DEPTH=CONFIG.depth,
        ORDERED=order is not None,
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=CONFIG.warps,
        num_stages=CONFIG.stages,
    )
    return parts.sum(0)
