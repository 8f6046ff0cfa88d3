"""Expand and compose in one kernel: the adapter's second product, z Bᵀ, with compose as its
epilogue.

    lora     = z Bᵀ
    unbiased = base - bias                  (base if there is no bias)
    y        = base + ((g-1)·unbiased + g·(s·lora))       inner = unbiased + s·lora

z: [rows, r], lora_b B: [out, r], base, y, inner: [rows, out], all fp16 or all bf16; g: f32[out];
bias: [out]. lora stays in the fp32 accumulator and is never written to memory.

Traffic: 1 read and 1 write of rows·out (2 writes with inner); z and B are small and stay in L2.
Flops: 2·rows·out·r. At 4096×384×8192 in bf16: 32 µs of traffic at 4.2 TB/s and 32 µs of tensor
cores at 800 TFLOP/s, which overlap between the programs on a multiprocessor.
"""

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.operator import operator
from torch_dora.ops.triton.jit import cdiv, jit, launch_kernel, next_power_of_2


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a tile of ``rows`` × ``columns`` and loops over the rank, ``depth`` at a
    time.

    A tile of 128 × 128 in fp32 takes 128 registers per thread of 4 warps. So two programs fit on a
    multiprocessor, and one's epilogue (memory traffic) overlaps with the other's products. A low
    rank has little arithmetic, and many small programs then keep more loads and stores in flight.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3


def config(rank: int) -> Config:
    """Returns the fastest config (H100; 4096 and 14336 features)."""
    depth = min(64, max(16, next_power_of_2(rank)))
    if rank <= 16:
        return Config(rows=32, depth=depth, stages=2)
    if rank <= 128:
        return Config(rows=64, depth=depth, warps=8, stages=2)
    return Config()


def refuses(dtype: torch.dtype) -> str | None:
    """Returns the reason why the kernel cannot run with activations of ``dtype``, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies on tensor cores, float16 or bfloat16; got {dtype}"
    return None


@jit
def _kernel(
    base_ptr,  # [rows, out]
    z_ptr,  # [rows, r]
    lora_b_ptr,  # [out, r]
    g_ptr,  # [out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [rows, out]
    inner_ptr,  # [rows, out], not written unless WITH_INNER
    rows,
    features,
    scale,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WITH_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,  # for the interpreter, which cannot multiply bf16
):
    row_tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    row = (program % row_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = (program // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_mask, column_mask = row < rows, column < features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    z_ptrs = z_ptr + row.to(tl.int64)[:, None] * RANK + inside[None, :]
    b_ptrs = lora_b_ptr + column.to(tl.int64)[None, :] * RANK + inside[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    # rows·out may exceed 2³¹.
    offset = row.to(tl.int64)[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    # This load comes before the products, so that it runs in parallel with them.
    base = tl.load(base_ptr + offset, mask=mask, other=0.0)
    lora = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        z = tl.load(z_ptrs + first, mask=row_mask[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptrs + first, mask=left[:, None] & column_mask[None, :], other=0.0)
        if WIDEN:
            z, b = z.to(tl.float32), b.to(tl.float32)
        lora = tl.dot(z, b, lora)

    g = tl.load(g_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    base = base.to(tl.float32)
    unbiased = base
    if HAS_BIAS:
        unbiased -= tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    scaled = scale * lora
    y = base + ((g - 1.0) * unbiased + g * scaled)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
    if WITH_INNER:
        inner = unbiased + scaled
        tl.store(inner_ptr + offset, inner.to(inner_ptr.dtype.element_ty), mask=mask)


@operator("torch_dora::expand_compose")
def expand_compose(
    base: Tensor,
    z: Tensor,
    lora_b: Tensor,
    g: Tensor,
    bias: Tensor | None,
    scale: float,
    want_inner: bool,
) -> list[Tensor]:
    """Returns y, and inner if ``want_inner``; contiguous, in base's dtype."""
    base, g = base.contiguous(), g.contiguous()
    results = [torch.empty_like(base) for _ in range(1 + want_inner)]
    features, rank = lora_b.shape
    rows = base.numel() // max(1, features)
    if rows == 0 or features == 0:
        return results
    chosen = config(rank)
    launch_kernel(
        _kernel,
        (cdiv(rows, chosen.rows) * cdiv(features, chosen.columns),),
        base,
        z.contiguous(),
        lora_b.contiguous(),
        g,
        g if bias is None else bias.contiguous(),
        results[0],
        results[-1],
        rows,
        features,
        scale,
        RANK=rank,
        HAS_BIAS=bias is not None,
        WITH_INNER=want_inner,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        DEPTH=chosen.depth,
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return results


@expand_compose.op.register_fake
def _(base, z, lora_b, g, bias, scale, want_inner):
    return [base.new_empty(base.shape) for _ in range(1 + want_inner)]
