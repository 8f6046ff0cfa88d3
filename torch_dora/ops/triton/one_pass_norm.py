"""The norm in one pass over the weight: tiles of W + s·BA, squared in registers.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; norm: f32[out]. A tile
of BA is a product on tensor cores; W is added to it in fp32, and a program leaves one sum of
squares per output feature, [in/columns, out] in fp32, which ``column_sums`` adds up and takes the
root of. Nothing cancels, so nothing has to be clamped, and a NaN stays one.

fp32 adapters are refused: six products of bf16 pieces would make BA, and the factored form, where
only A meets the half-precision W, needs three for the same accuracy.

W may also be codes of four bits, u8[out·in/2], the first of two in the upper half, whose level
times the scale of their run is an element. There is no factored form of these, so that fp32
adapters are taken: tensor cores multiply them as three products of TF32.

Bytes: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s, and the partials, 2/columns of it each way.
Flops: 2·out·in·r, 64 µs at r = 384 and 800 TFLOP/s: bound by the tensor cores.
"""

import dataclasses
import math

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.quantised import Codes
from torch_dora.ops.triton import column_sums, expand_compose
from torch_dora.ops.triton.expand_compose import Config
from torch_dora.ops.triton.jit import cdiv, jit

_HALVES = (torch.float16, torch.bfloat16)


def config(rank: int, adapters: torch.dtype, of_codes: bool) -> Config:
    """Returns the config that was fastest (H100; 4096 and 14336 features, codes H200, 8192): tiles
    as in expand and compose, for the same reason, and for middling ranks wider tiles of floats."""
    found = expand_compose.config(rank)
    columns = 256 if 16 < rank <= 128 and not of_codes else found.columns
    # Slices of fp32 take twice the memory.
    depth = found.depth if adapters in _HALVES else max(16, found.depth // 2)
    return dataclasses.replace(found, columns=columns, depth=depth)


def refuses(call: Call) -> str | None:
    """Returns why the kernel cannot take ``call``; None when it can."""
    weight, lora_a, lora_b = call.dtypes
    for name, dtype in (("weight", weight), ("lora_a", lora_a)):
        if dtype not in _HALVES:
            return f"multiplies on tensor cores, float16 or bfloat16; got {name} in {dtype}"
    if lora_a != lora_b:
        return f"lora_a and lora_b must share a dtype; got {lora_a} and {lora_b}"
    return None


@jit
def _kernel(
    weight_ptr,  # [out, in], or codes u8[out, in / 2]
    levels_ptr,  # f32[16] of codes
    scales_ptr,  # f32[out·in / RUN] of codes
    lora_a_ptr,  # [r, in]
    lora_b_ptr,  # [out, r]
    partial_ptr,  # f32[in / COLUMNS, out]
    out_features,
    in_features,
    scale,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN: tl.constexpr,  # how many codes share a scale; 0 of floats
    GROUP: tl.constexpr,  # how many neighbours do, counted from a row's first
    WIDEN: tl.constexpr,  # the same products; the interpreter has none of bf16
):
    across = tl.cdiv(in_features, COLUMNS)
    block = tl.program_id(0) % across
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = block * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_here, here = row < out_features, column < in_features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    wide_row = row.to(tl.int64)[:, None]
    b_ptrs = lora_b_ptr + wide_row * RANK + inside[None, :]
    a_ptrs = lora_a_ptr + inside.to(tl.int64)[:, None] * in_features + column[None, :]
    # out·in may exceed 2³¹.
    if RUN:
        width, item = in_features // 2, block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        width, item = in_features, column
    offset = wide_row * width + item[None, :]  # [ROWS, COLUMNS], or of bytes half as many columns
    mask = row_here[:, None] & (item < width)[None, :]
    # Before the products, so that it is under way while they are taken.
    weight = tl.load(weight_ptr + offset, mask=mask, other=0)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        b = tl.load(b_ptrs, mask=row_here[:, None] & left[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=left[:, None] & here[None, :], other=0.0)
        if WIDEN:
            b, a = b.to(tl.float32), a.to(tl.float32)
        product = tl.dot(b, a, product, input_precision="tf32x3")
        b_ptrs += DEPTH
        a_ptrs += DEPTH * in_features

    if RUN:
        group = block * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        shared = (wide_row * in_features + group[None, :] * GROUP) // RUN
        mask = row_here[:, None] & (group * GROUP < in_features)[None, :]
        scales = tl.load(scales_ptr + shared, mask=mask, other=0.0)
        code = weight.to(tl.int32)
        levels = tl.interleave(tl.load(levels_ptr + (code >> 4)), tl.load(levels_ptr + (code & 15)))
        groups = levels.reshape(ROWS, COLUMNS // GROUP, GROUP) * scales[:, :, None]
        weight = groups.reshape(ROWS, COLUMNS)
    adapted = weight.to(tl.float32) + scale * product
    squares = tl.sum(adapted * adapted, axis=1)
    tl.store(partial_ptr + block.to(tl.int64) * out_features + row, squares, mask=row_here)


def launch(weight: Tensor | Codes, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, f32[out]."""
    out_features, in_features = lora_b.shape[0], lora_a.shape[1]
    if out_features == 0 or in_features == 0:
        return torch.zeros(out_features, device=lora_a.device, dtype=torch.float32)
    of_codes = isinstance(weight, Codes)
    knobs = config(lora_a.shape[0], lora_a.dtype, of_codes)
    blocks = cdiv(in_features, knobs.columns)
    partial = torch.empty(blocks, out_features, device=lora_a.device, dtype=torch.float32)
    if of_codes:
        read, run = (weight.packed, weight.levels, weight.scales), weight.run
    else:
        read, run = (weight.contiguous(), None, None), 0
    _kernel[(blocks * cdiv(out_features, knobs.rows),)](
        *read,
        lora_a.contiguous(),
        lora_b.contiguous(),
        partial,
        out_features,
        in_features,
        scale,
        RANK=lora_a.shape[0],
        ROWS=knobs.rows,
        COLUMNS=knobs.columns,
        DEPTH=knobs.depth,
        RUN=run,
        GROUP=math.gcd(run, in_features, knobs.columns),
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=knobs.warps,
        num_stages=knobs.stages,
        enable_fp_fusion=True,
    )
    return column_sums.launch(partial, root=True)
