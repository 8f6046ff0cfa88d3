"""The call that most layers make: plain tensors of one GPU, results in half precision, not compiled
and not transformed.

It computes what :mod:`torch_dora.ops.linear` computes with the same kernels, as one autograd
function: the norm, g, the products and compose. This takes the least time on the host, which is
what a training step of a small model waits for. :mod:`torch_dora.ops.plan` says which calls go this
way; all others, and all wrong ones, go the long way.

Gradient checkpointing makes each call again in the backward pass. The second call uses the norm of
the first.
"""

from typing import Any

import torch
from torch import Tensor

from torch_dora.ops import direct_correction, direct_projection, plan, scales
from torch_dora.ops.compose import differentiable_once
from torch_dora.ops.dtypes import no_autocast


def linear(
    tensors: tuple[Any, ...],
    scale: Any,
    implementation: str | None,
    corrects: bool = False,
    rank: int | None = None,
) -> Tensor | None:
    """Returns y, or None if the call has to go the long way. The arguments are those of
    :func:`torch_dora.ops.plan.find`."""
    found = plan.find(tensors, scale, implementation, corrects, rank)
    if found is None:
        return None
    if found.gpu >= 0 and found.gpu != torch._C._cuda_getDevice():
        # Triton launches kernels on the current device. It is x's in a backward pass, and there a
        # checkpoint's repeated call must save the same tensors.
        with torch.cuda.device(found.device):
            return linear(tensors, scale, implementation, corrects, rank)
    present = found.present(tensors)
    try:
        for tensor in present:
            tensor.data_ptr()
    except RuntimeError:  # It outlived a transform of torch.func, and has no memory.
        return None
    if torch.is_grad_enabled():
        for tensor in present:
            if tensor.requires_grad:
                return _apply(found, *tensors)
    # It may be the first pass of a checkpoint, which repeats this call and not an older one.
    scales.forget(tensors[5])
    (_, g), a, b = scales.compute(found, (tensors[2], *tensors[4:7]), tensors[7])
    compute = direct_correction if corrects else direct_projection
    return compute.forward(found, tensors[:4], g, a, b, False, False)[0]


class _Direct(torch.autograd.Function):
    """The parameters and scales are kept by the function, and few tensors are saved: checkpointing,
    which has hooks for saved tensors, calls Python thirty times for each of them."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        _, _, _, want_weight, _, want_a, want_b, want_g, _ = ctx.needs_input_grad
        _, adapter_x, weight, _, lora_a, lora_b, magnitude, norm = tensors
        # The magnitude is not read, but gradients depend on it, which differentiable_once checks.
        ctx.parameters = parts = weight, lora_a, lora_b, magnitude
        joins = scales.has_saved_tensors_hooks()
        found, a, b = scales.for_gradient(plan, parts, norm, joins)
        compute = direct_correction if plan.corrects else direct_projection
        y, rows, adapter_rows, *kept = compute.forward(
            plan, tensors[:4], found.tensors[1], a, b, want_b, want_g, joins
        )
        is_shared = adapter_x is None
        ctx.save_for_backward(
            rows if want_weight or (want_a and is_shared) else None,
            adapter_rows if not is_shared and (want_a or (want_weight and plan.corrects)) else None,
            *kept,
        )
        ctx.call = plan, found
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, found = ctx.call
        found.check(*ctx.parameters[:3])
        gradients = (direct_correction if plan.corrects else direct_projection).gradients
        # Autocast to the dtype that all operands have does nothing, and takes long to turn off.
        if torch._C._is_any_autocast_enabled():
            kind = plan.device.type
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != plan.dtype:
                with no_autocast(dy):
                    return gradients(ctx, dy)
        return gradients(ctx, dy)


# Function.apply of torch 2.11 first asks each tensor whether it outlived a transform of torch.func.
_apply: Any = super(torch.autograd.Function, _Direct).apply  # pyright: ignore
