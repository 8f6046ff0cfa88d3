"""Launches of :mod:`dora_common.triton.bank_expand`.

Multiplies each row by the B of its slot and computes the result, in one pass over the result.
"""

import torch
from torch import Tensor

from dora_common.triton.bank_expand import config, kernel
from dora_common.triton.jit import cdiv, next_power_of_2
from torch_dora.ops.operator import operator
from torch_dora.ops.triton import bank_shrink
from torch_dora.ops.triton.jit import capability, launch_kernel


@operator("torch_dora::bank_linear")
def bank_linear(
    base: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    g: Tensor,
    scale: Tensor,
    rank: Tensor,
    ids: Tensor,
    row_groups: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Returns y for x [batch, time, in], by both kernels; `row_groups` is None unless every row is
    one token."""
    base, ids = base.contiguous(), ids.contiguous()
    batch, time, features = base.shape
    slots, ranks, _ = lora_b.shape
    y = torch.empty_like(base)
    if y.numel() == 0:
        return y
    z = bank_shrink.launch(x.contiguous(), lora_a, ids, row_groups, rank)
    rows = bank_shrink.tile_rows(time)
    programs = batch * cdiv(time, rows) if row_groups is None else row_groups.shape[0]
    chosen = config(capability(base.device))
    launch_kernel(
        kernel,
        (programs, cdiv(features, chosen.columns)),
        base,
        z,
        lora_b,
        g,
        scale,
        ids,
        ids if row_groups is None else row_groups,
        rank,
        None,
        g if bias is None else bias.contiguous(),
        y,
        time,
        features,
        slots,
        RANKS=ranks,
        PADDED_RANKS=max(bank_shrink.MIN_ROWS, next_power_of_2(ranks)),
        HAS_BIAS=bias is not None,
        OF_ROWS=False,
        ROWS=rows,
        COLUMNS=chosen.columns,
        GROUPED=row_groups is not None,
        AT_END=False,
        num_warps=chosen.warps,
    )
    return y


@bank_linear.fake
def _(base, x, lora_a, lora_b, g, scale, rank, ids, row_groups, bias):
    return base.new_empty(base.shape)


@bank_linear.count
def _(base, x, lora_a, lora_b, *_, **__):
    rows, ranks = base[0] * base[1], lora_a[1]
    return 2 * rows * ranks * (lora_a[2] + lora_b[2])
