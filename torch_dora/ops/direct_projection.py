"""The projection of a direct call, and its gradient: see :mod:`torch_dora.ops.linear`."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.dtypes import cast
from torch_dora.ops.operator import is_observed
from torch_dora.ops.plan import Plan
from torch_dora.ops.products import rounded_once, rows_of

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import compose_backward, expand_compose

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


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
    """Returns y [..., out], and what the gradient may need: x and adapter_x [rows, in] in the
    plan's dtype, inner and z = adapter_x lora_aᵀ, scaled unless in fp16, each if it is to be kept.

    Args:
        operands: x, adapter_x or None, weight, and bias or None.
        a, b: lora_a and lora_b in the plan's dtype.
        joins: whether inner and then z are one tensor, instead of inner, if both are kept.
    """
    x, adapter_x, weight, bias = operands
    base, x = base_of(plan, x, weight, bias)
    rows = x if plan.is_matrix else x.reshape(*plan.x_rows)
    adapter_rows = rows if adapter_x is None else cast(rows_of(adapter_x), plan.dtype)
    inner = z = None
    if keep_inner and keep_z and joins:
        inner = base.new_empty(plan.kept_size)
        z = part(inner, (plan.rows, plan.rank), plan.z_start)
    elif keep_inner:
        inner = base.new_empty(*plan.y_shape)
    if plan.z_scale == 1:
        z = torch.mm(adapter_rows, a.mT, out=z)
    else:
        z = torch.addmm(plan.unread, adapter_rows, a.mT, beta=0, alpha=plan.z_scale, out=z)
    b, bias = b.contiguous(), None if bias is None else cast(bias, plan.dtype).contiguous()
    if torch._C._len_torch_dispatch_stack():  # The mode must see the product z lora_bᵀ.
        scale = plan.later_scale
        y, *found = expand_compose.expand_compose(base, z, b, g, bias, scale, keep_inner)
        base.copy_(y)
        if inner is not None:
            part(inner, plan.y_rows, 0).copy_(found[0].view(*plan.y_rows))
    else:  # y takes base's memory.
        expand = plan.expand_with_inner if keep_inner else plan.expand
        bias = g if bias is None else bias
        expand(base, z, b, g, bias, base, inner if keep_inner else g)
    return base, rows, adapter_rows, inner, z if keep_z and not (keep_inner and joins) else None


def base_of(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x weightᵀ + bias, [..., out], which may be changed in place, and x, both in the
    plan's dtype."""
    x = x if plan.x_dtype is plan.dtype else x.to(plan.dtype)
    w = weight.to(plan.dtype) if plan.casts_weight else weight
    # autograd forbids to change a view from a Function in place, as y += residual does. A product
    # without a bias is none, of any shape.
    if bias is None and x.is_contiguous():
        return F.linear(x, w), x
    bias = None if bias is None else cast(bias, plan.dtype)
    base = F.linear(rows_of(x), w, bias)
    return base if plan.is_matrix else _UNSAFE_VIEW(base, plan.y_shape), x


def part(kept: Tensor, shape: tuple[int, int], start: int) -> Tensor:
    """Returns the matrix that begins at an element of the tensor of inner and z."""
    return kept.as_strided(shape, (shape[1], 1), start)


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the plan, which has none, and of the eight tensors of a call."""
    rows, adapter_rows, inner, z = ctx.saved_tensors
    weight, lora_a, lora_b, _ = ctx.parameters
    plan, scales = ctx.call
    floor, g = scales.tensors
    _, want_x, want_adapter_x, want_weight, want_bias, want_a, want_b, want_g, _ = (
        ctx.needs_input_grad
    )
    dtype, shared = plan.dtype, plan.adapter_x_dtype is None
    want_dz = want_a or want_adapter_x or (want_x and shared)
    want_d = want_dz or want_x or want_weight or want_b
    dx = d_adapter_x = d_weight = d_bias = d_a = d_b = d_g = None
    dy = (dy if plan.is_matrix else dy.reshape(*plan.y_rows)).contiguous()
    d = None
    if is_observed():
        read = part(inner, plan.y_rows, 0) if want_g else None
        found = compose_backward.compose_backward(dy, read, g, 1.0, False, want_d, False, floor)
        d_g = found.pop() if want_g else None
        d = found[0] if want_d else None
    elif want_d or want_g:
        d = dy.new_empty(*plan.y_rows) if want_d else None
        strips, launch, total = plan.compose_backward[want_d, False, want_g]
        if want_g:
            partial = g.new_empty(strips * plan.out_features)
            launch(dy, inner, g, dy if d is None else d, dy, partial)
            total(partial, floor, d_g := g.new_empty(plan.out_features))
        else:
            launch(dy, dy, g, d, dy, g)
    if d is not None:
        a, b = scales.adapter(plan, lora_a, lora_b)
        if want_x:
            dx = torch.mm(d, weight.to(dtype) if plan.casts_weight else weight)
        if want_weight:
            d_weight = rounded_once(d.mT, rows, weight.dtype)
        if want_b:
            if z is None:
                z = part(inner, (plan.rows, plan.rank), plan.z_start)
            later = plan.later_scale
            if later == 1 or plan.casts:
                d_b = plan.into_adapter(d.mT, z)
                d_b = d_b if later == 1 else d_b.mul_(later)
            else:
                d_b = torch.addmm(plan.unread, d.mT, z, beta=0, alpha=later)
        if want_dz:
            dz = torch.addmm(plan.unread, d, b, beta=0, alpha=plan.scale)
            if want_a:
                d_a = plan.into_adapter(dz.mT, rows if shared else adapter_rows)
            if dx is not None and shared:
                torch.addmm(dx, dz, a, out=dx)
            if want_adapter_x:
                d_adapter_x = cast(torch.mm(dz, a), plan.adapter_x_dtype).view(*plan.x_shape)
    if want_bias:
        d_bias = dy.sum(0, dtype=torch.float32).to(plan.bias_dtype)
    if d_g is not None:
        d_g = cast(d_g, plan.magnitude_dtype)
    if dx is not None:
        dx = cast(dx, plan.x_dtype)
        dx = dx if plan.is_matrix else dx.view(*plan.x_shape)
    return None, dx, d_adapter_x, d_weight, d_bias, d_a, d_b, d_g, None
