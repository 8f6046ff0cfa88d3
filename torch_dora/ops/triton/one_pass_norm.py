"""The norm in one pass over the weight: computes tiles of W + s·BA in registers and squares them.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; norm: f32[out]. Tensor
cores compute a tile of BA, and W is added in fp32. Each program writes one sum of squares per
output feature, [in/columns, out] in fp32. ``column_sums`` adds these and takes the square root.
There is no cancellation between terms, so nothing needs clamping, and a NaN stays a NaN.

fp32 adapters are refused: BA would take six products of bf16 pieces. The factored form, where only
A is multiplied with the half-precision W, takes three for the same accuracy.

W may also be 4-bit codes, u8[out·in/2], the first of two in the upper half of a byte. An element is
its code's level times the scale of its run. There is no factored form for codes, so here fp32
adapters are accepted: tensor cores multiply them as three TF32 products.

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
from torch_dora.ops.triton import column_sums, expand_compose
from torch_dora.ops.triton.expand_compose import Config
from torch_dora.ops.triton.jit import cdiv, jit

_HALVES = (torch.float16, torch.bfloat16)


def config(rank: int, adapters: torch.dtype, is_coded: bool) -> Config:
    """Returns the fastest config (H100; 4096 and 14336 features; for codes H200, 8192).

    The tiles are those of expand_compose, for the same reasons, but wider for float weights and
    medium ranks.
    """
    tiles = expand_compose.config(rank)
    columns = 256 if 16 < rank <= 128 and not is_coded else tiles.columns
    # fp32 tiles of the adapter take twice the memory.
    depth = tiles.depth if adapters in _HALVES else max(16, tiles.depth // 2)
    return dataclasses.replace(tiles, columns=columns, depth=depth)


def refuses(call: Call) -> str | None:
    """Returns the reason why the kernel cannot run ``call``, or None."""
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
    levels_ptr,  # f32[16], for codes
    scales_ptr,  # f32[out·in / RUN], for codes
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
    RUN: tl.constexpr,  # how many codes share a scale; 0 for floats
    GROUP: tl.constexpr,  # a row is read in groups of this size, each within a run
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
        b = tl.load(b_ptrs, mask=row_mask[:, None] & left[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=left[:, None] & column_mask[None, :], other=0.0)
        if WIDEN:
            b, a = b.to(tl.float32), a.to(tl.float32)
        product = tl.dot(b, a, product, input_precision="tf32x3")
        b_ptrs += DEPTH
        a_ptrs += DEPTH * in_features

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


def launch(weight: Tensor | Codes, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, f32[out]."""
    out_features, in_features = lora_b.shape[0], lora_a.shape[1]
    if out_features == 0 or in_features == 0:
        return torch.zeros(out_features, device=lora_a.device, dtype=torch.float32)
    is_coded = isinstance(weight, Codes)
    chosen = config(lora_a.shape[0], lora_a.dtype, is_coded)
    blocks = cdiv(in_features, chosen.columns)
    partial = torch.empty(blocks, out_features, device=lora_a.device, dtype=torch.float32)
    if is_coded:
        weight_tensors, run = (weight.packed, weight.levels, weight.scales), weight.run
    else:
        weight_tensors, run = (weight.contiguous(), None, None), 0
    _kernel[(blocks * cdiv(out_features, chosen.rows),)](
        *weight_tensors,
        lora_a.contiguous(),
        lora_b.contiguous(),
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
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return column_sums.launch(partial, root=True)
