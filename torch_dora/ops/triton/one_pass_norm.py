"""The norm in one pass over the weight: tiles of W + s·BA, squared in registers.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; norm: f32[out]. A tile
of BA is a product on tensor cores; W is added to it in fp32, and a program leaves one sum of
squares per output feature, [in/columns, out] in fp32, which ``column_sums`` adds up and takes the
root of. Nothing cancels, so nothing has to be clamped, and a NaN stays one.

fp32 adapters are refused: six products of bf16 pieces would make BA, and the factored form, where
only A meets the half-precision W, needs three for the same accuracy.

Bytes: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s, and the partials, 2/columns of it each way.
Flops: 2·out·in·r, 64 µs at r = 384 and 800 TFLOP/s: bound by the tensor cores.
"""

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE, Call
from torch_dora.ops.triton import column_sums, expand_compose
from torch_dora.ops.triton.expand_compose import Config
from torch_dora.ops.triton.jit import cdiv, jit


def config(rank: int) -> Config:
    """Returns what was fastest (H100; 4096 and 14336 features): tiles as in expand and compose, for
    the same reason, and of a middling rank wider ones."""
    found = expand_compose.config(rank)
    return dataclasses.replace(found, columns=256) if 16 < rank <= 128 else found


_HALVES = (torch.float16, torch.bfloat16)


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
    weight_ptr,  # [out, in]
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
    offset = wide_row * in_features + column[None, :]  # [ROWS, COLUMNS]
    mask = row_here[:, None] & here[None, :]
    # Before the products, so that it is under way while they are taken.
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        b = tl.load(b_ptrs, mask=row_here[:, None] & left[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=left[:, None] & here[None, :], other=0.0)
        if WIDEN:
            b, a = b.to(tl.float32), a.to(tl.float32)
        product = tl.dot(b, a, product)
        b_ptrs += DEPTH
        a_ptrs += DEPTH * in_features

    adapted = weight.to(tl.float32) + scale * product
    squares = tl.sum(adapted * adapted, axis=1)
    tl.store(partial_ptr + block.to(tl.int64) * out_features + row, squares, mask=row_here)


def launch(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns ‖weight + scale·lora_b lora_a‖ per row, f32[out]."""
    out_features, in_features = weight.shape
    if out_features == 0 or in_features == 0:
        return torch.zeros(out_features, device=weight.device, dtype=torch.float32)
    knobs = config(lora_a.shape[0])
    blocks = cdiv(in_features, knobs.columns)
    partial = torch.empty(blocks, out_features, device=weight.device, dtype=torch.float32)
    _kernel[(blocks * cdiv(out_features, knobs.rows),)](
        weight.contiguous(),
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
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=knobs.warps,
        num_stages=knobs.stages,
        enable_fp_fusion=True,
    )
    return column_sums.launch(partial, root=True)
