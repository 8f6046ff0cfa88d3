"""The call that most layers make: plain tensors of one GPU, results in half precision, not compiled
and not transformed.

It computes what :mod:`torch_dora.ops.linear` computes with the same kernels, as one autograd
function: the norm, g, the products and compose. This takes the least time on the host, which is
what a training step of a small model waits for. ``takes`` looks only at types, dtypes and shapes;
all other calls, and all wrong ones, go the long way.

Gradient checkpointing makes each call again in the backward pass. The second call uses the norm of
the first.
"""

import functools
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.compose import differentiable_once
from torch_dora.ops.dtypes import cast, no_autocast
from torch_dora.ops.norm import EPS_HALF
from torch_dora.ops.operator import PLAIN, is_observed
from torch_dora.ops.products import rounded_once, rows_of

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import (
        adapter_pieces,
        compose_backward,
        expand_compose,
        one_pass_norm,
    )

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def takes(
    tensors: tuple[Any, ...], scale: Any, dtype: torch.dtype, implementation: str | None
) -> bool:
    """Returns whether a call can go this way.

    Args:
        tensors: x [..., in], adapter_x or None, weight [out, in], bias or None, lora_a, lora_b,
            magnitude and norm or None.
        scale: alpha/r or alpha/sqrt(r).
        dtype: the result's.
        implementation: the named one, or None.
    """
    if dtype not in _HALVES or type(scale) is not float or not 0 < abs(scale) < math.inf:
        return False
    if not _runs_kernels(tensors[0], implementation):
        return False
    x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
    device = x.get_device()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN or tensor.get_device() != device):
            return False
    adapter_dtype = lora_a.dtype
    if weight.dtype not in _HALVES or lora_b.dtype != adapter_dtype:
        return False
    if adapter_dtype not in _FLOATS or magnitude.dtype not in _FLOATS:
        return False
    if weight.ndim != 2 or lora_a.ndim != 2 or x.ndim < 2 or not x.numel() or not weight.numel():
        return False
    (out_features, in_features), rank = weight.shape, lora_a.shape[0]
    return (
        rank > 0
        and x.shape[-1] == in_features == lora_a.shape[1]
        and lora_b.shape == (out_features, rank)
        and magnitude.shape == (out_features,)
        and x.is_floating_point()
        and (adapter_x is None or (adapter_x.shape == x.shape and adapter_x.is_floating_point()))
        and (bias is None or (bias.shape == (out_features,) and bias.is_floating_point()))
        and (norm is None or (norm.shape == (out_features,) and norm.dtype == torch.float32))
    )


def _runs_kernels(x: Tensor, implementation: str | None) -> bool:
    if choose.TRITON_MODE == "compiled":
        runs = x.is_cuda and implementation in (None, "triton")
    else:
        runs = choose.TRITON_MODE == "interpreted" and x.is_cpu and implementation == "triton"
    if not runs or is_observed():
        return False
    # Triton launches kernels on the current device.
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()


def linear(tensors: tuple[Any, ...], scale: float, dtype: torch.dtype) -> Tensor:
    """Returns y for operands that `takes` has accepted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _DirectLinear.apply(scale, dtype, *tensors)
    return _forward(tensors, scale, dtype, False, None)[0]


def _forward(
    tensors: tuple[Any, ...],
    scale: float,
    dtype: torch.dtype,
    want_inner: bool,
    scales: tuple[Tensor, ...] | None,
) -> tuple[Any, ...]:
    """Returns y [..., out], and what the gradient may need: x and adapter_x [rows, in] in
    ``dtype``, z = adapter_x lora_aᵀ, scaled unless in fp16, inner, and ``scales``, which are
    computed if they are None: max(norm, eps) and g, f32[out]."""
    x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
    pieces = None
    if scales is None and norm is None and lora_a.dtype == torch.float32:
        # The pass that splits an fp32 adapter for the norm casts it, too.
        pieces, cast_a, cast_b = adapter_pieces.launch(lora_a, lora_b, dtype)
    else:
        cast_a, cast_b = cast(lora_a, dtype), cast(lora_b, dtype)
    if scales is None and norm is not None:
        floor = norm.clamp(min=EPS_HALF)
        scales = floor, magnitude / floor
    elif scales is None:
        scales = one_pass_norm.launch(
            weight, lora_a, lora_b, scale, pieces=pieces, magnitude=magnitude, eps=EPS_HALF
        ).unbind()
    rows = cast(rows_of(x), dtype)
    adapter_rows = rows if adapter_x is None else cast(rows_of(adapter_x), dtype)
    bias = None if bias is None else cast(bias, dtype)
    base = F.linear(rows, cast(weight, dtype), bias)
    z_scale, later_scale = _split_scale(scale, dtype)
    z = _scaled(adapter_rows, cast_a.t(), z_scale)
    # y takes base's memory.
    y, inner = expand_compose.launch(
        base, z, cast_b, scales[1], bias, later_scale, want_inner, base
    )
    if x.ndim > 2:
        # autograd forbids to change a view from a Function in place, as y += residual does.
        y = _UNSAFE_VIEW(y, (*x.shape[:-1], y.shape[1]))
    return y, rows, adapter_rows, z, inner, scales


def _split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the factors of z and of what is computed from it: s·z may exceed float16's largest
    number where s·z lora_bᵀ does not."""
    return (1.0, scale) if dtype == torch.float16 else (scale, 1.0)


def _scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns scale·(a @ b) in the dtype of the operands; the sum is scaled before it is
    rounded."""
    if scale == 1:
        return torch.mm(a, b)
    return torch.addmm(_unread(a.dtype, a.device), a, b, beta=0, alpha=scale)


def _scaled_once(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns scale·(a @ b) in ``dtype``, as `_scaled` or `rounded_once`."""
    if dtype == a.dtype:
        return _scaled(a, b, scale)
    product = rounded_once(a, b, dtype)
    return product if scale == 1 else product.mul_(scale)


@functools.cache
def _unread(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the first argument of an addmm that ignores it."""
    return torch.empty((), dtype=dtype, device=device)


class _Scales:
    """max(norm, eps) and g of a call, and what they were computed from."""

    __slots__ = "__weakref__", "source", "tensors"

    def __init__(self, tensors: tuple[Tensor, ...], source: list[Any]) -> None:
        self.tensors, self.source = tensors, source


# Those of the last call with each lora_b, by its id. The call's node in the graph keeps both alive.
_LAST: WeakValueDictionary[int, _Scales] = WeakValueDictionary()


class _DirectLinear(torch.autograd.Function):
    """The parameters and scales are kept by the function, and few tensors are saved: checkpointing
    calls Python three times for each saved one."""

    @staticmethod
    def forward(ctx, scale, dtype, *tensors):
        _, _, want_weight, _, want_a, want_b, want_g, _ = ctx.needs_input_grad[2:]
        x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
        parts = weight, lora_a, lora_b, magnitude
        versions = [part._version for part in parts]
        source = [scale, norm is None, *versions, *[part.data_ptr() for part in parts]]
        # A call within a backward pass is a repeated one.
        repeats = torch._C._current_graph_task_id() != -1
        last = _LAST.get(id(lora_b)) if repeats else None
        known = None if last is None or last.source != source else last.tensors
        y, rows, adapter_rows, z, inner, scales = _forward(tensors, scale, dtype, want_g, known)
        ctx.scales = _Scales(scales, source)
        if not repeats:
            _LAST[id(lora_b)] = ctx.scales
        ctx.save_for_backward(
            rows if want_weight or (want_a and adapter_x is None) else None,
            adapter_rows if want_a and adapter_x is not None else None,
            z if want_b else None,
            inner,
        )
        # The magnitude is not read, but gradients depend on it, which differentiable_once checks.
        ctx.parameters, ctx.versions = parts, versions[:3]
        dtypes = [None if t is None else t.dtype for t in (x, adapter_x, bias, magnitude)]
        ctx.scale, ctx.kinds = scale, (x.shape, *dtypes)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, adapter_rows, z, inner = ctx.saved_tensors
        weight, lora_a, lora_b, _ = ctx.parameters
        if ctx.versions != [weight._version, lora_a._version, lora_b._version]:
            raise RuntimeError(
                "the weight, lora_a or lora_b of a DoRA layer was changed in place between the "
                "forward and the backward pass, so its gradient cannot be computed any more: call "
                "backward before optimizer.step"
            )
        wanted = ctx.needs_input_grad[2:]
        want_x, want_adapter_x, want_weight, want_bias, want_a, want_b, want_g, _ = wanted
        x_shape, x_dtype, adapter_x_dtype, bias_dtype, magnitude_dtype = ctx.kinds
        shared = adapter_x_dtype is None
        want_dz = want_a or want_adapter_x or (want_x and shared)
        want_d = want_dz or want_x or want_weight or want_b
        dx = d_adapter_x = d_weight = d_bias = d_a = d_b = d_g = None
        with no_autocast(dy):
            dy = rows_of(dy)
            run = compose_backward.compose_backward if is_observed() else compose_backward.launch
            gradients = []
            if want_d or want_g:
                floor, g = ctx.scales.tensors
                gradients = run(dy, inner, g, 1.0, False, want_d, False, floor)
            if want_g:
                d_g = cast(gradients.pop(), magnitude_dtype)
            if gradients:
                d = gradients[0]
                if want_x:
                    dx = torch.mm(d, cast(weight, d.dtype))
                if want_weight:
                    d_weight = rounded_once(d.t(), rows, weight.dtype)
                if want_b:
                    d_b = _scaled_once(d.t(), z, _split_scale(ctx.scale, d.dtype)[1], lora_b.dtype)
                if want_dz:
                    dz = _scaled(d, cast(lora_b, d.dtype), ctx.scale)
                    if want_a:
                        d_a = rounded_once(dz.t(), rows if shared else adapter_rows, lora_a.dtype)
                    if dx is not None and shared:
                        dx.addmm_(dz, cast(lora_a, d.dtype))
                    if want_adapter_x:
                        d_adapter_x = torch.mm(dz, cast(lora_a, d.dtype))
                        d_adapter_x = d_adapter_x.to(adapter_x_dtype).view(x_shape)
            if want_bias:
                d_bias = dy.sum(0, dtype=torch.float32).to(bias_dtype)
            if dx is not None:
                dx = cast(dx, x_dtype)
                dx = dx if len(x_shape) == 2 else dx.view(x_shape)
        return None, None, dx, d_adapter_x, d_weight, d_bias, d_a, d_b, d_g, None
