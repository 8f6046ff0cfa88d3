"""The fp64 oracle: DoRA as one dense matrix, `W' = m ∘ (W + sBA) / ‖W + sBA‖` with the norm of each
row (arXiv 2402.09353, eq. 5).

Every function forms `W + sBA` in fp64 and differentiates the dense product. So the oracle shares no
formula with the packages: it has no factored norm, no split into base and correction, and no
cheaper order of products.

Layout: PyTorch's, `weight [out, in]`, `lora_a [r, in]`, `lora_b [out, r]`, vectors `[out]`,
activations `[..., features]`. `from_flax` converts Flax arrays to this layout; `.T` converts a
gradient back.

Inputs may be NumPy, JAX or torch arrays of any float dtype. Torch tensors stay torch tensors on
their device, so that a GPU can compute the paper's full shapes; all others become NumPy arrays.
Both kinds go through the same operations.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = Any  # np.ndarray or torch.Tensor; results are always fp64

EPS = {"bfloat16": 1e-6, "float16": 1e-6, "float32": 1e-12, "float64": 1e-12}


def dtype_name(dtype) -> str:
    """Returns the name, such as `"bfloat16"`, of a NumPy, JAX or torch dtype, or of a name
    itself."""
    name = str(dtype)
    if name.startswith("torch."):
        return name.removeprefix("torch.")
    return name if name in EPS else np.dtype(dtype).name


def fp64(array) -> Array:
    """Returns the exact value in fp64, as torch or NumPy; a Python number stays a Python number."""
    if isinstance(array, int | float):
        return float(array)
    if hasattr(array, "detach"):
        return array.detach().double()
    return np.asarray(array).astype(np.float64)


def from_flax(kernel, lora_a, lora_b) -> tuple[Array, Array, Array]:
    """Returns `weight`, `lora_a`, `lora_b` in this file's layout, from Flax's `kernel [in, out]`,
    `lora_a [in, r]`, `lora_b [r, out]`."""
    return fp64(kernel).T, fp64(lora_a).T, fp64(lora_b).T


def direction(weight, lora_a, lora_b, scale: float) -> Array:
    """Returns `V = W + sBA`, `[out, in]`."""
    return fp64(weight) + scale * (fp64(lora_b) @ fp64(lora_a))


def norm(weight, lora_a, lora_b, scale: float) -> Array:
    """Returns `‖W + sBA‖` per row, `[out]`."""
    v = direction(weight, lora_a, lora_b, scale)
    return (v * v).sum(1) ** 0.5


def magnitude_scale(magnitude, row_norm, dtype) -> Array:
    """Returns `g = m / max(norm, eps)`, `[out]`, with the eps for a result of `dtype`."""
    return fp64(magnitude) / fp64(row_norm).clip(EPS[dtype_name(dtype)])


def merged_weight(weight, lora_a, lora_b, magnitude, scale: float, dtype="float64") -> Array:
    """Returns `W'`, `[out, in]`; for LoRA, without a magnitude, `W + sBA`."""
    v = direction(weight, lora_a, lora_b, scale)
    if magnitude is None:
        return v
    g = magnitude_scale(magnitude, (v * v).sum(1) ** 0.5, dtype)
    return g[:, None] * v


def compose(base, lora, g, scale: float) -> Array:
    """Returns `y = g ∘ (base + s·lora)`. The packages compute another form, `base + ((g-1)∘base +
    …)`; in fp64 this one is exact enough."""
    return fp64(g) * (fp64(base) + scale * fp64(lora))


def compose_delta(base, lora, g, scale: float) -> Array:
    """Returns `ΔY = y - base`."""
    return compose(base, lora, g, scale) - fp64(base)


@dataclass(frozen=True)
class ComposeGrads:
    """Cotangents of `compose` or `compose_delta`: `d_base` and `d_lora` shaped like `base`, `d_g
    [out]`."""

    d_base: Array
    d_lora: Array
    d_g: Array


def compose_grads(dy, base, lora, g, scale: float) -> ComposeGrads:
    """Returns the gradients of `sum(dy ∘ compose(base, lora, g, scale))`."""
    dy, g = fp64(dy), fp64(g)
    inner = fp64(base) + scale * fp64(lora)
    features = dy.shape[-1]
    d_g = (dy * inner).reshape(-1, features).sum(0)
    return ComposeGrads(d_base=dy * g, d_lora=dy * (g * scale), d_g=d_g)


def compose_delta_grads(dy, base, lora, g, scale: float) -> ComposeGrads:
    """Returns the gradients of `sum(dy ∘ compose_delta(base, lora, g, scale))`: those of `compose`,
    with `dy` subtracted from `d_base`."""
    grads = compose_grads(dy, base, lora, g, scale)
    return ComposeGrads(d_base=grads.d_base - fp64(dy), d_lora=grads.d_lora, d_g=grads.d_g)


def dora_linear(
    x, weight, lora_a, lora_b, magnitude, scale: float, *, bias=None, dtype="float64"
) -> Array:
    """Returns `y = x W'ᵀ (+ bias)`, `[..., out]`. `dtype`, the dtype of the result under test, only
    sets eps."""
    y = fp64(x) @ merged_weight(weight, lora_a, lora_b, magnitude, scale, dtype).T
    return y if bias is None else y + fp64(bias)


@dataclass(frozen=True)
class LinearGrads:
    """Cotangents of `dora_linear`, each shaped like its argument. `d_weight` is the gradient of the
    weight if it were trained."""

    d_x: Array
    d_weight: Array
    d_lora_a: Array
    d_lora_b: Array
    d_magnitude: Array
    d_bias: Array


def dora_linear_grads(
    dy, x, weight, lora_a, lora_b, magnitude, scale: float, *, dtype="float64"
) -> LinearGrads:
    """Returns the gradients of `sum(dy ∘ dora_linear(...))` with the norm held constant (arXiv
    2402.09353, §4.3).

    All are derived from the dense cotangent of `W'`, `dyᵀx [out, in]`.
    """
    v = direction(weight, lora_a, lora_b, scale)
    row_norm = ((v * v).sum(1) ** 0.5).clip(EPS[dtype_name(dtype)])
    g = fp64(magnitude) / row_norm
    rows_dy = fp64(dy).reshape(-1, v.shape[0])
    rows_x = fp64(x).reshape(-1, v.shape[1])
    d_merged = rows_dy.T @ rows_x
    d_v = g[:, None] * d_merged
    return LinearGrads(
        d_x=(rows_dy @ (g[:, None] * v)).reshape(tuple(x.shape)),
        d_weight=d_v,
        d_lora_a=scale * (fp64(lora_b).T @ d_v),
        d_lora_b=scale * (d_v @ fp64(lora_a).T),
        d_magnitude=(d_merged * v).sum(1) / row_norm,
        d_bias=rows_dy.sum(0),
    )


def attention(q, keys, values) -> Array:
    """Returns `softmax(q Kᵀ / sqrt(size)) V`, `[queries, size]`, of K and V `[tokens, size]`."""
    q, keys, values = fp64(q), fp64(keys), fp64(values)
    scores = q @ keys.T / q.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ values


def swiglu(gate, up, gate_g, up_g, gate_bias: Array = 0.0, up_bias: Array = 0.0) -> Array:
    """Returns `silu(gate_g ∘ gate + gate_bias) ∘ (up_g ∘ up + up_bias)` (arXiv 2002.05202)."""
    operands = (gate, up, gate_g, up_g, gate_bias, up_bias)
    h = _swiglu(*(torch.as_tensor(fp64(operand)) for operand in operands))
    return h if hasattr(gate, "detach") else h.numpy()


def swiglu_grads(dh, *operands) -> tuple[Array, ...]:
    """Returns the cotangents of `swiglu`'s operands, in order, computed by autograd."""
    leaves = [torch.as_tensor(fp64(operand)).requires_grad_() for operand in operands]
    grads = torch.autograd.grad(_swiglu(*leaves), leaves, torch.as_tensor(fp64(dh)))
    return grads if hasattr(dh, "detach") else tuple(grad.numpy() for grad in grads)


def _swiglu(gate, up, gate_g, up_g, gate_bias: Array = 0.0, up_bias: Array = 0.0):
    return torch.nn.functional.silu(gate_g * gate + gate_bias) * (up_g * up + up_bias)
