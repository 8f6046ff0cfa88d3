"""The dtypes that arithmetic happens in, and the casts to them."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns float64 as soon as one tensor is float64, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor.to(dtype)``, with nothing recorded where there is nothing to do.

    torch.compile of torch 2.11 loses the cotangent of an autograd.Function whose forward makes a
    result by a conversion that converts nothing: it sees two results that are one tensor.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def keeping_float32(
    function: Callable[[Tensor], Tensor], kept: Collection[Tensor | None]
) -> Callable[[Tensor], Tensor]:
    """Returns ``function``, which moves and casts a tensor, but with float32 where it would cast
    one of ``kept`` to fewer bits."""

    def called(tensor: Tensor) -> Tensor:
        new = function(tensor)
        is_kept = any(tensor is one for one in kept)
        if is_kept and new.dtype.itemsize < 4 <= tensor.dtype.itemsize:
            return tensor.to(new.device, torch.float32)
        return new

    return called


def no_autocast(tensor: Any) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which autocast leaves operations on ``tensor``'s device alone; the
    meta device has no autocast."""
    device = tensor.device.type
    # Where autocast is off nothing is recorded, by torch.export, of turning it off.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
