"""Launches of :mod:`dora_common.triton.compose_backward`.

Compose backward: the cotangents of base, lora and g in one pass over dy and inner.
"""

import torch
from torch import Tensor

from dora_common.triton.compose_backward import CONFIG, kernel, strip_height
from dora_common.triton.jit import cdiv
from torch_dora.ops.operator import operator
from torch_dora.ops.triton import column_sums
from torch_dora.ops.triton.jit import launch_kernel


@operator("torch_dora::compose_backward")
def compose_backward(
    dy: Tensor,
    inner: Tensor | None,
    g: Tensor,
    scale: float,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    divisor: Tensor | None = None,
) -> list[Tensor]:
    """Returns d_base if ``want_base``, d_lora if ``want_lora``, then d_g if ``inner`` is given,
    divided by ``divisor``, f32[out], if that is given."""
    dy, g = dy.contiguous(), g.contiguous()
    d_base = torch.empty_like(dy) if want_base else None
    d_lora = torch.empty_like(dy) if want_lora else None
    gradients = [d for d in (d_base, d_lora) if d is not None]
    features = dy.shape[-1]
    rows = dy.numel() // max(1, features)
    if rows == 0 or features == 0:
        return (
            gradients
            if inner is None
            else [*gradients, dy.new_zeros(features, dtype=torch.float32)]
        )
    height = strip_height(CONFIG, rows, features)
    strips = cdiv(rows, height)
    partial = g
    if inner is not None:
        partial = torch.empty(strips, features, device=dy.device, dtype=torch.float32)
    launch_kernel(
        kernel,
        (strips * cdiv(features, CONFIG.columns),),
        dy,
        dy if inner is None else inner.contiguous(),
        g,
        dy if d_base is None else d_base,
        dy if d_lora is None else d_lora,
        partial,
        rows,
        features,
        strips,
        scale,
        DELTA=delta,
        WITH_BASE=want_base,
        WITH_LORA=want_lora,
        WITH_G=inner is not None,
        STEPS=height // CONFIG.rows,
        ROWS=CONFIG.rows,
        COLUMNS=CONFIG.columns,
        STAGES=CONFIG.stages,
        num_warps=CONFIG.warps,
        enable_fp_fusion=True,
    )
    if inner is None:
        return gradients
    if divisor is not None:
        return [*gradients, column_sums.launch(partial, "divide", divisor)]
    # A single strip needs no second stage: its partial sum is the result.
    return [*gradients, partial[0] if strips == 1 else column_sums.launch(partial)]


@compose_backward.fake
def _(dy, inner, g, scale, delta, want_base, want_lora, divisor=None):
    gradients = [dy.new_empty(dy.shape) for want in (want_base, want_lora) if want]
    if inner is not None:
        gradients.append(dy.new_empty(dy.shape[-1], dtype=torch.float32))
    return gradients
