"""Launches of :mod:`dora_common.triton.one_pass_norm`.

The norm in one pass over the weight: computes tiles of W + s·BA in registers and squares them.
"""

import functools
import math

import torch
from torch import Tensor

from dora_common.triton import strip_norm
from dora_common.triton.jit import cdiv
from dora_common.triton.one_pass_norm import config, kernel
from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.quantised import Codes
from torch_dora.ops.triton import adapter_pieces, column_sums
from torch_dora.ops.triton.adapter_pieces import Pieces
from torch_dora.ops.triton.jit import DescribingLaunch, Launch, capability

_HALVES = (torch.float16, torch.bfloat16)
# Strips were measured on an H200 at 8192 × 8192 and rank 64: 37 µs, and the other kernel 60.
STRIPS_FROM = 2**24


def refuses(call: Call) -> str | None:
    """Returns the reason why the kernel cannot run ``call``, or None."""
    weight, lora_a, lora_b = call.dtypes
    if weight not in _HALVES:
        return f"is for weights in float16 or bfloat16; got {weight}"
    if lora_a != lora_b:
        return f"lora_a and lora_b must share a dtype; got {lora_a} and {lora_b}"
    if lora_a not in (*_HALVES, torch.float32):
        return f"multiplies on tensor cores, not {lora_a}"
    return None


@functools.lru_cache(1024)
def prepared(
    card: int,
    rank: int,
    out_features: int,
    in_features: int,
    scale: float,
    run: int,
    is_in_pieces: bool,
) -> tuple[int, tuple[None, ...], Launch]:
    """Returns the number of partial sums of an output feature, what follows a weight that has no
    codes among the tensors, and the launch. ``run`` is that of codes, or 0."""
    is_large = in_features * out_features >= STRIPS_FROM
    if card == 90 and is_large and not (run or is_in_pieces):
        if 32 < rank <= 64:
            return _by_strips(rank, out_features, in_features, scale)
        if has_rings(rank, in_features):
            return _by_rings(rank, out_features, in_features, scale)
    chosen = config(rank, is_in_pieces=is_in_pieces, is_coded=run > 0, axis=1, capability=card)
    parts = cdiv(in_features, chosen.columns)
    launch = Launch(
        kernel,
        (parts * cdiv(out_features, chosen.rows),),
        (out_features, in_features, scale),
        AXIS=1,
        RANK=rank,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        DEPTH=chosen.depth,
        RUN=run,
        GROUP=math.gcd(run, in_features, chosen.columns),
        PIECES=is_in_pieces,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return parts, (None, None), launch


def _by_strips(
    rank: int, out: int, in_features: int, scale: float
) -> tuple[int, tuple[None, ...], Launch]:
    chosen = strip_norm.config(rank, is_coded=False, out_last=False)
    programs, parts, steps = chosen.walk(out, in_features, 90)
    launch = Launch(
        strip_norm.kernel,
        (programs,),
        (in_features, out, parts, steps, scale),
        OUT_LAST=False,
        CODES="",
        RUN=1,
        GROUP=1,
        PIECES=False,
        **chosen.slices(rank),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return parts, (None, None), launch


def has_rings(rank: int, *rows: int) -> bool:
    """Returns whether a Hopper's kernel with `rings` takes matrices of this rank, with rows of
    these sizes. Triton's interpreter does not run it."""
    if rank <= 128 or TRITON_MODE != "compiled":
        return False
    from dora_common.triton import rings

    return rings.fits(rank, rank, *rows)


def _by_rings(
    rank: int, out: int, in_features: int, scale: float
) -> tuple[int, tuple[None, ...], Launch]:
    from dora_common.triton import ring_norm

    chosen = ring_norm.config(rank, 1)
    programs, parts, steps = chosen.walk(out, in_features, 90)
    launch = DescribingLaunch(
        ring_norm.kernel,
        (programs,),
        (in_features, out, parts, steps, scale),
        PIECES=1,
        RANK=rank,
        SLICES=cdiv(rank, chosen.depth),
        STAGES=chosen.stages,
        WIDTH=chosen.width,
        OUT_LAST=False,
        num_warps=chosen.warps,
    )
    return parts, (), launch


def launch(
    weight: Tensor | Codes,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    *,
    pieces: Pieces | None = None,
    magnitude: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, f32[out].

    Args:
        pieces: those of an fp32 adapter, if there are any already.
        magnitude: [out]; the result is then f32[2, out], max(norm, eps) and magnitude divided by
            it.
    """
    out_features, in_features = lora_b.shape[0], lora_a.shape[1]
    if out_features == 0 or in_features == 0:
        return torch.zeros(out_features, device=lora_a.device, dtype=torch.float32)
    is_coded = isinstance(weight, Codes)
    if pieces is None and lora_a.dtype == torch.float32:
        pieces, *_ = adapter_pieces.launch(lora_a, lora_b, torch.float16)
    if pieces is None:
        adapter_tensors = lora_a.contiguous(), lora_b.contiguous(), None, None
    else:
        adapter_tensors = pieces
    device, sizes = lora_a.device, (lora_a.shape[0], out_features, in_features)
    run = weight.run if is_coded else 0
    call = capability(device), *sizes, scale, run, pieces is not None
    parts, no_codes, run_kernel = prepared(*call)
    if is_coded:
        first, codes = weight.packed, (weight.levels, weight.scales)
    else:
        first, codes = weight.contiguous(), no_codes
    partial = lora_b.new_empty((parts, out_features), dtype=torch.float32)
    run_kernel(first, *codes, *adapter_tensors, partial)
    if magnitude is None:
        return column_sums.launch(partial, "root")
    return column_sums.launch(partial, "scale", magnitude, eps)
