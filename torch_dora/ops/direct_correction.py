"""The direct call of PEFT's DoRA in training, which applies dropout to the input of the whole
correction, and its gradient. With d = dropout(x), base = d Wᵀ and lora = (d Aᵀ) Bᵀ,

    y = x Wᵀ + bias + ΔY        ΔY = (g-1)∘base + g∘(s·lora)

    d_base = (g-1)∘dy    d_lora = s·g∘dy    dz = d_lora B    dA = dzᵀ d    dB = d_loraᵀ z
    dx = dy W            dd = d_base W + dz A    d_g = Σ_rows dy∘(base + s·lora)
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.direct_projection import base_of
from torch_dora.ops.dtypes import cast
from torch_dora.ops.operator import is_observed
from torch_dora.ops.plan import Plan
from torch_dora.ops.products import rounded_once, rows_of

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import compose_backward


def forward(
    plan: Plan,
    operands: tuple[Any, ...],
    g: Tensor,
    a: Tensor,
    b: Tensor,
    keep_z: bool,
    keep_inner: bool,
    joins: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns y [..., out], and what the gradient may need: x and dropout(x) [rows, in] in the
    plan's dtype, inner and z = dropout(x) lora_aᵀ, each if it is to be kept."""
    x, dropped, weight, bias = operands
    y, x = base_of(plan, x, weight, bias)
    dropped = cast(dropped if plan.is_matrix else dropped.reshape(*plan.x_rows), plan.dtype)
    base = F.linear(dropped, weight.to(plan.dtype) if plan.casts_weight else weight)
    z = F.linear(dropped, a)
    # inner takes base's memory. A dispatch mode must see the product z lora_bᵀ.
    if plan.expand_delta is None or torch._C._len_torch_dispatch_stack():
        plan.add_delta[keep_inner](base, F.linear(z, b), g, g, y, base)
    else:
        plan.expand_delta[keep_inner](base, z, b.contiguous(), g, g, y, base)
    return y, x, dropped, base if keep_inner else None, z if keep_z else None


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the plan, which has none, and of the eight tensors of a call."""
    x, dropped, inner, z = ctx.saved_tensors
    weight, lora_a, lora_b, _ = ctx.parameters
    plan, scales = ctx.call
    floor, g = scales.tensors
    _, want_x, want_dropped, want_weight, want_bias, want_a, want_b, want_g, _ = (
        ctx.needs_input_grad
    )
    dx = d_dropped = d_weight = d_bias = d_a = d_b = d_g = None
    dy = (dy if plan.is_matrix else dy.reshape(*plan.y_rows)).contiguous()
    want_base = want_dropped or want_weight
    want_lora = want_dropped or want_a or want_b
    if is_observed():
        flags = plan.scale, True, want_base, want_lora
        found = compose_backward.compose_backward(dy, inner, g, *flags, floor)
        d_g = found.pop() if want_g else None
        d_lora = found.pop() if want_lora else None
        d_base = found.pop() if want_base else None
    else:
        d_base = dy.new_empty(*plan.y_rows) if want_base else None
        d_lora = dy.new_empty(*plan.y_rows) if want_lora else None
        outputs = dy if d_base is None else d_base, dy if d_lora is None else d_lora
        strips, launch, total = plan.compose_backward[want_base, want_lora, want_g]
        if want_g:
            partial = g.new_empty(strips * plan.out_features)
            launch(dy, inner, g, *outputs, partial)
            total(partial, floor, d_g := g.new_empty(plan.out_features))
        elif want_base or want_lora:
            launch(dy, dy, g, *outputs, g)
    w = weight.to(plan.dtype) if plan.casts_weight else weight
    if want_x:
        dx = cast(torch.mm(dy, w), plan.x_dtype)
        dx = dx if plan.is_matrix else dx.view(*plan.x_shape)
    if want_weight and d_base is not None:
        d_weight = rounded_once(dy.mT, rows_of(x), torch.float32)
        d_weight = (d_weight + rounded_once(d_base.mT, dropped, torch.float32)).to(weight.dtype)
    if d_lora is not None:
        a, b = scales.adapter(plan, lora_a, lora_b)
        if want_b:
            d_b = plan.into_adapter(d_lora.mT, z)
        if want_a or want_dropped:
            dz = torch.mm(d_lora, b)
            if want_a:
                d_a = plan.into_adapter(dz.mT, dropped)
            if d_base is not None and want_dropped:
                d_dropped = torch.mm(d_base, w)
                torch.addmm(d_dropped, dz, a, out=d_dropped)
                d_dropped = cast(d_dropped, plan.adapter_x_dtype)
                d_dropped = d_dropped if plan.is_matrix else d_dropped.view(*plan.x_shape)
    if want_bias:
        d_bias = dy.sum(0, dtype=torch.float32).to(plan.bias_dtype)
    if d_g is not None:
        d_g = cast(d_g, plan.magnitude_dtype)
    return None, dx, d_dropped, d_weight, d_bias, d_a, d_b, d_g, None
