"""Launches of :mod:`dora_common.triton.expand_compose`.

Expand and compose in one kernel: the adapter's second product, z Bᵀ, with compose as its epilogue.
"""

import torch
from torch import Tensor

from dora_common.triton.expand_compose import config, kernel
from dora_common.triton.jit import cdiv
from torch_dora.ops.operator import operator
from torch_dora.ops.triton.jit import capability, launch_kernel


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
    base, g = base.contiguous(), g.contiguous()
    results = [torch.empty_like(base) for _ in range(1 + want_inner)]
    features, rank = lora_b.shape
    rows = base.numel() // max(1, features)
    if rows == 0 or features == 0:
        return results
    chosen = config(rank, capability(base.device))
    launch_kernel(
        kernel,
        (cdiv(rows, chosen.rows) * cdiv(features, chosen.columns),),
        base,
        z.contiguous(),
        lora_b.contiguous(),
        g,
        g if bias is None else bias.contiguous(),
        results[0],
        results[-1],
        rows,
        features,
        scale,
        RANK=rank,
        OUT_LAST=False,
        HAS_BIAS=bias is not None,
        ADDS_BIAS=False,
        WITH_INNER=want_inner,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        DEPTH=chosen.depth,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return results


@expand_compose.fake
def _(base, z, lora_b, g, bias, scale, want_inner):
    return [base.new_empty(base.shape) for _ in range(1 + want_inner)]
