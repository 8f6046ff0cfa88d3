"""Checks of arguments: every error names the argument, its value and the fix."""

import math
import numbers

import torch
from torch import Tensor

from torch_dora.ops import quantised

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_float(name: str, tensor: object) -> None:
    """Raises TypeError unless ``tensor`` is a tensor of fp16, bf16, fp32 or fp64."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; "
            "wrap the value in torch.as_tensor"
        )
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; expected float16, bfloat16, float32 or float64: "
            "cast it, or dequantise it first"
        )


def is_float_dtype(name: str, dtype: object) -> None:
    """Raises TypeError unless ``dtype`` is fp16, bf16, fp32 or fp64."""
    if dtype not in FLOATS:
        raise TypeError(
            f"{name} is {dtype!r}; expected torch.float16, bfloat16, float32 or float64"
        )


def has_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raises ValueError unless ``tensor`` has ``shape``, in which None matches any size."""
    is_right = tensor.ndim == len(shape) and all(
        expected is None or got == expected
        for got, expected in zip(tensor.shape, shape, strict=True)
    )
    if not is_right:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected ({sizes}) = {meaning}. The torch "
            "layout is weight [out, in], lora_a [r, in], lora_b [out, r], magnitude [out]; "
            "transpose arrays from Flax"
        )


def is_scale(scale: object) -> None:
    """Raises TypeError unless ``scale`` is a real number, and ValueError unless it is finite."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a Python number, got {type(scale).__name__}; it is alpha/r, or "
            "alpha/sqrt(r) with rsLoRA: pass .item() of a tensor"
        )
    # torch.compile can guard on comparisons. They are False for NaN.
    if not -math.inf < float(scale) < math.inf:
        raise ValueError(f"scale is {scale}; expected a finite number, alpha/r or alpha/sqrt(r)")


def adapter(weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> None:
    """Checks weight [out, in] against lora_a [r, in] and lora_b [out, r], r at least 1."""
    if quantised.is_quantised(weight):
        quantised.check("weight", weight)
    else:
        is_float("weight", weight)
    is_float("lora_a", lora_a)
    is_float("lora_b", lora_b)
    has_shape("weight", weight, (None, None), "[out, in]")
    has_shape("lora_a", lora_a, (None, weight.shape[1]), "[r, in]")
    rank = lora_a.shape[0]
    if rank == 0:
        raise ValueError("lora_a has shape [0, in]: rank is 0; expected a rank of at least 1")
    has_shape("lora_b", lora_b, (weight.shape[0], rank), "[out, r]")
