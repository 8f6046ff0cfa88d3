"""The dtypes of intermediate results, and casts."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns float64 if any tensor is float64, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor.to(dtype)``, but ``tensor`` itself if it has that dtype: torch.compile of
    torch 2.11 loses the cotangent of an autograd.Function that returns a no-op conversion."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def keep_float32(
    function: Callable[[Tensor], Tensor], kept: Collection[Tensor | None]
) -> Callable[[Tensor], Tensor]:
    """Wraps ``function``, which moves and casts a tensor: tensors in ``kept`` are cast to float32
    instead of a dtype with fewer bits."""

    def convert(tensor: Tensor) -> Tensor:
        new = function(tensor)
        is_kept = any(tensor is other for other in kept)
        if is_kept and new.dtype.itemsize < 4 <= tensor.dtype.itemsize:
            return tensor.to(new.device, torch.float32)
        return new

    return convert


def no_autocast(tensor: Any) -> contextlib.AbstractContextManager[object]:
    """Returns a context that turns autocast off for ``tensor``'s device. The meta device has no
    autocast."""
    device = tensor.device.type
    # If autocast is already off, torch.export does not record turning it off.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
