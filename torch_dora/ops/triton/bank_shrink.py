"""Each row's product with the A of its slot, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.

x: [batch, time, in] and A: [slots, ranks, in], both fp16 or bf16; parts: f32[splits, batch·time,
ranks], whose sum over splits is z, zero beyond the rank of a row's slot.

Bytes: A once for each tile of a row's tokens, from the level-2 cache but for the first row that has
it, of the real rank; x once. No adapter is copied.
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
    """Returns why the kernels cannot take a call, whose features are the ranks that the bank has
    room for, and whose dtypes are of x, of the bank and of the result; None when they can."""
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


def rows_of(time: int, config: Config = CONFIG) -> int:
    """Returns how many tokens a program takes."""
    return min(config.rows, max(LEAST_ROWS, next_power_of_2(time)))


@jit
def _kernel(
    x_ptr,  # [batch, time, in]
    a_ptr,  # [slots, ranks, in]
    ids_ptr,  # i64[batch]
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
    WIDEN: tl.constexpr,  # the same products; the interpreter has none of bf16
):
    tiles = tl.cdiv(time, ROWS)
    program, split = tl.program_id(0), tl.program_id(1)
    row = program // tiles
    slot = tl.load(ids_ptr + row)
    known = (slot >= 0) & (slot < slots)
    slot = tl.where(known, slot, 0).to(tl.int64)
    rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    token = (program % tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    here, place = token < time, row.to(tl.int64) * time + token
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


def launch(x: Tensor, lora_a: Tensor, ids: Tensor, rank: Tensor, config: Config = CONFIG) -> Tensor:
    """Returns z f32[batch, time, ranks]."""
    batch, time, features = x.shape
    slots, ranks, _ = lora_a.shape
    rows = rows_of(time, config)
    tiles = batch * cdiv(time, rows)
    steps = cdiv(features, config.depth)
    splits = max(1, min(steps, PROGRAMS // max(1, tiles)))
    # A power of two, so that few numbers of rows have a program of their own.
    chunk = next_power_of_2(cdiv(steps, splits)) * config.depth
    splits = cdiv(features, chunk)
    parts = torch.empty(splits, batch, time, ranks, dtype=torch.float32, device=x.device)
    if parts.numel() == 0:
        return parts.new_zeros(batch, time, ranks)
    _kernel[(tiles, splits)](
        x,
        lora_a,
        ids,
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
        DEPTH=config.depth,
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return parts.sum(0)
