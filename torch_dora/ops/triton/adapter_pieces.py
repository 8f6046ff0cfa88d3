"""Launches of :mod:`dora_common.triton.adapter_pieces`.

fp32 adapters in pieces that tensor cores multiply: two float16 numbers and a power of two.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dora_common.triton.adapter_pieces import WARPS, kernel, programs_of
from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.triton.jit import Launch


class Pieces(NamedTuple):
    """The adapter's pieces.

    Attributes:
        a: f16[2, r, in], high and low.
        b: f16[2, out, r].
        unit_a: f32[in].
        unit_b: f32[out].
    """

    a: Tensor
    b: Tensor
    unit_a: Tensor
    unit_b: Tensor


@functools.lru_cache(1024)
def prepared(rank: int, in_features: int, out_features: int) -> Launch:
    """Returns the launch for tensors of these sizes."""
    programs, constants = programs_of(rank, in_features, out_features)
    return Launch(kernel, (programs,), (in_features, out_features), **constants, num_warps=WARPS)


def kinds(
    rank: int, in_features: int, out_features: int
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the dtypes and shapes of :class:`Pieces`."""
    halves = (2, rank, in_features), (2, out_features, rank)
    units = (in_features,), (out_features,)
    return [(torch.float16, half) for half in halves] + [(torch.float32, unit) for unit in units]


def launch(lora_a: Tensor, lora_b: Tensor, dtype: torch.dtype) -> tuple[Pieces, Tensor, Tensor]:
    """Returns the pieces of an fp32 adapter, and lora_a and lora_b in ``dtype``."""
    (rank, in_features), out_features = lora_a.shape, lora_b.shape[0]
    lora_a, lora_b = lora_a.contiguous(), lora_b.contiguous()
    found = kinds(rank, in_features, out_features)
    pieces = Pieces(*(lora_a.new_empty(shape, dtype=dtype) for dtype, shape in found))
    cast_a, cast_b = (torch.empty_like(one, dtype=dtype) for one in (lora_a, lora_b))
    run = prepared(rank, in_features, out_features)
    run(lora_a, lora_b, pieces.a, pieces.b, cast_a, cast_b, pieces.unit_a, pieces.unit_b)
    if TRITON_MODE == "interpreted":
        # The interpreter truncates to bfloat16 instead of rounding.
        cast_a, cast_b = lora_a.to(dtype), lora_b.to(dtype)
    return pieces, cast_a, cast_b
