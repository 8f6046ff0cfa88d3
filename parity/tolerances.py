"""Every tolerance, with its derivation. Bounds are absolute, per element, in fp64, in the layout of
`parity.oracle`.

Notation: `u` is the unit roundoff of the compute dtype (that of activations and results), `u32`
that of fp32. An error is tracked the way it arises, by four rules:

1. *Storing* a value `v` in a dtype costs at most `u|v|` (round to nearest), plus half the subnormal
   spacing.
2. *Elementwise fp32 arithmetic* of k operations costs at most `k·u32` times the magnitudes that
   enter it.
3. *Independent* errors bounded by `e_i` add up to at most `SIGMAS · sqrt(Σ e_i²)`. Rounding errors
   of `v` are uniform in ±u|v|, of variance at most `e²/3`, so SIGMAS = 4 stands for 6.9 standard
   deviations: one excess in 10¹¹ elements, where the largest case has 3·10⁸. (Hoeffding's
   inequality gives the form without assuming uniformity.)
4. *Accumulating* n products in fp32 rounds the partial sums. Every implementation here (tensor
   cores, BLAS lanes, XLA's and Triton's reductions) adds `BLOCK` = 16 or more products before the
   next sequential step, so there are K = max(1, n/16) steps, each on a partial sum of magnitude at
   most about `|Σ| + ‖terms‖₂`. Rounding to nearest adds up like sqrt(K) by rule 3; Hopper's tensor
   cores truncate, which is biased and adds up like K. Error: `u32 · (SIGMAS·sqrt(K) + K) · (|Σ| +
   ‖terms‖₂)`. Products of two bf16, or two fp16, numbers are exact in fp32 (8 + 8 and 11 + 11 bits,
   of 24).
"""

from __future__ import annotations

from dataclasses import dataclass

from parity import oracle
from parity.oracle import Array, dtype_name, fp64

# Precision p bits, significand included: u = 2^-p.
UNIT_ROUNDOFF = {
    "float8_e4m3fn": 2.0**-4,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}
U32 = UNIT_ROUNDOFF["float32"]
# Half the spacing of the smallest numbers: fp8's and fp16's subnormals are met in practice, the
# others' are not, but XLA and Triton may flush subnormals to zero, so theirs is the smallest normal
# number.
UNDERFLOW = {
    "float8_e4m3fn": 2.0**-10,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-25,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}

LARGEST_FP8 = 448.0  # of float8_e4m3fn

SIGMAS = 4.0
BLOCK = 16

# Triton's interpreter truncates fp32 to bf16 where the GPU rounds to nearest: up to a whole
# spacing.
TRITON_INTERPRETER_BF16 = 2.0

# The paper's caps (arXiv 2603.22276, the table of its claims); ours have to be at least as tight.
OPERATOR_FP32_MAX_ABS = 1e-4  # fused against plain, fp32, on unit-normal data
D_MAGNITUDE_FP32_MAX_ABS = 2.14e-4  # the same, for the reduction over rows
STABLE_OVER_NAIVE = 3.0  # the naive form's peak error over ours, near g = 1 in bf16/fp16
LOGITS_COSINE = 0.9999  # every model and GPU
TRAINING_MEAN_LOSS_DIFFERENCE = 7.1e-4  # per step, over 2,000 steps
TRAINING_WORST_LOSS_DIFFERENCE = 1.1e-2  # any one step
TRAINING_FINAL_EVAL_DIFFERENCE = 1.5e-4
# The paper's, for bf16 base weights and activations, and what makes them attainable here: a
# residual stream rounded some 7 times a layer carries a relative error of about u·sqrt(7·layers),
# so a token's loss is off by about 2⁻⁷ nat in each framework. Over the 4,096 tokens of a step that
# averages to 2⁻⁷·sqrt(2)/64 = 1.7e-4 for the difference, and its largest of 2,000 to about 3.5
# times as much; the 262,144 tokens of the evaluation leave 2e-5. What is left of the caps is for
# trajectories that part: Adam turns rounding noise in a small gradient into a whole step. How far
# they part by themselves is measured beside it, by moving the initial adapter one ulp.

# The same in fp32, where nothing but the order of sums differs, over tens of steps of a few hundred
# tokens: a loss near 3 is itself stored to 2⁻²³, its terms are off by some ten u32, and Adam's
# whole steps on gradients of the size of their rounding error add as much again.
TRAINING_FP32_MEAN_LOSS_DIFFERENCE = 4e-6
TRAINING_FP32_WORST_LOSS_DIFFERENCE = 2e-5
TRAINING_FP32_FINAL_EVAL_DIFFERENCE = 8e-6

# Between Flax and torch, of a pretrained encoder's unit-length embeddings. In bf16 the paper's own
# figure: two frameworks round the residual stream of six layers independently, a relative
# difference of about 2u = 2^-7 per vector, and 1 - cosine is half its square, 3·10⁻⁵.
EMBEDDING_COSINE = {"bfloat16": LOGITS_COSINE, "float32": 0.9999999}

# What this project promises beyond the paper: between any two of Flax, torch and PEFT.
COSINE = {"bfloat16": 0.99999, "float16": 0.99999, "float32": 0.9999999}

# A whole model, beside PEFT's and beside the model without adapters.
#
# An adapted projection rounds its base product, its two adapter products and its result where the
# unadapted one rounds once, so its errors are at most those of flash-attention's rule: twice as
# large. 1 - cosine is half the square of the relative error, so four times.
MODEL_CONTROL = 4.0
# Ours over PEFT's relative distance from fp64. In bf16 both round as often, or ours less, and what
# is left to chance is the norm of a random vector: of N independent components it strays by
# 1/sqrt(2N). Errors made early reach everything behind them; with N as small as 200, two deviations
# are 10 %. In fp32 the order in which a library sums its matrix products decides (rule 4: with
# `BLOCK` anything from 16 up, the steps vary and the error as their root), and no adapter.
MODEL_NEARNESS = {"bfloat16": 1.1, "float32": 1.5}
# What is allowed, over what the adapter changes: a model in which it changes less shows nothing.
MODEL_RESOLUTION = 0.1


def model_cosine_distance(dtype, control: float) -> float:
    """Returns how far `1 - cosine` of two systems' logits may be from 0: what `COSINE` promises,
    or, where the unadapted models of the two frameworks are themselves further apart than that,
    `control`, `MODEL_CONTROL` times as far.

    Two bf16 models that add up differently round a residual stream of L layers 2L times apart. One
    rounding errs by u/√3 of a spacing's half, about 0.2u of the value in the mean square, so the
    stream alone gives a relative difference of at least 0.3u·sqrt(2L): 1 - cosine of
    0.09 · L · u², 5·10⁻⁵ for 36 layers, before any layer amplifies it. No adapter has a part in it.
    """
    return max(1 - COSINE[dtype_name(dtype)], MODEL_CONTROL * control)


def unit_roundoff(dtype) -> float:
    return UNIT_ROUNDOFF[dtype_name(dtype)]


def rounding(value, dtype) -> Array:
    """Returns the cost of storing `value` in `dtype`: rule 1."""
    return unit_roundoff(dtype) * abs(fp64(value)) + UNDERFLOW[dtype_name(dtype)]


def accumulation(n: int, total, terms_norm) -> Array:
    """Returns the cost of summing n terms of 2-norm `terms_norm` to `total` in fp32: rule 4."""
    steps = max(1.0, n / BLOCK)
    factor = U32 * (SIGMAS * steps**0.5 + steps)
    return factor * (abs(fp64(total)) + fp64(terms_norm))


def two_norm_of_products(a: Array, b: Array) -> Array:
    """Returns `sqrt(Σ_k a_ik² b_kj²)`, the 2-norm of the terms of every element of `a @ b`."""
    return ((a * a) @ (b * b)) ** 0.5


def independent(a: Array, b: Array) -> Array:
    """Returns what independent errors of at most `a` become in `a @ b`: rule 3 through a
    product."""
    return SIGMAS * two_norm_of_products(a, b)


def flash_rule(plain_error: float, reference_peak: float, dtype, floor: float = 0.0) -> float:
    """Returns the bound of flash-attention's rule: error(kernel) ≤ 2 · error(same computation, same
    dtype, plain ops) + rounding floor.

    Both errors are peaks of the absolute difference from fp64. The floor is the final rounding of
    the largest element, `u · max|reference|`, so that a plain result that happens to be exact does
    not forbid the last rounding; `floor` adds to it what a computation other than the plain one
    must be allowed (the factored norm's cancellation).
    """
    return 2.0 * plain_error + unit_roundoff(dtype) * reference_peak + floor


def norm(weight, lora_a, lora_b, scale: float) -> Array:
    """Returns `[out]`: how far an fp32-accumulated factored norm may lie from `‖W + sBA‖row`.

    Of the three sums that make the square, each is at most `(‖W‖ + s‖BA‖)²`, of `in` products
    accumulated in fp32 and then `r` more. By rule 4 with |Σ| and ‖terms‖₂ both bounded by that
    square, and the two lengths' steps added, the square is wrong by at most `δ = c·u32·(‖W‖ +
    s‖BA‖)²` with `c = 2·(SIGMAS·sqrt(K) + K)`, `K = in/16 + r/16`. However much cancels in the sum,
    δ does not shrink: that is the factored form's price. From `|n̂² - n²| ≤ δ` follows `|n̂ - n| =
    |n̂² - n²| / (n̂ + n) ≤ min(δ/n, sqrt(δ))`. One more u32·n for the root.
    """
    w, b, a = fp64(weight), fp64(lora_b), fp64(lora_a)
    adapter = scale * (b @ a)
    exact = ((w + adapter) ** 2).sum(1) ** 0.5
    length = (w**2).sum(1) ** 0.5 + (adapter**2).sum(1) ** 0.5
    delta = 2.0 * accumulation(w.shape[1] + a.shape[0], length**2, 0.0)
    tiny = UNDERFLOW["float32"]
    ratio = delta / exact.clip(tiny)
    # min(δ/n, sqrt δ), without a two-operand minimum, whose name differs between NumPy and torch
    root = delta**0.5
    smaller = (ratio + root - abs(ratio - root)) / 2
    return smaller + 2 * U32 * exact + tiny


def magnitude_scale(magnitude, row_norm, dtype, norm_error=0.0) -> Array:
    """Returns `[out]`: how far g may lie off when the norm given to it does by `norm_error`.

    g falls with the norm, and fastest below, so the worst case is `|m| / max(n - e, eps) - |g|`;
    the division, the reading of m in fp32 and the storing of g cost rule 2's three.
    """
    m, n = abs(fp64(magnitude)), fp64(row_norm)
    eps = oracle.EPS[dtype_name(dtype)]
    g = m / n.clip(eps)
    moved = m / (n - fp64(norm_error)).clip(eps) - g
    return moved + 3 * U32 * g + UNDERFLOW["float32"]


def compose(base, lora, g, scale: float, dtype) -> Array:
    """Returns what `y = base + ((g-1)·base + g·(s·lora))` in fp32, rounded once, may lie off: rule
    2 with at most four operations deep on every term (product, product, sum, sum; the subtraction
    g-1 rounds once), then rule 1."""
    base, lora, g = fp64(base), fp64(lora), fp64(g)
    entering = abs(base) + abs((g - 1) * base) + abs(g * scale * lora)
    y = g * (base + scale * lora)
    return rounding(y, dtype) + 4 * U32 * entering


def compose_delta(base, lora, g, scale: float, dtype) -> Array:
    """Returns what `ΔY = (g-1)·base + g·(s·lora)` may lie off: as `compose` but for `base` itself,
    of whose size nothing may enter."""
    base, lora, g = fp64(base), fp64(lora), fp64(g)
    entering = abs((g - 1) * base) + abs(g * scale * lora)
    delta = (g - 1) * base + g * (scale * lora)
    return rounding(delta, dtype) + 4 * U32 * entering


def compose_grads(
    dy, base, lora, g, scale: float, dtype, *, delta: bool = False
) -> oracle.ComposeGrads:
    """Bounds for the cotangents of `compose`, or of `compose_delta`.

    `d_base = g·dY` (or `(g-1)·dY`) and `d_lora = g·s·dY`: three fp32 operations, one rounding.
    `d_g = Σ_rows dY ∘ inner` with `inner = base + s·lora` allowed to have been stored in `dtype`
    between the passes: rule 3 on its rounding errors, rule 4 on the sum over the rows; d_g itself
    is fp32.
    """
    dy, base, lora, g = fp64(dy), fp64(base), fp64(lora), fp64(g)
    inner = base + scale * lora
    d_base = (g - 1) * dy if delta else g * dy
    d_lora = g * (scale * dy)
    features = dy.shape[-1]
    terms = (dy * inner).reshape(-1, features)
    stored = abs(dy) * (rounding(inner, dtype) + 2 * _u32(base, scale * lora))
    stored = stored.reshape(-1, features)
    length = (terms**2).sum(0) ** 0.5
    return oracle.ComposeGrads(
        d_base=rounding(d_base, dtype) + 3 * U32 * abs(d_base),
        d_lora=rounding(d_lora, dtype) + 3 * U32 * abs(d_lora),
        d_g=SIGMAS * (stored**2).sum(0) ** 0.5 + accumulation(terms.shape[0], terms.sum(0), length),
    )


def stored_inner(dy, inner, dtype) -> Array:
    """Returns `[out]`: what `d_g = Σ_rows dY ∘ inner` loses if inner was stored in `dtype` after
    the forward pass, by rule 3: a plain computation under autograd keeps fp32 instead."""
    terms = abs(fp64(dy)) * rounding(inner, dtype)
    return SIGMAS * (terms.reshape(-1, terms.shape[-1]) ** 2).sum(0) ** 0.5


@dataclass(frozen=True)
class SwigluBounds:
    """Bounds for `swiglu` and its gradients, each shaped like what it bounds."""

    h: Array
    d_gate: Array
    d_up: Array
    d_gate_g: Array
    d_up_g: Array
    d_gate_bias: Array
    d_up_bias: Array


def swiglu(dh, gate, up, gate_g, up_g, dtype, *, gate_bias=0.0, up_bias=0.0) -> SwigluBounds:
    """Bounds for `silu(y₁)∘y₂`, y₁ = g₁∘gate + b₁, y₂ = g₂∘up + b₂, and its gradients in fp32.

    y₁ and y₂ cost rule 2's two operations. σ = sigmoid(y₁) may come from approximate instructions,
    each good to 2 ulp (CUDA's ex2.approx and rsqrt.approx): exp's argument y₁·log₂e is rounded
    twice, which moves exp by 2·u32·|y₁| of itself, and 1/(1 + exp) by 1-σ of that; the
    instructions, a sum and a square add 12·u32: R = ((1-σ)(2|y₁| + 4) + 12)·u32. 1-σ is wrong by σR
    + u32, absolutely, so that silu' = σ(1 + y₁(1-σ)) is by R + 3·u32 of what enters it, and by
    σ|y₁| times that. σ, and its product with dh, may each underflow. silu and silu' carry y₁'s
    error on by their slopes. Sums over rows: the terms' errors by rule 3, and rule 4.
    """
    dh, gate, up, g1, g2 = (fp64(value) for value in (dh, gate, up, gate_g, up_g))
    b1, b2 = fp64(gate_bias), fp64(up_bias)
    u32 = U32
    y1, y2 = g1 * gate + b1, g2 * up + b2
    e1, e2 = 2 * u32 * (abs(g1 * gate) + abs(b1)), 2 * u32 * (abs(g2 * up) + abs(b2))
    # exp(-|y|) overflows nowhere.
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


def quantised_rows(x, weight) -> Array:
    """Returns `[rows, out]`: how far `x̂ Wᵀ` may lie from `x Wᵀ`, where every row of x is rounded
    to float8_e4m3fn in units of its largest magnitude over 448.

    Rule 1, in those units, which cost two fp32 operations; then rule 3 through the product.
    """
    x, w = fp64(x), fp64(weight)
    scale = abs(x).max(-1, keepdims=True) / LARGEST_FP8
    error = scale * rounding(x / scale, "float8_e4m3fn") + 2 * _u32(x)
    return independent(error, w.T)


def _u32(*entering: Array) -> Array:
    return U32 * sum(abs(value) for value in entering)


@dataclass(frozen=True)
class LinearBounds:
    """Bounds for `dora_linear` and its gradients, each shaped like what it bounds, activations as
    `[rows, features]`."""

    y: Array
    d_x: Array
    d_lora_a: Array
    d_lora_b: Array
    d_magnitude: Array
    d_bias: Array
    relative_g: Array  # [out]: how far g may be off, relative to itself


def dora_linear(
    dy, x, weight, lora_a, lora_b, magnitude, scale: float, dtype, *, bias=None
) -> LinearBounds:
    """Bounds for a whole layer whose every intermediate may be rounded to `dtype` once.

    The chain is `z = xAᵀ`, `lora = zBᵀ`, `base = xWᵀ`, `y = compose(...)`, then `d_base`, `d_lora`
    stored, `dz = d_lora·B`, `dx = d_base·W + dz·A`, `dA = dzᵀx`, `dB = d_loraᵀz`, `dm = Σ dY∘inner
    / norm`. Each step inherits the errors of its inputs by rule 3, adds its own accumulation (rule
    4) and its own rounding (rule 1). Adapters of a wider dtype are cast to `dtype` for products
    with activations, an error of `u|A|`, `u|B|`, also by rule 3. An error of g is the same in all
    rows and adds plainly. A fused kernel that keeps intermediates in fp32 only does better.
    """
    x, dy = fp64(x), fp64(dy)
    w, a, b, m = fp64(weight), fp64(lora_a), fp64(lora_b), fp64(magnitude)
    x, dy = x.reshape(-1, w.shape[1]), dy.reshape(-1, w.shape[0])
    rows, n_in, n_out, rank = x.shape[0], w.shape[1], w.shape[0], a.shape[0]
    u = unit_roundoff(dtype)

    def product(left: Array, right: Array, n: int) -> tuple[Array, Array]:
        """Returns a matrix product, and what fp32 accumulation and one rounding cost it."""
        total, length = left @ right, two_norm_of_products(left, right)
        return total, rounding(total, dtype) + accumulation(n, total, length)

    def cast(left: Array, right: Array) -> Array:
        """Returns what casting one adapter in `left @ right` costs: rule 3."""
        return u * independent(left, right)

    z, z_error = product(x, a.T, n_in)
    z_error = z_error + cast(x, a.T)
    lora, lora_error = product(z, b.T, rank)
    lora_error = lora_error + independent(z_error, b.T) + cast(z, b.T)
    base, base_error = product(x, w.T, n_in)
    if bias is not None:  # the product may be stored with the bias added, and the bias taken off
        base_error = base_error + rounding(base + fp64(bias), dtype) + 2 * _u32(base, fp64(bias))

    row_norm = oracle.norm(weight, lora_a, lora_b, scale)
    norm_error = norm(weight, lora_a, lora_b, scale)
    g = oracle.magnitude_scale(m, row_norm, dtype)
    g_error = magnitude_scale(m, row_norm, dtype, norm_error)
    inner = base + scale * lora
    inner_error = base_error + scale * lora_error + 2 * _u32(base, scale * lora)
    y_error = compose(base, lora, g, scale, dtype) + abs(g) * inner_error + g_error * abs(inner)
    if bias is not None:  # one more sum, to a result that may be smaller than either operand
        y_error = y_error + rounding(g * inner + fp64(bias), dtype) + _u32(fp64(bias))

    relative_g = g_error / abs(g).clip(UNDERFLOW["float32"])
    d_base = g * dy
    d_lora = d_base * scale
    d_base_error = rounding(d_base, dtype) + 3 * _u32(d_base) + relative_g * abs(d_base)
    d_lora_error = rounding(d_lora, dtype) + 3 * _u32(d_lora) + relative_g * abs(d_lora)
    dz, dz_error = product(d_lora, b, n_out)
    dz_error = dz_error + independent(d_lora_error, b) + cast(d_lora, b)
    dx_base, dx_base_error = product(d_base, w, n_out)
    dx_lora, dx_lora_error = product(dz, a, rank)
    dx_error = dx_base_error + independent(d_base_error, w) + dx_lora_error
    dx_error = dx_error + independent(dz_error, a) + cast(dz, a)
    dx_error = dx_error + rounding(dx_base + dx_lora, dtype)
    _, d_a_error = product(dz.T, x, rows)
    _, d_b_error = product(d_lora.T, z, rows)

    # What dm divides by may be off by the norm's error, relative to max(norm, eps).
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
        d_magnitude=d_m_error + rounding(d_g / floor, dtype) + 3 * _u32(d_g / floor),
        d_bias=rounding(dy.sum(0), dtype) + accumulation(rows, dy.sum(0), (dy**2).sum(0) ** 0.5),
        relative_g=relative_g,
    )
