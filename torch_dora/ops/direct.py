"""The call that most layers make: plain tensors of one GPU, results in half precision, not compiled
and not transformed.

It computes what :mod:`torch_dora.ops.linear` computes with the same kernels, as one autograd
function: the norm, g, the products and compose. This takes the least time on the host, which is
what a training step of a small model waits for. ``takes`` looks only at types, dtypes and shapes;
all other calls, and all wrong ones, go the long way.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.dtypes import cast
from torch_dora.ops.operator import PLAIN, is_observed

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import adapter_pieces, one_pass_norm

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)


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


def scales(
    weight: Any,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    norm: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns lora_a and lora_b in ``dtype``, max(norm, eps), and g = magnitude / max(norm, eps).

    Without a norm it is computed, in the same pass that splits and casts an fp32 adapter.
    """
    if norm is not None:
        floor = norm.clamp(min=eps)
        return cast(lora_a, dtype), cast(lora_b, dtype), floor, magnitude / floor
    pieces = None
    if lora_a.dtype == torch.float32:
        pieces, cast_a, cast_b = adapter_pieces.launch(lora_a, lora_b, dtype)
    else:
        cast_a, cast_b = cast(lora_a, dtype), cast(lora_b, dtype)
    floor, g = one_pass_norm.launch(
        weight, lora_a, lora_b, scale, pieces=pieces, magnitude=magnitude, eps=eps
    )
    return cast_a, cast_b, floor, g
