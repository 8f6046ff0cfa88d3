"""The norm in one pass over the weight: computes tiles of W + s·BA in registers and squares them.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; norm: f32[out]. Tensor
cores compute a tile of BA, and W is added in fp32. Each program writes one sum of squares per
output feature, [in/columns, out] in fp32. ``column_sums`` adds these and takes the square root.
There is no cancellation between terms, so nothing needs clamping, and a NaN stays a NaN.

fp32 adapters are multiplied as three products of float16 pieces, which ``adapter_pieces`` makes:
BA is then within 3·2⁻²² of its sum of absolute products, by each row's and column's largest number.

W may also be 4-bit codes, u8[out·in/2], the first of two in the upper half of a byte. An element is
its code's level times the scale of its run.

Traffic: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s; the partial sums, 2/columns of that each
way. Flops: 2·out·in·r, 64 µs at r = 384 and 800 TFLOP/s: bound by the tensor cores.
"""

import dataclasses
import math

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.quantised import Codes
from torch_dora.ops.triton import adapter_pieces, column_sums, expand_compose
from torch_dora.ops.triton.adapter_pieces import Pieces
from torch_dora.ops.triton.expand_compose import Config
from torch_dora.ops.triton.jit import cdiv, jit, launch_kernel

_HALVES = (torch.float16, torch.bfloat16)


def config(rank: int, is_in_pieces: bool, is_coded: bool) -> Config:
    """Returns the fastest config (H100, 4096 and 14336 features; H200 for codes, 8192, and for
    pieces, 4096 × 12288 at ranks 16, 64 and 384).

    The tiles are those of expand_compose, for the same reasons, but wider for float weights and
    medium ranks. Tiles of two pieces take twice the memory, and so less of the rank at a time.
    """
    if is_in_pieces:
        return Config(rows=64, depth=16, stages=2) if rank <= 16 else Config(depth=32)
    tiles = expand_compose.config(rank)
    columns = 256 if 16 < rank <= 128 and not is_coded else tiles.columns
    return dataclasses.replace(tiles, columns=columns)


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


@jit
def _kernel(
    weight_ptr,  # [out, in], or codes u8[out, in / 2]
    levels_ptr,  # f32[16], for codes
    scales_ptr,  # f32[out·in / RUN], for codes
    lora_a_ptr,  # [r, in], or pieces f16[2, r, in]
    lora_b_ptr,  # [out, r], or pieces f16[2, out, r]
    unit_a_ptr,  # f32[in], for pieces
    unit_b_ptr,  # f32[out], for pieces
    partial_ptr,  # f32[in / COLUMNS, out]
    out_features,
    in_features,
    scale,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,  # how many codes share a scale; 0 for floats
    GROUP: tl.constexpr,  # a row is read in groups of this size, each within a run
    PIECES: tl.constexpr,  # whether the adapter is in pieces
    WIDEN: tl.constexpr,  # for the interpreter, which cannot multiply bf16
):
    column_tiles = tl.cdiv(in_features, COLUMNS)
    block = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_mask, column_mask = row < out_features, column < in_features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    wide_row = row.to(tl.int64)[:, None]
    b_ptrs = lora_b_ptr + wide_row * RANK + inside[None, :]
    a_ptrs = lora_a_ptr + inside.to(tl.int64)[:, None] * in_features + column[None, :]
    # out·in may exceed 2³¹.
    if RUN:
        width, item = in_features // 2, block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        width, item = in_features, column
    offset = wide_row * width + item[None, :]  # [ROWS, COLUMNS], or [ROWS, COLUMNS / 2] for codes
    mask = row_mask[:, None] & (item < width)[None, :]
    # This load comes before the products, so that it runs in parallel with them.
    weight = tl.load(weight_ptr + offset, mask=mask, other=0)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        b_mask, a_mask = row_mask[:, None] & left[None, :], left[:, None] & column_mask[None, :]
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        if WIDEN:
            b, a = b.to(tl.float32), a.to(tl.float32)
        product = tl.dot(b, a, product)
        if PIECES:
            low_b = tl.load(b_ptrs + tl.cast(out_features, tl.int64) * RANK, mask=b_mask, other=0.0)
            low_a = tl.load(a_ptrs + tl.cast(in_features, tl.int64) * RANK, mask=a_mask, other=0.0)
            if WIDEN:
                low_b, low_a = low_b.to(tl.float32), low_a.to(tl.float32)
            product = tl.dot(b, low_a, product)
            product = tl.dot(low_b, a, product)
        b_ptrs += DEPTH
        a_ptrs += DEPTH * in_features
    if PIECES:
        unit_b = tl.load(unit_b_ptr + row, mask=row_mask, other=0.0)
        unit_a = tl.load(unit_a_ptr + column, mask=column_mask, other=0.0)
        product = product * unit_b[:, None] * unit_a[None, :]

    if RUN:
        group = block * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        shared = (wide_row * in_features + group[None, :] * GROUP) // RUN
        mask = row_mask[:, None] & (group * GROUP < in_features)[None, :]
        scales = tl.load(scales_ptr + shared, mask=mask, other=0.0)
        code = weight.to(tl.int32)
        levels = tl.interleave(tl.load(levels_ptr + (code >> 4)), tl.load(levels_ptr + (code & 15)))
        groups = levels.reshape(ROWS, COLUMNS // GROUP, GROUP) * scales[:, :, None]
        weight = groups.reshape(ROWS, COLUMNS)
    adapted = weight.to(tl.float32) + scale * product
    squares = tl.sum(adapted * adapted, axis=1)
    tl.store(partial_ptr + block.to(tl.int64) * out_features + row, squares, mask=row_mask)


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
    chosen = config(lora_a.shape[0], pieces is not None, is_coded)
    blocks = cdiv(in_features, chosen.columns)
    partial = torch.empty(blocks, out_features, device=lora_a.device, dtype=torch.float32)
    if is_coded:
        weight_tensors, run = (weight.packed, weight.levels, weight.scales), weight.run
    else:
        weight_tensors, run = (weight.contiguous(), None, None), 0
    if pieces is None:
        adapter_tensors = lora_a.contiguous(), lora_b.contiguous(), None, None
    else:
        adapter_tensors = pieces
    launch_kernel(
        _kernel,
        (blocks * cdiv(out_features, chosen.rows),),
        *weight_tensors,
        *adapter_tensors,
        partial,
        out_features,
        in_features,
        scale,
        RANK=lora_a.shape[0],
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        DEPTH=chosen.depth,
        RUN=run,
        GROUP=math.gcd(run, in_features, chosen.columns),
        PIECES=pieces is not None,
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    if magnitude is None:
        return column_sums.launch(partial, "root")
    return column_sums.launch(partial, "scale", magnitude, eps)
