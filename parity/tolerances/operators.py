"""Bounds for the operators: the norm, g, the compose, SwiGLU, attention and rows rounded to FP8."""

from dataclasses import dataclass

import numpy as np

from parity import oracle
from parity.oracle import Array, dtype_name, fp64
from parity.tolerances.rules import (
    LARGEST_FP8,
    SIGMAS,
    U32,
    UNDERFLOW,
    accumulation,
    in_fp32,
    independent,
    product,
    rounding,
)


def norm(weight, lora_a, lora_b, scale: float, *, weight_roundings: int = 0) -> Array:
    """Returns `[out]`: the error of an fp32-accumulated factored norm of `‖W + sBA‖row`.

    `weight_roundings` is the number of fp32 operations by which a quantised W is dequantised. They
    change W by at most `k·u32·‖W‖`, and by the triangle inequality its norm by no more.

    The square of the norm is the sum of three sums. Each is at most `(‖W‖ + s‖BA‖)²` and
    accumulates `in` products in fp32, then `r` more. Apply rule 4, with |Σ| and ‖terms‖₂ both
    bounded by that square, and add the steps of both sums: the error of the square is at most `δ =
    c·u32·(‖W‖ + s‖BA‖)²` with `c = 2·(SIGMAS·sqrt(K) + K)`, `K = in/16 + r/16`. Cancellation in the
    sum does not reduce δ: that is the price of the factored form.

    Beside a W of fewer bits than fp32, fp32 adapters may be multiplied as two float16 pieces each,
    whose three largest products are added. Each of the `r` terms then has three independent errors
    of at most `2⁻²²·|B|max·|A|max`, with the largest numbers of B's row and A's column (here their
    16-norms, which are no smaller): `ΔBA ≤ SIGMAS·sqrt(3r)` of these. By the triangle inequality
    the norm changes by no more than the norm of that.

    From `|n̂² - n²| ≤ δ` follows `|n̂ - n| = |n̂² - n²| / (n̂ + n) ≤ min(δ/n, sqrt(δ))`. The root
    adds one more u32·n.
    """
    w, b, a = fp64(weight), fp64(lora_b), fp64(lora_a)
    adapter = scale * (b @ a)
    exact = ((w + adapter) ** 2).sum(1) ** 0.5
    length = (w**2).sum(1) ** 0.5 + (adapter**2).sum(1) ** 0.5
    delta = 2.0 * accumulation(w.shape[1] + a.shape[0], length**2, 0.0)
    tiny = UNDERFLOW["float32"]
    ratio = delta / exact.clip(tiny)
    # min(δ/n, sqrt δ), written without `minimum`, which NumPy and torch call differently.
    root = delta**0.5
    smaller = (ratio + root - abs(ratio - root)) / 2
    dequantised = weight_roundings * U32 * (w**2).sum(1) ** 0.5
    in_pieces = 0.0 * exact
    if dtype_name(lora_a.dtype) == "float32" != dtype_name(weight.dtype) or weight_roundings:
        largest_b, largest_a = (b**16).sum(1) ** (1 / 16), (a**16).sum(0) ** (1 / 16)
        terms = SIGMAS * (3 * a.shape[0]) ** 0.5 * 2.0**-22
        in_pieces = terms * abs(scale) * largest_b * (largest_a**2).sum() ** 0.5
    return smaller + dequantised + in_pieces + 2 * U32 * exact + tiny


def magnitude_scale(magnitude, row_norm, dtype, norm_error=0.0) -> Array:
    """Returns `[out]`: the error of g if the norm that it is computed from has the error
    `norm_error`.

    g decreases with the norm, and fastest for small norms. So the worst case is `|m| / max(n - e,
    eps) - |g|`. The division, reading m in fp32 and storing g cost three operations by rule 2.
    """
    m, n = abs(fp64(magnitude)), fp64(row_norm)
    eps = oracle.EPS[dtype_name(dtype)]
    g = m / n.clip(eps)
    moved = m / (n - fp64(norm_error)).clip(eps) - g
    return moved + 3 * U32 * g + UNDERFLOW["float32"]


def compose(base, lora, g, scale: float, dtype) -> Array:
    """Returns the bound for `y = base + ((g-1)·base + g·(s·lora))` in fp32, rounded once.

    Rule 2 with at most four operations on every term (product, product, sum, sum; the subtraction
    g-1 rounds once), then rule 1.
    """
    base, lora, g = fp64(base), fp64(lora), fp64(g)
    operands = abs(base) + abs((g - 1) * base) + abs(g * scale * lora)
    y = g * (base + scale * lora)
    return rounding(y, dtype) + 4 * U32 * operands


def compose_delta(base, lora, g, scale: float, dtype) -> Array:
    """Returns the bound for `ΔY = (g-1)·base + g·(s·lora)`: like `compose`, but without the
    rounding of `base` itself, whose size must not matter."""
    base, lora, g = fp64(base), fp64(lora), fp64(g)
    operands = abs((g - 1) * base) + abs(g * scale * lora)
    delta = (g - 1) * base + g * (scale * lora)
    return rounding(delta, dtype) + 4 * U32 * operands


def expanded(scaled, inner, inner_error, lora_b, dtype) -> Array:
    """Returns the bound for `scaled + inner @ lora_b`, where `inner` has an error before it is
    stored in dtype, and the sum is fp32: rules 1 and 4. There are as few roundings of `inner` as
    ranks, so all may have the worst sign."""
    scaled, inner, lora_b = fp64(scaled), fp64(inner), fp64(lora_b)
    added, error = product(inner, lora_b)
    stored = (fp64(inner_error) + rounding(inner, dtype)) @ abs(lora_b)
    total, terms = scaled + added, abs(scaled) + abs(added)
    return stored + error + accumulation(1, total, terms) + rounding(total, dtype)


def compose_grads(
    dy, base, lora, g, scale: float, dtype, *, delta: bool = False
) -> oracle.ComposeGrads:
    """Returns the bounds for the cotangents of `compose`, or of `compose_delta`.

    `d_base = g·dY` (or `(g-1)·dY`) and `d_lora = g·s·dY`: three fp32 operations, one rounding. `d_g
    = Σ_rows dY ∘ inner`, where `inner = base + s·lora` may have been stored in `dtype` between the
    passes: rule 3 for its rounding errors, rule 4 for the sum over the rows. d_g itself is fp32.
    """
    dy, base, lora, g = fp64(dy), fp64(base), fp64(lora), fp64(g)
    inner = base + scale * lora
    d_base = (g - 1) * dy if delta else g * dy
    d_lora = g * (scale * dy)
    features = dy.shape[-1]
    terms = (dy * inner).reshape(-1, features)
    stored = abs(dy) * (rounding(inner, dtype) + 2 * in_fp32(base, scale * lora))
    stored = stored.reshape(-1, features)
    length = (terms**2).sum(0) ** 0.5
    return oracle.ComposeGrads(
        d_base=rounding(d_base, dtype) + 3 * U32 * abs(d_base),
        d_lora=rounding(d_lora, dtype) + 3 * U32 * abs(d_lora),
        d_g=SIGMAS * (stored**2).sum(0) ** 0.5 + accumulation(terms.shape[0], terms.sum(0), length),
    )


def stored_inner(dy, inner, dtype) -> Array:
    """Returns `[out]`: the error of `d_g = Σ_rows dY ∘ inner` if inner was stored in `dtype` after
    the forward pass, by rule 3. A plain computation under autograd keeps inner in fp32."""
    terms = abs(fp64(dy)) * rounding(inner, dtype)
    return SIGMAS * (terms.reshape(-1, terms.shape[-1]) ** 2).sum(0) ** 0.5


@dataclass(frozen=True)
class SwigluBounds:
    """Bounds for `swiglu` and its gradients, each shaped like the result that it bounds."""

    h: Array
    d_gate: Array
    d_up: Array
    d_gate_g: Array
    d_up_g: Array
    d_gate_bias: Array
    d_up_bias: Array


def swiglu(dh, gate, up, gate_g, up_g, dtype, *, gate_bias=0.0, up_bias=0.0) -> SwigluBounds:
    """Returns the bounds for `silu(y₁)∘y₂`, with y₁ = g₁∘gate + b₁ and y₂ = g₂∘up + b₂, and its
    gradients in fp32.

    - y₁ and y₂ are two operations of rule 2.
    - σ = sigmoid(y₁) may come from approximate instructions, each with an error of 2 ulp (CUDA's
      ex2.approx and rsqrt.approx). The argument of exp, y₁·log₂e, is rounded twice, which changes
      exp by 2·u32·|y₁| relatively, and 1/(1 + exp) by 1-σ of that. The instructions, a sum and a
      square add 12·u32. The relative error of σ is R = ((1-σ)(2|y₁| + 4) + 12)·u32.
    - 1-σ has the absolute error σR + u32. So silu' = σ(1 + y₁(1-σ)) has the error R + 3·u32
      relative to its terms, plus σ|y₁| times the error of 1-σ.
    - σ, and its product with dh, may each underflow.
    - silu and silu' propagate y₁'s error by their slopes.
    - Sums over rows: rule 3 for the errors of the terms, and rule 4.
    """
    dh, gate, up, g1, g2 = (fp64(value) for value in (dh, gate, up, gate_g, up_g))
    b1, b2 = fp64(gate_bias), fp64(up_bias)
    u32 = U32
    y1, y2 = g1 * gate + b1, g2 * up + b2
    e1, e2 = 2 * u32 * (abs(g1 * gate) + abs(b1)), 2 * u32 * (abs(g2 * up) + abs(b2))
    # exp(-|y|) cannot overflow.
    small = 2.718281828459045 ** -abs(y1)
    up_to_1, rest = 1 / (1 + small), small / (1 + small)
    sigma = (y1 >= 0) * up_to_1 + (y1 < 0) * rest
    other = (y1 >= 0) * rest + (y1 < 0) * up_to_1  # 1-σ
    silu, slope = y1 * sigma, sigma * (1 + y1 * other)
    bend = sigma * other * (2 + y1 * (other - sigma))  # silu''
    r = (other * (2 * abs(y1) + 4) + 12) * u32
    tiny = UNDERFLOW["float32"]
    e_silu = abs(slope) * e1 + (r + 2 * u32) * abs(silu) + tiny * abs(y1)
    e_slope = abs(bend) * e1 + (r + 3 * u32) * sigma * (1 + abs(y1) * other)
    e_slope = e_slope + sigma * abs(y1) * (sigma * r + u32) + tiny * (1 + abs(y1))

    h = silu * y2
    d1, d2 = dh * y2 * slope, dh * silu
    e_d1 = abs(dh) * (abs(y2) * e_slope + e2 * abs(slope)) + 3 * u32 * abs(d1)
    e_d1 = e_d1 + tiny * abs(y2) * (1 + abs(y1))
    e_d2 = abs(dh) * e_silu + 3 * u32 * abs(d2) + tiny * abs(y1)

    def stored(g: Array, d: Array, error: Array) -> Array:
        return rounding(g * d, dtype) + abs(g) * error + 2 * u32 * abs(g * d)

    def summed(terms: Array, error: Array) -> Array:
        terms, error = (v.reshape(-1, v.shape[-1]) for v in (terms, error))
        summing = accumulation(terms.shape[0], terms.sum(0), (terms**2).sum(0) ** 0.5)
        return SIGMAS * (error**2).sum(0) ** 0.5 + summing

    return SwigluBounds(
        h=rounding(h, dtype) + e_silu * abs(y2) + abs(silu) * e2 + 2 * u32 * abs(h),
        d_gate=stored(g1, d1, e_d1),
        d_up=stored(g2, d2, e_d2),
        d_gate_g=summed(d1 * gate, e_d1 * abs(gate)),
        d_up_g=summed(d2 * up, e_d2 * abs(up)),
        d_gate_bias=summed(d1, e_d1),
        d_up_bias=summed(d2, e_d2),
    )


def attention(q, keys, values, operands, dtype) -> Array:
    """Returns `[queries, size]`: the error of attention whose two products are of the dtype
    `operands`, accumulated in fp32, and whose result is stored in `dtype`.

    Queries are rounded in units of their largest number. Errors δ of the scores change the result y
    by `Σ p_t δ_t (V_t - y)` and, in second order, by at most `max δ² Σ p_t |V_t|`. Those of a
    rounded channel of q are the same for all tokens, up to the factor K_t; by rule 3 those of its
    channels are independent. The fp32 errors of a score and of its exponential are bounded together
    with the sum of the softmax. Numerators times the largest number of a value are rounded in units
    of the largest of these, each independently.
    """
    q, k, v = fp64(q), fp64(keys), fp64(values)
    scale, unit = q.shape[-1] ** -0.5, abs(q).max(-1, keepdims=True)
    scores = scale * (q @ k.T)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y, magnitude = p @ v, p @ abs(v)

    rounded = scale * unit * rounding(q / unit, operands)
    spread = np.einsum("nt,td,th->ndh", p, k, v) - (p @ k)[:, :, None] * y[:, None]
    by_queries = SIGMAS * np.einsum("nd,ndh->nh", rounded**2, spread**2) ** 0.5
    second_order = independent(rounded, k.T).max(-1, keepdims=True) ** 2 * magnitude
    terms = scale * accumulation(q.shape[-1], q @ k.T, (q**2 @ k.T**2) ** 0.5)
    in_scores = 2 * (terms + 4 * in_fp32(scores)).max(-1, keepdims=True) + 8 * U32
    tau = abs(v).max(-1)
    largest = (p * tau).max(-1, keepdims=True)
    by_weights = independent(largest * rounding(p * tau / largest, operands) / tau, v)
    sums = accumulation(len(v), y, (p**2 @ v**2) ** 0.5) + accumulation(len(v), y, abs(y))
    first_order = by_queries + np.expm1(in_scores) * magnitude + by_weights
    return first_order + second_order + sums + rounding(y, dtype)


def quantised_rows(x, weight, dtype="float8_e4m3fn") -> Array:
    """Returns `[rows, out]`: the error of `x̂ Wᵀ`, where every row of x is rounded to an FP8 `dtype`
    in units of its largest magnitude / the dtype's largest number.

    Rule 1 in these units, which cost two fp32 operations, then rule 3 through the product.
    """
    x, w = fp64(x), fp64(weight)
    scale = abs(x).max(-1, keepdims=True) / LARGEST_FP8[dtype]
    error = scale * rounding(x / scale, dtype) + 2 * in_fp32(x)
    return independent(error, w.T)
