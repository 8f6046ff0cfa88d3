"""What is the same for all direct calls with operands of the same dtypes and shapes: whether a call
can go that way, its sizes, and its launches.

Plans are found by all facts about the operands that they depend on, so a call checks nothing else.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dora.ops import choose, scales
from torch_dora.ops.norm import EPS_HALF
from torch_dora.ops.operator import PLAIN

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import (
        column_sums,
        compose_backward,
        compose_forward,
        expand_compose,
        one_pass_norm,
    )
    from torch_dora.ops.triton.jit import SameLaunch, aligned, capability

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)
_PLAIN_OR_NONE = PLAIN | {type(None)}
_PLANS: dict[tuple[Any, ...], "Plan | None"] = {}
_MOST_PLANS = 4096


def find(
    tensors: tuple[Any, ...],
    scale: Any,
    implementation: str | None,
    corrects: bool = False,
    rank: int | None = None,
) -> "Plan | None":
    """Returns the plan of a call, or None if it has to go the long way.

    Args:
        tensors: x [..., in], adapter_x or None, weight [out, in], bias or None, lora_a, lora_b,
            magnitude and norm or None.
        scale: alpha/r or alpha/sqrt(r).
        implementation: the named one, or None.
        corrects: whether adapter_x is the input of the magnitude's correction, too.
        rank: that of the layer, by which its scale was computed; lora_a may have another one.
    """
    if not _PLAIN_OR_NONE.issuperset(map(type, tensors)):
        return None
    x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
    device = x.get_device()
    if type(scale) is not float or scales.must_record(lora_b):
        return None
    autocast = None
    if torch._C._is_any_autocast_enabled():
        kind = "cuda" if x.is_cuda else "cpu"
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # One flat tuple is made in the least time.
    key = (
        corrects,
        rank,
        device,
        x.is_cpu,
        autocast,
        implementation,
        scale,
        x.dtype,
        x.shape,
        weight.dtype,
        weight.shape,
        weight.get_device(),
        lora_a.dtype,
        lora_a.shape,
        lora_a.get_device(),
        lora_b.dtype,
        lora_b.shape,
        lora_b.get_device(),
        magnitude.dtype,
        magnitude.shape,
        magnitude.get_device(),
        None if adapter_x is None else _facts(adapter_x),
        None if bias is None else _facts(bias),
        None if norm is None else _facts(norm),
    )
    try:
        return _PLANS[key]
    except KeyError:
        pass
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    plan = None
    if x.is_floating_point() and weight.dtype in _HALVES:
        dtype = autocast or torch.promote_types(x.dtype, weight.dtype)
        is_taken = _takes(tensors, scale, dtype, implementation)
        if is_taken and rank in (None, lora_a.shape[0]):
            plan = Plan(tensors, scale, dtype, corrects)
    _PLANS[key] = plan
    return plan


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.get_device()


def _takes(
    tensors: tuple[Any, ...], scale: float, dtype: torch.dtype, implementation: str | None
) -> bool:
    x, adapter_x, weight, bias, lora_a, lora_b, magnitude, norm = tensors
    if dtype not in _HALVES or not 0 < abs(scale) < math.inf:
        return False
    if choose.TRITON_MODE == "compiled":
        runs = x.is_cuda and implementation in (None, "triton")
    else:
        runs = choose.TRITON_MODE == "interpreted" and x.is_cpu and implementation == "triton"
    device = x.get_device()
    if not runs or any(t is not None and t.get_device() != device for t in tensors):
        return False
    adapter_dtype = lora_a.dtype
    if lora_b.dtype != adapter_dtype or adapter_dtype not in _FLOATS:
        return False
    if (
        magnitude.dtype not in _FLOATS
        or weight.ndim != 2
        or lora_a.ndim != 2
        or x.ndim < 2
        or not x.numel()
        or not weight.numel()
    ):
        return False
    (out_features, in_features), rank = weight.shape, lora_a.shape[0]
    return (
        rank > 0
        and x.shape[-1] == in_features == lora_a.shape[1]
        and lora_b.shape == (out_features, rank)
        and magnitude.shape == (out_features,)
        and (adapter_x is None or (adapter_x.shape == x.shape and adapter_x.is_floating_point()))
        and (bias is None or (bias.shape == (out_features,) and bias.is_floating_point()))
        and (norm is None or (norm.shape == (out_features,) and norm.dtype == torch.float32))
    )


class Plan:
    """The sizes and launches of a direct call.

    Attributes:
        present: chooses the tensors of a call that are not None.
        dtype: of the products with activations, and of the result.
        gpu: the number of x's GPU, or -1.
        z_scale, later_scale: the factors of z and of what is computed from it: s·z may exceed
            float16's largest number where s·z lora_bᵀ does not.
        unread: the first argument of an addmm that ignores it.
        casts: whether lora_a and lora_b have another dtype than the products.
        kept_size, z_start: the elements of the tensor that holds inner and then z for the backward
            pass, and where z begins.
        norm: computes max(norm, eps) and g.
        into_adapter: multiplies matrices into lora_a's dtype.
        corrects: whether dropout applies to the magnitude's correction.
        expand_delta, add_delta: add ΔY to y, from z or from lora; by whether inner is kept, where
            ``corrects``.
        compose_backward: by whether d or d_base, d_lora and the magnitude's gradient are wanted.
    """

    def __init__(
        self, tensors: tuple[Any, ...], scale: float, dtype: torch.dtype, corrects: bool
    ) -> None:
        x, adapter_x, weight, bias, lora_a, _, magnitude, _ = tensors
        (out_features, in_features), rank = weight.shape, lora_a.shape[0]
        rows = x.numel() // in_features
        self.present = operator.itemgetter(
            *[at for at, one in enumerate(tensors) if one is not None]
        )
        self.dtype, self.device, self.scale, self.corrects = dtype, x.device, scale, corrects
        self.gpu = x.get_device()
        # torch reads numbers faster than a tuple of them, and a tuple faster than a torch.Size.
        self.x_shape, self.y_shape = tuple(x.shape), (*x.shape[:-1], out_features)
        self.x_rows, self.y_rows = (rows, in_features), (rows, out_features)
        self.is_matrix = x.ndim == 2
        self.x_dtype, self.magnitude_dtype = x.dtype, magnitude.dtype
        self.adapter_x_dtype = None if adapter_x is None else adapter_x.dtype
        self.bias_dtype = None if bias is None else bias.dtype
        self.rows, self.rank, self.out_features = rows, rank, out_features
        is_half = dtype == torch.float16
        self.z_scale, self.later_scale = (1.0, scale) if is_half else (scale, 1.0)
        self.unread = torch.empty((), dtype=dtype, device=x.device)
        self.casts, self.casts_weight = lora_a.dtype != dtype, weight.dtype != dtype
        self.z_start = aligned(rows * out_features)
        self.kept_size = self.z_start + rows * rank
        card = capability(x.device)
        sizes = rank, out_features, in_features
        self.norm = one_pass_norm.Passes(x.device, lora_a.dtype, sizes, scale, EPS_HALF, dtype)
        kinds = card, rank, rows, out_features, self.later_scale, bias is not None
        self.expand, self.expand_with_inner = (
            SameLaunch(expand_compose.prepared(*kinds, with_inner)) for with_inner in (False, True)
        )
        self.into_adapter = _product_into(lora_a.dtype, dtype, x.device)
        self.compose_backward = _ComposeBackward(self)

    @functools.cached_property
    def expand_delta(self) -> "tuple[SameLaunch, SameLaunch] | None":
        """Returns the launches without inner and with it, or None if another kernel than the one
        that adds ΔY to y is faster for these sizes."""
        sizes = capability(self.device), self.rank, self.rows, self.out_features, self.scale, False
        if expand_compose.prepared(*sizes, False).kernel is not expand_compose.kernel:
            return None
        prepared = (expand_compose.prepared(*sizes, inner, True) for inner in (False, True))
        without, with_inner = map(SameLaunch, prepared)
        return without, with_inner

    @functools.cached_property
    def add_delta(self) -> "tuple[SameLaunch, SameLaunch]":
        """Returns the launches without inner and with it."""
        sizes = self.rows, self.out_features, self.scale, False, True
        prepared = (compose_forward.prepared(*sizes, inner, adds=True) for inner in (False, True))
        without, with_inner = map(SameLaunch, prepared)
        return without, with_inner


class _ComposeBackward(dict[tuple[bool, bool, bool], tuple[int, "SameLaunch", "SameLaunch"]]):
    """The strips, the launch, and the one that adds the partial sums up."""

    def __init__(self, plan: Plan) -> None:
        # d has no s: the small products include it.
        scale = plan.scale if plan.corrects else 1.0
        self.sizes = plan.rows, plan.out_features, scale, plan.corrects

    def __missing__(self, wanted: tuple[bool, bool, bool]) -> "tuple[int, SameLaunch, SameLaunch]":
        strips, launch = compose_backward.prepared(*self.sizes, *wanted)
        total = column_sums.prepared(strips, self.sizes[1], "divide", 0.0)
        self[wanted] = found = strips, SameLaunch(launch), SameLaunch(total)
        return found


def _product_into(
    adapter: torch.dtype, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function that multiplies two matrices of ``dtype`` into the adapter's dtype; an
    fp32 result is not rounded in between on a GPU."""
    if adapter == dtype:
        return torch.mm
    if device.type == "cuda" and adapter == torch.float32:
        return functools.partial(torch.mm, out_dtype=adapter)
    return lambda a, b: torch.mm(a, b).to(adapter)
