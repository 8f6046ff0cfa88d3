"""Products of FP8 activations and FP8 weights, with one scale per row of x and per row of W.

    x Wᵀ ≈ (x̂ Ŵᵀ) ∘ (s_x ⊗ s_w)      x̂ = round(x / s_x)      s_x = max |x| / 448, per row

x̂ and Ŵ are float8_e4m3fn. The gradient with respect to x ignores the rounding: it is the gradient
of x Wᵀ in x's dtype, or a product in FP8 too:

    dy W ≈ (d̂ Ŵ) ∘ s_d      d̂ = round(d / s_d)      d = dy∘s_w

s_w scales the features that this product sums over, so it multiplies dy before rounding. d̂ is
float8_e4m3fn or float8_e5m2. Tensor cores require Ŵ in the other order there: it is transposed for
the product, as bytes.
"""

from typing import Any

import torch
from torch import Tensor

from torch_dora.ops.products import product as exact_product
from torch_dora.ops.quantised import dense, is_quantised

QTYPE = "float8_e4m3fn"
BWD_QTYPES = (QTYPE, "float8_e5m2")
ALIGNMENT = 16  # of both sizes of a weight, for tensor cores
LEAST = torch.finfo(torch.float32).tiny
"""The scale of a row of zeros."""


def check(weight: Any, act_qtype: str | None, bwd_qtype: str | None) -> None:
    """Raises ValueError unless `act_qtype` is None, or "float8_e4m3fn" and ``weight`` torchao's
    Float8Tensor of this format with one scale per row, and `bwd_qtype` None or, with an
    `act_qtype`, one of `BWD_QTYPES`."""
    if act_qtype not in (None, QTYPE):
        raise ValueError(
            f"act_qtype is {act_qtype!r}; expected None, for activations as they are, or {QTYPE!r}"
        )
    if bwd_qtype not in (None, *BWD_QTYPES):
        raise ValueError(
            f"bwd_qtype is {bwd_qtype!r}; expected None, for gradients as they are, or one of "
            f"{', '.join(map(repr, BWD_QTYPES))}"
        )
    if bwd_qtype is not None and act_qtype is None:
        raise ValueError(
            f"bwd_qtype is {bwd_qtype!r} and act_qtype None; expected act_qtype={QTYPE!r} as well, "
            "or a weight whose layer quantises its input, as from torchao's "
            "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())"
        )
    if act_qtype is not None and not has_row_scales(weight):
        raise ValueError(
            f"act_qtype is {act_qtype!r} and weight is a {type(weight).__name__} of shape "
            f"{tuple(weight.shape)}; expected torchao's Float8Tensor in {QTYPE} with one scale per "
            "row: quantise it with Float8WeightOnlyConfig, or leave act_qtype out"
        )


def has_row_scales(weight: Any) -> bool:
    """Returns whether ``weight`` [out, in] is torchao's Float8Tensor in float8_e4m3fn with one
    scale per row."""
    if not is_quantised(weight) or type(weight).__name__ != "Float8Tensor":
        return False
    one_per_row = tuple(weight.block_size) == (1, weight.shape[-1])
    return one_per_row and weight.qdata.dtype == torch.float8_e4m3fn


def coded(x: Tensor, qtype: str) -> tuple[Tensor, Tensor]:
    """Returns the codes of x [rows, features] in `qtype`, and their scales f32[rows, 1]. A row with
    NaN becomes NaN."""
    dtype = getattr(torch, qtype)
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).mul_(1 / torch.finfo(dtype).max).clamp_(min=LEAST)
    return (wide / scales).to(dtype), scales


def product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Returns x Wᵀ + bias [..., out] of quantised rows of x [..., in], in x's dtype."""
    codes, scales = coded(x.reshape(-1, x.shape[-1]), QTYPE)
    y = _scaled_product(codes, weight.qdata.T, scales, weight.scale.float().T, bias, x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def transposed_product(d: Tensor, weight: Any, bwd_qtype: str | None) -> Tensor:
    """Returns d W [rows, in] of d [rows, out] in d's dtype, with quantised rows unless `bwd_qtype`
    is None."""
    if bwd_qtype is None:
        return d @ dense(weight, d.dtype, again=True)
    codes, scales = coded(d.float() * weight.scale.float().T, bwd_qtype)
    w = weight.qdata.view(torch.uint8).T.contiguous().view(weight.qdata.dtype).T
    return _scaled_product(codes, w, scales, scales.new_ones(1, w.shape[1]), None, d.dtype)


def _scaled_product(
    codes: Tensor,
    w: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns (codes w)∘(rows ⊗ columns) + bias in `dtype`, for codes [rows, k] and w [k, columns],
    whose columns are contiguous, both in FP8; rows f32[rows, 1], columns f32[1, columns]."""
    if dtype == torch.bfloat16 and _has_tensor_cores(w):
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            codes, w, rows, columns.contiguous(), bias, out_dtype=dtype, use_fast_accum=True
        )
    # Numbers in FP8 are exact in bf16.
    wide = torch.promote_types(dtype, torch.float32)
    total = exact_product(codes.to(torch.bfloat16), w.to(torch.bfloat16), wide)
    total = total.mul_(rows).mul_(columns)
    return (total if bias is None else total.add_(bias)).to(dtype)


def _has_tensor_cores(w: Tensor) -> bool:
    """Returns whether products with w [k, columns] can run on FP8 tensor cores."""
    is_aligned = w.shape[0] % ALIGNMENT == w.shape[1] % ALIGNMENT == 0
    return w.is_cuda and is_aligned and torch.cuda.get_device_capability(w.device) >= (8, 9)
