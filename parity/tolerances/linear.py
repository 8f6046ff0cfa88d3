"""Bounds for a whole adapted layer and its gradients."""

from dataclasses import dataclass

from parity import oracle
from parity.oracle import Array, dtype_name, fp64
from parity.tolerances.operators import compose, magnitude_scale, norm
from parity.tolerances.rules import (
    SIGMAS,
    UNDERFLOW,
    accumulation,
    in_fp32,
    independent,
    product,
    rounding,
    two_norm_of_products,
    unit_roundoff,
)


@dataclass(frozen=True)
class LinearBounds:
    """Bounds for `dora_linear` and its gradients. Each has the shape of the result that it bounds,
    with activations as `[rows, features]`."""

    y: Array
    d_x: Array
    d_lora_a: Array
    d_lora_b: Array
    d_magnitude: Array
    d_bias: Array
    relative_g: Array  # [out]: the relative error of g


def dora_linear(
    dy,
    x,
    weight,
    lora_a,
    lora_b,
    magnitude,
    scale: float,
    dtype,
    *,
    bias=None,
    weight_roundings: int = 0,
) -> LinearBounds:
    """Returns the bounds for a layer in which every intermediate result may be rounded to `dtype`
    once.

    The chain is `z = xAᵀ`, `lora = zBᵀ`, `base = xWᵀ`, `y = compose(...)`; then, with `d_base` and
    `d_lora` rounded, `dz = d_lora·B`, `dx = d_base·W + dz·A`, `dA = dzᵀx`, `dB = d_loraᵀz`, `dm = Σ
    dY∘inner / norm`.

    Each step inherits the errors of its operands by rule 3, and adds its own accumulation (rule 4)
    and rounding (rule 1). Adapters of a wider dtype are cast to `dtype` for products with
    activations: an error of `u|A|` and `u|B|`, also by rule 3. An error of g is the same in all
    rows, so it is added linearly. A fused kernel that keeps intermediates in fp32 has smaller
    errors.

    Args:
      magnitude: None for LoRA, which has g = 1 without an error; d_magnitude then means nothing.
      weight_roundings: how often an element of a quantised weight is rounded to `dtype` for a
        product. By rule 3, each time costs as much as the cast of an adapter.
    """
    x, dy = fp64(x), fp64(dy)
    w, a, b = fp64(weight), fp64(lora_a), fp64(lora_b)
    x, dy = x.reshape(-1, w.shape[1]), dy.reshape(-1, w.shape[0])
    rows = x.shape[0]
    u = unit_roundoff(dtype)

    def multiplied(left: Array, right: Array) -> tuple[Array, Array]:
        """Returns a matrix product and its error from fp32 accumulation and one rounding."""
        total, summing = product(left, right)
        return total, rounding(total, dtype) + summing

    def cast(left: Array, right: Array) -> Array:
        """Returns the error of casting one matrix in `left @ right`: rule 3."""
        return u * independent(left, right)

    z, z_error = multiplied(x, a.T)
    z_error = z_error + cast(x, a.T)
    lora, lora_error = multiplied(z, b.T)
    lora_error = lora_error + independent(z_error, b.T) + cast(z, b.T)
    base, base_error = multiplied(x, w.T)
    base_error = base_error + weight_roundings * cast(x, w.T)
    if bias is not None:  # the product may be rounded with the bias, which is subtracted later
        base_error = base_error + rounding(base + fp64(bias), dtype) + 2 * in_fp32(base, fp64(bias))

    row_norm = oracle.norm(weight, lora_a, lora_b, scale)
    norm_error = norm(weight, lora_a, lora_b, scale, weight_roundings=weight_roundings)
    if magnitude is None:
        g, g_error = 0.0 * row_norm + 1.0, 0.0 * row_norm
    else:
        g = oracle.magnitude_scale(magnitude, row_norm, dtype)
        g_error = magnitude_scale(magnitude, row_norm, dtype, norm_error)
    inner = base + scale * lora
    inner_error = base_error + scale * lora_error + 2 * in_fp32(base, scale * lora)
    y_error = compose(base, lora, g, scale, dtype) + abs(g) * inner_error + g_error * abs(inner)
    if bias is not None:  # one more sum, whose result may be smaller than both operands
        y_error = y_error + rounding(g * inner + fp64(bias), dtype) + in_fp32(fp64(bias))

    relative_g = g_error / abs(g).clip(UNDERFLOW["float32"])
    d_base = g * dy
    d_lora = d_base * scale
    d_base_error = rounding(d_base, dtype) + 3 * in_fp32(d_base) + relative_g * abs(d_base)
    d_lora_error = rounding(d_lora, dtype) + 3 * in_fp32(d_lora) + relative_g * abs(d_lora)
    dz, dz_error = multiplied(d_lora, b)
    dz_error = dz_error + independent(d_lora_error, b) + cast(d_lora, b)
    dx_base, dx_base_error = multiplied(d_base, w)
    dx_base_error = dx_base_error + weight_roundings * cast(d_base, w)
    dx_lora, dx_lora_error = multiplied(dz, a)
    dx_error = dx_base_error + independent(d_base_error, w) + dx_lora_error
    dx_error = dx_error + independent(dz_error, a) + cast(dz, a)
    dx_error = dx_error + rounding(dx_base + dx_lora, dtype)
    _, d_a_error = multiplied(dz.T, x)
    _, d_b_error = multiplied(d_lora.T, z)

    # dm is divided by max(norm, eps), which has the norm's error.
    floor = row_norm.clip(oracle.EPS[dtype_name(dtype)])
    terms = dy * inner
    d_g = terms.sum(0)
    d_g_error = accumulation(rows, d_g, (terms**2).sum(0) ** 0.5)
    stored = abs(dy) * (inner_error + rounding(inner, dtype))
    d_g_error = d_g_error + SIGMAS * (stored**2).sum(0) ** 0.5
    smallest = (row_norm - norm_error).clip(oracle.EPS[dtype_name(dtype)])
    d_m_error = d_g_error / smallest + abs(d_g) * (1 / smallest - 1 / floor)

    d_b_error = d_b_error + independent(d_lora_error.T, z)
    return LinearBounds(
        y=y_error,
        d_x=dx_error,
        d_lora_a=d_a_error + independent(dz_error.T, x),
        d_lora_b=d_b_error + SIGMAS * two_norm_of_products(d_lora.T, z_error),
        d_magnitude=d_m_error + rounding(d_g / floor, dtype) + 3 * in_fp32(d_g / floor),
        d_bias=rounding(dy.sum(0), dtype) + accumulation(rows, dy.sum(0), (dy**2).sum(0) ** 0.5),
        relative_g=relative_g,
    )
