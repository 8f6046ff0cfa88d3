"""The call that most layers make: plain tensors of one GPU, results in half precision, not compiled
and not transformed.

It computes what :mod:`torch_dora.ops.linear` computes with the same kernels, as one autograd
function: the norm, g, the products and compose. This takes the least time on the host, which is
what a training step of a small model waits for. :mod:`torch_dora.ops.plan` says which calls go this
way; all others, and all wrong ones, go the long way.

Gradient checkpointing makes each call again in the backward pass. The second call uses the norm of
the first.
"""

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dora.ops import choose, plan
from torch_dora.ops.compose import differentiable_once
from torch_dora.ops.dtypes import cast, no_autocast
from torch_dora.ops.norm import EPS_HALF
from torch_dora.ops.operator import is_observed
from torch_dora.ops.plan import Plan
from torch_dora.ops.products import rounded_once, rows_of

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import adapter_pieces, compose_backward
    from torch_dora.ops.triton.jit import is_profiled

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def linear(tensors: tuple[Any, ...], scale: Any, implementation: str | None) -> Tensor | None:
    """Returns y, or None if the call has to go the long way. The arguments are those of
    :func:`torch_dora.ops.plan.find`."""
    found = plan.find(tensors, scale, implementation)
    if found is None:
        return None
    try:
        for tensor in tensors:
            if tensor is not None:
                tensor.data_ptr()
    except RuntimeError:  # It outlived a transform of torch.func, and has no memory.
        return None
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return _apply(found, *tensors)
    return _forward(found, tensors, False, False, None)[0]


def _forward(
    plan: Plan,
    tensors: tuple[Any, ...],
    keep_z: bool,
    keep_inner: bool,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[Any, ...]:
    """Returns y [..., out], and what the gradient may need: x and adapter_x [rows, in], the tensor
    that holds inner and then z = adapter_x lora_aᵀ, scaled unless in fp16, each if it is to be
    kept, ``scales``, and lora_a and lora_b, all but the scales in the plan's dtype.

    ``scales`` are computed if they are None: max(norm, eps), f32[out] or the first row of
    f32[2, out], and g, f32[out].
    """
    x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
    dtype = plan.dtype
    if scales is None and norm is None:
        a, b, both = _scales(plan, weight, lora_a, lora_b, magnitude)
        scales = both, both[1]
    else:
        a, b = (lora_a.to(dtype), lora_b.to(dtype)) if plan.casts else (lora_a, lora_b)
        if scales is None:
            floor = norm.clamp(min=EPS_HALF)
            scales = floor, magnitude / floor
    x = x if plan.x_dtype is dtype else x.to(dtype)
    rows = x if plan.is_matrix else x.flatten(0, -2)
    adapter_rows = rows if adapter_x is None else cast(rows_of(adapter_x), dtype)
    w = weight.to(dtype) if plan.casts_weight else weight
    # autograd forbids to change a view from a Function in place, as y += residual does. A product
    # without a bias is none, of any shape.
    if bias is None and x.is_contiguous():
        base = F.linear(x, w)
    else:
        bias = None if bias is None else cast(bias, dtype).contiguous()
        base = F.linear(rows, w, bias)
        base = base if plan.is_matrix else _UNSAFE_VIEW(base, plan.y_shape)
    kept = z = None
    if keep_inner:
        kept = base.new_empty(plan.kept_size)
        z = _kept(kept, (plan.rows, plan.rank), plan.z_start)
    if plan.z_scale == 1:
        z = torch.mm(adapter_rows, a.t(), out=z)
    else:
        z = torch.addmm(plan.unread, adapter_rows, a.t(), beta=0, alpha=plan.z_scale, out=z)
    # y takes base's memory.
    g = scales[1]
    expand = plan.expand_with_inner if keep_inner else plan.expand
    expand(base, z, b.contiguous(), g, g if bias is None else bias, base, kept if keep_inner else g)
    kept = z if keep_z and not keep_inner else kept
    return base, rows, adapter_rows, kept, scales, a, b


def _scales(
    plan: Plan, weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lora_a and lora_b in the plan's dtype, and max(norm, eps) and g, f32[2, out]."""
    a, b = lora_a, lora_b
    if plan.casts and not plan.is_in_pieces:
        a, b = lora_a.to(plan.dtype), lora_b.to(plan.dtype)
    contiguous = [one.contiguous() for one in (weight, lora_a, lora_b, magnitude)]
    weight, lora_a, lora_b, magnitude = contiguous
    both = plan.fp32.new_empty((2, plan.out_features))
    weight_at, *adapter_at, magnitude_at = found = [one.data_ptr() for one in contiguous]
    # The pass that splits an fp32 adapter for the norm casts it, too.
    is_known = plan.scales_of.run and (plan.pieces.run or not plan.is_in_pieces)
    if is_known and plan.norm.takes(found) and not is_profiled():
        # What only kernels see is one piece of memory: making tensors of it takes longer.
        memory = plan.fp32.new_empty(plan.memory_size)
        partial, *pieces = [memory.data_ptr() + start for start in plan.starts]
        if plan.is_in_pieces:
            a, b = (torch.empty_like(one, dtype=plan.dtype) for one in (lora_a, lora_b))
            plan.pieces.at((*adapter_at, *pieces[:2], a.data_ptr(), b.data_ptr(), *pieces[2:]))
        else:
            pieces = *adapter_at, 0, 0
        plan.norm.at((weight_at, *plan.no_codes_at, *pieces, partial))
        plan.scales_of.at((partial, magnitude_at, both.data_ptr()))
    else:
        pieces = lora_a, lora_b, None, None
        if plan.is_in_pieces:
            pieces, a, b = adapter_pieces.launch(lora_a, lora_b, plan.dtype, plan.pieces)
        partial = plan.fp32.new_empty(plan.partial)
        plan.norm(weight, *plan.no_codes, *pieces, partial)
        plan.scales_of(partial, magnitude, both)
    return a, b, both


def _kept(kept: Tensor, shape: tuple[int, int], start: int) -> Tensor:
    """Returns the matrix that begins at an element of the tensor of inner and z."""
    return kept.as_strided(shape, (shape[1], 1), start)


class _Scales:
    """max(norm, eps) and g of a call, what they were computed from, and lora_a and lora_b cast by a
    repeated call, whose gradient follows at once."""

    __slots__ = "__weakref__", "casts", "source", "tensors"

    def __init__(self, tensors: tuple[Tensor, Tensor], source: list[Any]) -> None:
        self.tensors, self.source = tensors, source
        self.casts: tuple[Tensor, Tensor] | None = None


class _Last:
    """The scales of the last call with each lora_b, by its id, while the call's node in the graph
    keeps both alive. As weakref.WeakValueDictionary, with less Python in a call."""

    def __init__(self) -> None:
        self.references: dict[int, ref[_Scales]] = {}
        self.most = 1024

    def get(self, lora_b: Tensor, source: list[Any]) -> _Scales | None:
        """Returns the scales if they were computed from the same source."""
        reference = self.references.get(id(lora_b))
        scales = None if reference is None else reference()
        return None if scales is None or scales.source != source else scales

    def set(self, lora_b: Tensor, scales: _Scales) -> None:
        self.references[id(lora_b)] = ref(scales)
        if len(self.references) > self.most:
            alive = [item for item in list(self.references.items()) if item[1]() is not None]
            self.references, self.most = dict(alive), 2 * len(alive) + 1024


_LAST = _Last()


class _DirectLinear(torch.autograd.Function):
    """The parameters and scales are kept by the function, and few tensors are saved: checkpointing
    calls Python thirty times for each saved one."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        _, _, _, want_weight, _, want_a, want_b, want_g, _ = ctx.needs_input_grad
        _, adapter_x, weight, _, lora_a, lora_b, magnitude, norm = tensors
        parts = weight, lora_a, lora_b, magnitude
        source = [part._version for part in parts]
        source += [plan.scale, norm is None, *[part.data_ptr() for part in parts]]
        # A call within a backward pass is a repeated one.
        repeats = torch._C._current_graph_task_id() != -1
        scales = _LAST.get(lora_b, source) if repeats else None
        known = None if scales is None else scales.tensors
        y, rows, adapter_rows, kept, found, a, b = _forward(plan, tensors, want_b, want_g, known)
        if scales is None:
            scales = _Scales(found, source)
        if not repeats:
            _LAST.set(lora_b, scales)
        ctx.save_for_backward(
            rows if want_weight or (want_a and adapter_x is None) else None,
            adapter_rows if want_a and adapter_x is not None else None,
            kept,
        )
        # The magnitude is not read, but gradients depend on it, which differentiable_once checks.
        ctx.parameters = parts
        if repeats and plan.casts:
            scales.casts = a, b
        # `_LAST` finds the scales as long as this node keeps them.
        ctx.call = plan, scales, want_g
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, lora_a, lora_b, _ = ctx.parameters
        plan, scales, _ = ctx.call
        if scales.source[:3] != [weight._version, lora_a._version, lora_b._version]:
            raise RuntimeError(
                "the weight, lora_a or lora_b of a DoRA layer was changed in place between the "
                "forward and the backward pass, so its gradient cannot be computed any more: call "
                "backward before optimizer.step"
            )
        # Autocast to the dtype that all operands have does nothing, and takes long to turn off.
        kind = plan.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != plan.dtype:
            with no_autocast(dy):
                return _gradients(ctx, dy)
        return _gradients(ctx, dy)


# Function.apply of torch 2.11 first asks each tensor whether it outlived a transform of torch.func.
_apply: Any = super(torch.autograd.Function, _DirectLinear).apply  # pyright: ignore


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, adapter_rows, kept = ctx.saved_tensors
    weight, lora_a, lora_b, _ = ctx.parameters
    plan, scales, has_inner = ctx.call
    floor, g = scales.tensors
    _, want_x, want_adapter_x, want_weight, want_bias, want_a, want_b, want_g, _ = (
        ctx.needs_input_grad
    )
    dtype, shared = plan.dtype, plan.adapter_x_dtype is None
    want_dz = want_a or want_adapter_x or (want_x and shared)
    want_d = want_dz or want_x or want_weight or want_b
    dx = d_adapter_x = d_weight = d_bias = d_a = d_b = d_g = None
    dy = rows_of(dy).contiguous()
    d = None
    if is_observed():
        inner = _kept(kept, (plan.rows, plan.out_features), 0) if want_g else None
        found = compose_backward.compose_backward(dy, inner, g, 1.0, False, want_d, False, floor)
        d_g = found.pop() if want_g else None
        d = found[0] if want_d else None
    elif want_d or want_g:
        d = torch.empty_like(dy) if want_d else None
        strips, launch, total = plan.compose_backward[want_d, want_g]
        if want_g:
            partial = g.new_empty(strips * plan.out_features)
            launch(dy, kept, g, dy if d is None else d, dy, partial)
            total(partial, floor, d_g := torch.empty_like(g))
        else:
            launch(dy, dy, g, d, dy, g)
    if d is not None:
        b, a = lora_b, lora_a
        if plan.casts:
            a, b = scales.casts or (lora_a.to(dtype), lora_b.to(dtype))
            scales.casts = None
        if want_x:
            dx = torch.mm(d, weight.to(dtype) if plan.casts_weight else weight)
        if want_weight:
            d_weight = rounded_once(d.t(), rows, weight.dtype)
        if want_b:
            z = _kept(kept, (plan.rows, plan.rank), plan.z_start if has_inner else 0)
            later = plan.later_scale
            if later == 1 or plan.casts:
                d_b = plan.into_adapter(d.t(), z)
                d_b = d_b if later == 1 else d_b.mul_(later)
            else:
                d_b = torch.addmm(plan.unread, d.t(), z, beta=0, alpha=later)
        if want_dz:
            dz = torch.addmm(plan.unread, d, b, beta=0, alpha=plan.scale)
            if want_a:
                d_a = plan.into_adapter(dz.t(), rows if shared else adapter_rows)
            if dx is not None and shared:
                dx.addmm_(dz, a)
            if want_adapter_x:
                d_adapter_x = cast(torch.mm(dz, a), plan.adapter_x_dtype).view(plan.x_shape)
    if want_bias:
        d_bias = dy.sum(0, dtype=torch.float32).to(plan.bias_dtype)
    if d_g is not None:
        d_g = cast(d_g, plan.magnitude_dtype)
    if dx is not None:
        dx = cast(dx, plan.x_dtype)
        dx = dx if plan.is_matrix else dx.view(plan.x_shape)
    return None, dx, d_adapter_x, d_weight, d_bias, d_a, d_b, d_g, None
