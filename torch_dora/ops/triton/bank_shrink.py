"""Launches of :mod:`dora_common.triton.bank_shrink`.

Multiplies each row by the A of its slot, in parts: parts[p] = x[:, p] A[slot][:, p]ᵀ.
"""

import torch
from torch import Tensor

from dora_common.triton.bank_shrink import (
    CONFIG,
    MAX_RANK,
    MIN_ROWS,
    kernel,
    parts_of,
    tile_rows,
)
from dora_common.triton.jit import cdiv, next_power_of_2
from torch_dora.ops.choose import Call
from torch_dora.ops.triton.jit import launch_kernel


def refuses(call: Call) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None.

    The call's features are the bank's max_rank; its dtypes are those of x, the bank and the result.
    """
    wanted, *others = call.dtypes
    if wanted not in (torch.float16, torch.bfloat16):
        return f"multiplies on tensor cores, float16 or bfloat16; got {wanted}"
    if any(one != wanted for one in others):
        return f"x is {wanted}, the bank {others[0]} and the result {others[1]}; takes one dtype"
    if call.features > MAX_RANK:
        return f"the bank has room for rank {call.features}; takes at most {MAX_RANK}"
    return None


def wins(call: Call) -> bool:
    """Returns True: eager torch copies an adapter for every row."""
    return True


def group_rows(ids: Tensor) -> Tensor:
    """Groups the rows of a batch by slot, for batches whose rows are one token each.

    Args:
        ids: i64[batch] on the CPU, each row's slot.

    Returns:
        i32[programs, 16], the rows of each program, all of one slot; padded with -1.
    """
    order = ids.argsort(stable=True)
    _, counts = torch.unique_consecutive(ids[order], return_counts=True)
    programs = (counts + MIN_ROWS - 1) // MIN_ROWS
    ends, first = counts.cumsum(0), programs.cumsum(0) - programs
    group = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(len(ids)) - (ends - counts)[group]
    rows = torch.full((int(programs.sum()), MIN_ROWS), -1, dtype=torch.int32)
    rows.view(-1)[first[group] * MIN_ROWS + number] = order.to(torch.int32)
    return rows


def launch(
    x: Tensor, lora_a: Tensor, ids: Tensor, row_groups: Tensor | None, rank: Tensor
) -> Tensor:
    """Returns z f32[batch, time, ranks]; `row_groups` is None unless every row is one token."""
    batch, time, features = x.shape
    slots, ranks, _ = lora_a.shape
    rows = tile_rows(time)
    tiles = batch * cdiv(time, rows) if row_groups is None else row_groups.shape[0]
    splits, chunk = parts_of(tiles, features)
    parts = torch.empty(splits, batch, time, ranks, dtype=torch.float32, device=x.device)
    if parts.numel() == 0:
        return parts.new_zeros(batch, time, ranks)
    launch_kernel(
        kernel,
        (tiles, splits),
        x,
        lora_a,
        ids,
        ids if row_groups is None else row_groups,
        rank,
        None,
        parts,
        batch,
        time,
        features,
        slots,
        CHUNK=chunk,
        RANKS=ranks,
        PADDED_RANKS=max(MIN_ROWS, next_power_of_2(ranks)),
        ROWS=rows,
        DEPTH=CONFIG.depth,
        GROUPED=row_groups is not None,
        AT_END=False,
        num_warps=CONFIG.warps,
        num_stages=CONFIG.stages,
    )
    return parts.sum(0)
