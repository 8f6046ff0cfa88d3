"""Launches of :mod:`dora_common.triton.expand_compose`.

Expand and compose in one kernel: the adapter's second product, z Bᵀ, with compose as its epilogue.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dora_common.triton import strip_expand
from dora_common.triton.expand_compose import config, kernel
from dora_common.triton.jit import cdiv
from torch_dora.ops.operator import operator
from torch_dora.ops.triton.jit import DescribingLaunch, Launch, SameLaunch, capability
from torch_dora.ops.triton.one_pass_norm import has_rings

# Measured on an H200: strips at 4096 × 8192 and rank 64 take 38 µs, and the other kernel 54; rings
# at 4096 × 1024 and rank 384 10.3 µs, and the other kernel 14.7. Lower ranks and fewer features
# were not measured at that size.
STRIPS_FROM, RINGS_FROM = 2**24, 2**22


def refuses(dtype: torch.dtype) -> str | None:
    """Returns the reason why the kernel cannot run with activations of ``dtype``, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies on tensor cores, float16 or bfloat16; got {dtype}"
    return None


@operator("torch_dora::expand_compose")
def expand_compose(
    base: Tensor,
    z: Tensor,
    lora_b: Tensor,
    g: Tensor,
    bias: Tensor | None,
    scale: float,
    want_inner: bool,
) -> list[Tensor]:
    """Returns y, and inner if ``want_inner``; contiguous, in base's dtype."""
    base = base.contiguous()
    y, inner = launch(base, z, lora_b, g, bias, scale, want_inner, torch.empty_like(base))
    return [y] if inner is None else [y, inner]


def launch(
    base: Tensor,
    z: Tensor,
    lora_b: Tensor,
    g: Tensor,
    bias: Tensor | None,
    scale: float,
    want_inner: bool,
    y: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Writes into ``y``, which may be ``base``, and returns it, and inner if ``want_inner``. base
    and y are contiguous."""
    features, rank = lora_b.shape
    inner = None
    if want_inner:
        inner = torch.empty_like(base)
    rows = base.numel() // max(1, features)
    if rows == 0 or features == 0:
        return y, inner
    z, lora_b, g = z.contiguous(), lora_b.contiguous(), g.contiguous()
    tensors = base, z, lora_b, g, g if bias is None else bias.contiguous()
    dtypes = base.dtype, z.dtype, lora_b.dtype, g.dtype, tensors[4].dtype
    call = rank, rows, features, scale, bias is not None, want_inner
    _same(base.device, dtypes, *call)(*tensors, y, y if inner is None else inner)
    return y, inner


@functools.lru_cache(1024)
def _same(device: torch.device, dtypes: tuple[torch.dtype, ...], *call: Any) -> SameLaunch:
    """Returns the launch for tensors of these dtypes and sizes on a device."""
    return SameLaunch(prepared(capability(device), *call))


@functools.lru_cache(1024)
def prepared(
    card: int,
    rank: int,
    rows: int,
    features: int,
    scale: float,
    has_bias: bool,
    want_inner: bool,
    adds: bool = False,
) -> Launch:
    """Returns the launch for tensors of these sizes.

    Args:
        adds: whether the change is added to what is in y, and not to base; one kernel of three can.
    """
    size, kind = rows * features, Launch
    takes_rings = size >= STRIPS_FROM or (size >= RINGS_FROM and features >= 1024 and rank >= 384)
    if card == 90 and takes_rings and not adds and has_rings(rank, features):
        from dora_common.triton import ring_expand

        chosen, kind = ring_expand.config(rank), DescribingLaunch
        programs, *walk = chosen.walk(rows, features, card)
        run, sizes = ring_expand.kernel, (rows, features, *walk)
        tiles = {"RANK": rank, "SLICES": cdiv(rank, chosen.depth)}
        tiles |= {"STAGES": chosen.stages, "SLOTS": chosen.slots}
    elif card == 90 and size >= STRIPS_FROM and not adds and 32 < rank <= 64:
        chosen = strip_expand.config(rank)
        programs, *walk = chosen.walk(features, rows, card)
        run, sizes, tiles = strip_expand.kernel, (rows, features, *walk), chosen.slices(rank)
    else:
        chosen = config(rank, card)
        programs = cdiv(rows, chosen.rows) * cdiv(features, chosen.columns)
        run, sizes, tiles = kernel, (rows, features), {"RANK": rank, "ROWS": chosen.rows}
        tiles |= {"COLUMNS": chosen.columns, "DEPTH": chosen.depth, "ADDS": adds}
    return kind(
        run,
        (programs,),
        (*sizes, scale),
        OUT_LAST=False,
        HAS_BIAS=has_bias,
        ADDS_BIAS=False,
        WITH_INNER=want_inner,
        **tiles,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )


@expand_compose.fake
def _(base, z, lora_b, g, bias, scale, want_inner):
    return [base.new_empty(base.shape) for _ in range(1 + want_inner)]


@expand_compose.count
def _(base, z, lora_b, *_, **__):
    return 2 * math.prod(z) * lora_b[0]
