"""The adapted projection, y = x W'ᵀ + bias, and its gradient.

With base = xWᵀ, z = xAᵀ, lora = zBᵀ and g from ``magnitude_scale`` (arXiv 2603.22276, section 2):

    y = base + ((g-1)∘base + g∘(s·lora)) + bias

With d = g∘dy, the gradient is computed in an order that never forms an [out, in] product:

    dz = s·(d B)    dx = d W + dz A    dA = dzᵀ x    dB = s·(dᵀ z)
    d_g = Σ_rows dy∘(base + s·lora)    dbias = Σ_rows dy

The weight is usually frozen: its gradient, dᵀx, is computed only if needed. The small products
include s, so that one tensor of y's size, d, is written instead of two.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dora.ops import check, choose, direct, row_scaled, sharded
from torch_dora.ops.compose import (
    backward,
    choose_compose,
    compose_delta,
    differentiable_once,
    forward,
)
from torch_dora.ops.dtypes import accumulation_dtype, cast, no_autocast
from torch_dora.ops.norm import adapted_scale, magnitude_scale
from torch_dora.ops.operator import is_compiled, is_observed
from torch_dora.ops.products import rounded_once, rows_of
from torch_dora.ops.quantised import Bits4, as_matrix, dense, is_quantised

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import expand_compose


def dora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    scale: float,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    implementation: str | None = None,
    adapter_x: Tensor | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
) -> Tensor:
    """Returns y = magnitude ∘ x (weight + s·lora_b lora_a)ᵀ / ‖weight + s·lora_b lora_a‖ + bias.

    Args:
        x: [..., in].
        weight: [out, in], usually frozen; or quantised by torchao, in int8, fp8 or NF4, or by
            bitsandbytes in 4 bits, and then dequantised for each product.
        lora_a: [r, in].
        lora_b: [out, r].
        magnitude: [out].
        scale: alpha/r or alpha/sqrt(r).
        bias: [out]; never scaled.
        norm: f32[out], an earlier result of :func:`factored_norm` for the same tensors. It is not
            checked.
        implementation: None, "triton" or "eager"; a named one runs or raises.
        adapter_x: [..., in], the adapter's input if it differs from x: x after the adapter's
            dropout.
        act_qtype: "float8_e4m3fn" rounds x to this format for the product with the weight, with one
            scale per row. The weight must be torchao's Float8Tensor of this format with one scale
            per row. The adapter's products and all gradients use the unrounded x.
        bwd_qtype: "float8_e4m3fn" or "float8_e5m2" also rounds the gradient of the result, times g
            and the weight's scales, for its product with the weight, with one scale per row. The
            adapter's gradients use the unrounded one. It needs act_qtype.

    Returns:
        [..., out]. The dtype is the one that x and weight promote to, x's dtype over a quantised
        weight, or autocast's dtype under autocast, as in ``torch.nn.functional.linear``.

        Adapters of another dtype are cast to it for the products with activations (not for the
        norm). Their gradients have the adapters' own dtype. The norm is a constant under
        differentiation.

        For DTensors the result is a DTensor, sharded like the plain projection's result; see
        :mod:`torch_dora.ops.sharded`.

    Raises:
        TypeError, ValueError: an argument's dtype or shape is wrong; unknown implementation; some
            tensors are DTensors and others are not, or their meshes differ.
        NotImplementedError: the named implementation cannot run the call; a DTensor is a pending
            sum; a transform of torch.func is given act_qtype.
    """
    if act_qtype is None and bwd_qtype is None:
        tensors = (x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm)
        y = direct.linear(tensors, scale, implementation)
        if y is not None:
            return y
    row_scaled.check(weight, act_qtype, bwd_qtype)
    choose.check_name(implementation)
    check.is_float("x", x)
    weight = as_matrix(weight)
    if is_quantised(weight) and weight.requires_grad:
        raise TypeError(
            f"weight is a {type(weight).__name__} that requires a gradient; expected a frozen one: "
            "call weight.requires_grad_(False)"
        )
    check.adapter(weight, lora_a, lora_b)
    out_features, in_features = weight.shape
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last axis must have the weight's {in_features} "
            "input features"
        )
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, (out_features,), "[out]")
    check.is_scale(scale)
    if bias is not None:
        check.is_float("bias", bias)
        check.has_shape("bias", bias, (out_features,), "[out]")
    if adapter_x is not None:
        check.is_float("adapter_x", adapter_x)
        check.has_shape("adapter_x", adapter_x, tuple(x.shape), "x's shape [..., in]")
    dtype = result_dtype(x, weight)
    if norm is None:
        adapter = lora_a, lora_b, magnitude
        g = adapted_scale(weight, *adapter, scale, dtype, implementation)
    else:
        g = magnitude_scale(magnitude, norm, dtype)
    operands = Operands(x, adapter_x, weight, bias, lora_a, lora_b, g)
    return sharded.projection(
        functools.partial(_local_linear, float(scale), dtype, implementation, act_qtype, bwd_qtype),
        *operands,
    )


class Operands(NamedTuple):
    """The tensors of a call: `adapter_x` and `bias` may be None, g is f32[out]."""

    x: Tensor
    adapter_x: Tensor | None
    weight: Tensor | Bits4
    bias: Tensor | None
    lora_a: Tensor
    lora_b: Tensor
    g: Tensor


class Static(NamedTuple):
    """The arguments of a call that are not tensors; `implementation` is the forward pass's, `back`
    the backward pass's."""

    scale: float
    dtype: torch.dtype
    want_inner: bool
    implementation: str
    back: str
    act_qtype: str | None
    bwd_qtype: str | None


def _local_linear(
    scale: float,
    dtype: torch.dtype,
    implementation: str | None,
    act_qtype: str | None,
    bwd_qtype: str | None,
    *tensors: Any,
) -> Tensor:
    """Returns y for plain tensors, computed by the named implementation or the best one."""
    operands = Operands(*tensors)
    x, g = operands.x, operands.g
    like = x.new_empty((), dtype=dtype).expand(*x.shape[:-1], operands.weight.shape[0])
    want_inner = torch.is_grad_enabled() and g.requires_grad
    chosen = choose_compose(like, like, g, implementation)
    # A compiler fuses the backward pass of compose with what is before it, but not the forward pass
    # with the product that the kernel makes.
    back = "eager" if implementation is None and is_compiled() else chosen
    static = Static(scale, dtype, want_inner, chosen, back, act_qtype, bwd_qtype)
    if choose.in_transform():
        if act_qtype is not None:
            raise NotImplementedError(
                f"act_qtype is {act_qtype!r} inside a transform of torch.func, which would "
                "differentiate the rounding; expected None there, or torch.autograd"
            )
        return _forward(static._replace(want_inner=False), operands)[0]
    return _DoRALinear.apply(static, *operands)


def corrected_linear(
    x: Tensor,
    dropped: Tensor,
    weight: Any,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    norm: Tensor | None,
    scale: float,
    implementation: str | None,
) -> Tensor:
    """Returns y = x weightᵀ + bias + ΔY(``dropped``), where ``dropped`` is x after dropout: PEFT's
    DoRA computes this in training. Without a norm it is computed."""
    tensors = x, dropped, weight, bias, lora_a, lora_b, magnitude, norm
    y = direct.linear(tensors, scale, implementation, corrects=True)
    if y is not None:
        return y
    weight = as_matrix(weight)
    dtype = result_dtype(x, weight)
    if norm is None:
        g = adapted_scale(weight, lora_a, lora_b, magnitude, scale, dtype, implementation)
    else:
        g = magnitude_scale(magnitude, norm, dtype)

    def compute_local(x, dropped, weight, bias, lora_a, lora_b, g) -> Tensor:
        y = _plain_linear(x, weight, bias)
        base = _plain_linear(dropped, weight, None)
        z = F.linear(dropped.to(base.dtype), lora_a.to(base.dtype))
        lora = F.linear(z, lora_b.to(base.dtype))
        return y + compose_delta(base, lora, g, scale, implementation=implementation)

    operands = Operands(x, dropped, weight, bias, lora_a, lora_b, g)
    return sharded.projection(compute_local, *operands)


def _forward(static: Static, operands: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (y, z, inner or None)."""
    x, adapter_x, weight, bias, lora_a, lora_b, g = operands
    scale, dtype, want_inner, implementation, _, act_qtype, _ = static
    with no_autocast(x):
        adapter_x = x if adapter_x is None else adapter_x
        bias = None if bias is None else cast(bias, dtype)
        if act_qtype is None:
            base = F.linear(cast(x, dtype), dense(weight, dtype), bias)
        else:
            base = row_scaled.product(cast(x, dtype), weight, bias)
        z = F.linear(cast(adapter_x, dtype), cast(lora_a, dtype))
        y, inner = _expand_compose(
            base, z, cast(lora_b, dtype), g, bias, scale, want_inner, implementation
        )
    return y, z, inner


class _DoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, static, *tensors):
        operands = Operands(*tensors)
        x, adapter_x, weight, bias, lora_a, lora_b, g = operands
        y, z, inner = _forward(static, operands)
        _, _, d_weight, _, d_a, d_b, _ = ctx.needs_input_grad[1:]
        # save_for_backward accepts only tensors, and a Bits4 is none.
        ctx.bits4 = weight if isinstance(weight, Bits4) else None
        ctx.save_for_backward(
            x if d_weight or (d_a and adapter_x is None) else None,
            adapter_x if d_a else None,
            weight if ctx.bits4 is None else None,
            lora_a,
            lora_b,
            z if d_b else None,
            inner,
            g,
        )
        ctx.dtypes = tuple(
            None if t is None else t.dtype for t in (x, adapter_x, weight, bias, lora_a, lora_b)
        )
        ctx.scale, ctx.implementation = static.scale, static.back
        ctx.bwd_qtype = static.bwd_qtype
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, adapter_x, weight, lora_a, lora_b, z, inner, g = ctx.saved_tensors
        weight = weight if ctx.bits4 is None else ctx.bits4
        want_x, want_adapter_x, want_weight, want_bias, want_a, want_b, want_g = (
            ctx.needs_input_grad[1:]
        )
        x_dtype, adapter_x_dtype, weight_dtype, bias_dtype, a_dtype, b_dtype = ctx.dtypes
        shared = adapter_x_dtype is None
        with no_autocast(dy):
            inner = inner if want_g else None
            want_d = any((want_x, want_adapter_x, want_weight, want_a, want_b))
            d, _, d_g = backward(dy, inner, g, ctx.scale, False, want_d, False, ctx.implementation)
            dx = d_adapter_x = d_weight = d_bias = d_a = d_b = None
            if d is not None:
                d = rows_of(d)
                if want_x:
                    dx = row_scaled.transposed_product(d, weight, ctx.bwd_qtype)
                if want_weight:
                    d_weight = rounded_once(d.T, rows_of(x).to(dy.dtype), weight_dtype)
                if want_b:
                    d_b = _scaled_mm(d.T, rows_of(z), ctx.scale, b_dtype)
                if want_a or want_adapter_x or (want_x and shared):
                    dz = _scaled_mm(d, lora_b.to(dy.dtype), ctx.scale, dy.dtype)
                    if want_a:
                        d_a = rounded_once(
                            dz.T, rows_of(x if shared else adapter_x).to(dy.dtype), a_dtype
                        )
                    if dx is not None and shared:
                        a = lora_a.to(dy.dtype)
                        if is_observed():  # FlopCounterMode does not know addmm_.
                            torch.addmm(dx, dz, a, out=dx)
                        else:  # A batch of gradients does not know out=.
                            dx.addmm_(dz, a)
                    if want_adapter_x:
                        d_adapter_x = dz @ lora_a.to(dy.dtype)
            if want_bias:
                d_bias = rows_of(dy).sum(0, dtype=accumulation_dtype(dy)).to(bias_dtype)
            x_shape = (*dy.shape[:-1], weight.shape[1])
            if dx is not None:
                dx = dx.reshape(x_shape).to(x_dtype)
            if d_adapter_x is not None:
                d_adapter_x = d_adapter_x.reshape(x_shape).to(adapter_x_dtype)
        return None, dx, d_adapter_x, d_weight, d_bias, d_a, d_b, d_g


def _plain_linear(x: Tensor, weight: Tensor | Bits4, bias: Tensor | None) -> Tensor:
    """Returns x weightᵀ + bias, with torch's gradient, or for 4 bits one that dequantises the
    weight again."""
    if not isinstance(weight, Bits4):
        return F.linear(x, weight, bias)
    dtype = result_dtype(x, weight)
    x, bias = cast(x, dtype), None if bias is None else cast(bias, dtype)
    if choose.in_transform():
        return F.linear(x, dense(weight, dtype), bias)
    return _Linear4bit.apply(weight, x, bias)


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, bias):
        ctx.bits4 = weight
        with no_autocast(x):
            return F.linear(x, dense(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        with no_autocast(dy):
            dx = dy @ dense(ctx.bits4, dy.dtype, again=True)
        return None, dx, rows_of(dy).sum(0) if ctx.needs_input_grad[2] else None


def _expand_compose(base, z, lora_b, g, bias, scale, want_inner, implementation):
    """Returns (y, inner or None) for lora = z lora_bᵀ, in one kernel if there is one for the
    dtype."""
    if implementation == "triton" and expand_compose.refuses(base.dtype) is None:
        y, *inner = expand_compose.expand_compose(base, z, lora_b, g, bias, scale, want_inner)
        return y, inner[0] if want_inner else None
    lora = F.linear(z, lora_b)
    return forward(base, lora, g, bias, scale, False, want_inner, implementation)


if choose.TRITON_MODE is not None:

    @expand_compose.expand_compose.define
    def _definition(base, z, lora_b, g, bias, scale, want_inner) -> list[Tensor]:
        lora = F.linear(z, lora_b)
        y, inner = forward(base, lora, g, bias, scale, False, want_inner, "eager")
        return [y] if inner is None else [y, inner]


def result_dtype(x: Tensor, weight: Tensor | Bits4) -> torch.dtype:
    """Returns the dtype of the result of ``torch.nn.functional.linear``."""
    # A quantised weight reports the dtype before quantisation, even if the model was cast since.
    dtype = x.dtype if is_quantised(weight) else torch.promote_types(x.dtype, weight.dtype)
    # torch.compile of torch 2.11 cannot trace the question whether a device has autocast.
    if dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return torch.get_autocast_dtype(x.device.type)


def _scaled_mm(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns scale·(a @ b) in ``dtype``; the sum is scaled before it is rounded."""
    if dtype == a.dtype:
        # With beta = 0, addmm ignores its first argument.
        return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)
    return rounded_once(a, b, accumulation_dtype(a)).mul_(scale).to(dtype)
