"""The rules for rounding and sums that every bound is built from.

Notation: `u` is the unit roundoff of the compute dtype (the dtype of activations and results),
`u32` that of fp32. An error is bounded where it arises, by five rules:

1. *Storing* a value `v` in a dtype costs at most `u|v|` (round to nearest), plus half the spacing
   of subnormal numbers.
2. *Elementwise fp32 arithmetic* of k operations costs at most `k·u32` times the magnitudes of its
   operands.
3. *Independent* errors bounded by `e_i` add up to at most `SIGMAS · sqrt(Σ e_i²)`. Rounding errors
   of `v` are uniform in ±u|v|, with a variance of at most `e²/3`, so SIGMAS = 4 means 6.9 standard
   deviations: one violation in 10¹¹ elements, while the largest case has 3·10⁸. (Hoeffding's
   inequality gives the same form without assuming uniformity.)
4. *Accumulating* n products in fp32 rounds the partial sums. Every implementation here (tensor
   cores, BLAS lanes, XLA's and Triton's reductions) adds at least `BLOCK` = 16 products before the
   next sequential step. So there are K = max(1, n/16) steps, each on a partial sum of magnitude at
   most about `|Σ| + ‖terms‖₂`. Errors of rounding to nearest add up like sqrt(K) by rule 3.
   Hopper's tensor cores truncate, which is biased and adds up like K. Error:
   `u32 · (SIGMAS·sqrt(K) + K) · (|Σ| + ‖terms‖₂)`. Products of two bf16 or two fp16 numbers are
   exact in fp32 (8 + 8 and 11 + 11 of 24 bits).
5. *FP8 tensor cores* of Hopper add 32 products at a time, and keep 13 bits below the largest number
   of a sum, around 14 in all (DeepSeek-V3's technical report, arXiv 2412.19437, section 3.3.2).
   That truncates, like rule 4, in K = max(1, n/32) steps: `2⁻¹³·K·(|Σ| + ‖terms‖₂)`.
"""

from parity.oracle import Array, dtype_name, fp64

# With p significant bits, u = 2^-p.
UNIT_ROUNDOFF = {
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}
U32 = UNIT_ROUNDOFF["float32"]
# Half the spacing of the smallest numbers. Subnormal fp8 and fp16 numbers occur in practice. In the
# other dtypes they do not, but XLA and Triton may flush subnormals to zero, so there the value is
# the smallest normal number.
UNDERFLOW = {
    "float8_e4m3fn": 2.0**-10,
    "float8_e5m2": 2.0**-17,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-25,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}

LARGEST_FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57_344.0}

SIGMAS = 4.0
BLOCK = 16
FP8_BLOCK, FP8_SUM = 32, 2.0**-13
# How far an fp32 quotient of a row's element and scale may be off, relatively: a GPU's by two
# units, and that of a rounded scale by one more.
FP8_QUOTIENT = 2.0**-21

# Triton's interpreter truncates fp32 to bf16, while the GPU rounds to nearest: an error of up to a
# full spacing, twice as large.
TRITON_INTERPRETER_BF16 = 2.0


def unit_roundoff(dtype) -> float:
    return UNIT_ROUNDOFF[dtype_name(dtype)]


def rounding(value, dtype) -> Array:
    """Returns the cost of storing `value` in `dtype`: rule 1."""
    return unit_roundoff(dtype) * abs(fp64(value)) + UNDERFLOW[dtype_name(dtype)]


def accumulation(n: int, total, terms_norm) -> Array:
    """Returns the cost of summing n terms with 2-norm `terms_norm` to `total` in fp32: rule 4."""
    steps = max(1.0, n / BLOCK)
    factor = U32 * (SIGMAS * steps**0.5 + steps)
    return factor * (abs(fp64(total)) + fp64(terms_norm))


def fp8_product(a: Array, b: Array) -> Array:
    """Returns the cost of the sums of `a @ b` on FP8 tensor cores: rule 5."""
    steps = max(1.0, a.shape[-1] / FP8_BLOCK)
    return FP8_SUM * steps * (abs(a @ b) + two_norm_of_products(a, b))


def two_norm_of_products(a: Array, b: Array) -> Array:
    """Returns `sqrt(Σ_k a_ik² b_kj²)`, the 2-norm of the terms of every element of `a @ b`."""
    return ((a * a) @ (b * b)) ** 0.5


def product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns `a @ b` and the cost of its fp32 sums: rule 4."""
    total = a @ b
    return total, accumulation(a.shape[-1], total, two_norm_of_products(a, b))


def independent(a: Array, b: Array) -> Array:
    """Returns the bound on `a @ b` for independent errors of at most `a`: rule 3 for a product."""
    return SIGMAS * two_norm_of_products(a, b)


def flash_rule(plain_error: float, reference_peak: float, dtype, floor: float = 0.0) -> float:
    """Returns the bound of flash-attention's rule: error(kernel) ≤ 2 · error(same computation, same
    dtype, plain ops) + rounding floor.

    Both errors are peaks of the absolute difference from fp64. The rounding floor is the final
    rounding of the largest element, `u · max|reference|`: a plain result that happens to be exact
    must not forbid the last rounding. `floor` is added for errors that the plain computation does
    not have (the factored norm's cancellation).
    """
    return 2.0 * plain_error + unit_roundoff(dtype) * reference_peak + floor


def in_fp32(*operands: Array) -> Array:
    """Returns the cost of one fp32 operation on these operands: rule 2."""
    return U32 * sum(abs(value) for value in operands)
