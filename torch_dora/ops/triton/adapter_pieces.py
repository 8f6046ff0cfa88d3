"""Launches of :mod:`dora_common.triton.adapter_pieces`.

fp32 adapters in pieces that tensor cores multiply: two float16 numbers and a power of two.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


def launch(
    lora_a: Tensor, lora_b: Tensor, dtype: torch.dtype, run: Callable[..., Any] | None = None
) -> tuple[Pieces, Tensor, Tensor]:
    """Returns the pieces of an fp32 adapter, and lora_a and lora_b in ``dtype``; ``run`` is the
    launch for their sizes, if there is one already."""
    (rank, in_features), out_features = lora_a.shape, lora_b.shape[0]
    lora_a, lora_b = lora_a.contiguous(), lora_b.contiguous()
    # Named devices and dtypes take the host as long as a launch, in each of many calls.
    pieces = Pieces(
        lora_a.new_empty((2, rank, in_features), dtype=torch.float16),
        lora_b.new_empty((2, out_features, rank), dtype=torch.float16),
        lora_a.new_empty(in_features),
        lora_b.new_empty(out_features),
    )
    cast_a, cast_b = (torch.empty_like(one, dtype=dtype) for one in (lora_a, lora_b))
    run = run or prepared(rank, in_features, out_features)
    run(lora_a, lora_b, pieces.a, pieces.b, cast_a, cast_b, pieces.unit_a, pieces.unit_b)
    if TRITON_MODE == "interpreted":
        # The interpreter truncates to bfloat16 instead of rounding.
        cast_a, cast_b = lora_a.to(dtype), lora_b.to(dtype)
    return pieces, cast_a, cast_b
