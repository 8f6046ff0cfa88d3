"""The factored norm of an adapted kernel, and g, the magnitude divided by the norm.

With kernel W [in, out], lora_a A [in, r], lora_b B [r, out] and scale s, per output feature
(arXiv 2603.22276, section 3; Σ_in sums over input features, Σ_r over the rank):

    ‖W + sAB‖² = Σ_in W² + 2s Σ_r B∘(AᵀW) + s² Σ_r B∘(AᵀA B)

The product AB is never formed: the largest temporary is AᵀW, [r, out].

All sums accumulate in fp32 (fp64 for fp64 operands). The products of two bf16 or two fp16 numbers
are exact in fp32, so such operands are passed to the tensor cores unchanged. For a product of fp32
and bf16, the fp32 operand is split into three bf16 pieces that add up to it, so that these products
are exact too.

For a quantised kernel, XLA dequantises W in blocks of rows:

    ‖W + sAB‖² = Σ_blocks Σ_rows (W + s·A B)²

The temporaries are a block of W, the same rows of A B, and their sum, each of at most
`BLOCK_ELEMENTS` elements (or one row); a W that is not larger is a single block. All terms are
squares, so the sum needs no clamp at 0.
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_dora.ops import check, quantised, row_scaled
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype
from jax_dora.ops.mosaic.norm import one_pass_norm as kernel_norm
from jax_dora.ops.mosaic.norm import quantised_norm as kernel_quantised_norm
from jax_dora.ops.mosaic.norm import stationary_norm, transposing_norm
from jax_dora.ops.mosaic.norm.one_pass_norm import cut
from jax_dora.ops.operands import AdaptedKernel, NormSettings
from jax_dora.ops.saved_codes import save_codes
from jax_dora.ops.triton import triton_norm, triton_quantised_norm

BLOCK_ELEMENTS = 1 << 20
EPS_FULL = 1e-12
EPS_HALF = 1e-6


def factored_norm(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Returns ‖kernel + scale · lora_a @ lora_b‖ per output feature, without forming the product.

    Args:
      kernel: [in, out], fp16, bf16, fp32 or fp64; or a `qwix.QArray` in one of
        `jax_dora.ops.quantised.FORMATS`, which is dequantised in blocks of at most 2^20 elements
        (a row, if it has more), or by the kernels tile by tile, without temporaries.
      lora_a: [in, r].
      lora_b: [r, out].
      scale: a number, or a traced scalar. A Python 0 skips the adapter's terms.
      implementation: None, "mosaic" or "triton" (one pass over the kernel, without temporaries),
        "xla" or "eager" (with temporaries of about 8 · r · out bytes); a named one runs or raises.

    Returns:
      f32[out] (f64 if an operand is fp64). The norm is a constant for differentiation
      (arXiv 2402.09353, section 4.3). NaN in the operands gives NaN. The squares are fp32: a
      norm above 1.8e19 gives inf or NaN, and elements below 1.1e-19 count inexactly or not at all.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation does not support the call.
    """
    choose.check_name(implementation)
    check.adapter(kernel, lora_a, lora_b)
    operands = AdaptedKernel(kernel, lora_a, lora_b, check.scale_array(scale))
    scale_is_zero = not isinstance(scale, jax.Array) and bool(scale == 0)
    settings = NormSettings(implementation, scale_is_zero)

    def norm(operands: AdaptedKernel) -> jax.Array:
        return primitive.call(NORM, settings, operands)[0]

    return NORM.on_explicit_axes(norm, operands)(operands)


def norm_with_codes(
    kernel: Any, lora_a: jax.Array, lora_b: jax.Array, scale: ArrayLike
) -> tuple[jax.Array, jax.Array] | None:
    """Returns (`factored_norm`, the codes [out, in] of a quantised kernel) if a kernel computes
    both in one pass; else None. `jax.checkpoint` transposes the codes again instead of keeping
    them."""
    operands = AdaptedKernel(kernel, lora_a, lora_b, check.scale_array(scale))
    adapter = _common_dtype(lora_a, lora_b)
    call = (*kernel.shape[:1], lora_a.shape[1], *kernel.shape[1:])
    call = (*call, quantised.format_of(kernel), adapter)
    if not isinstance(scale, jax.Array) and scale == 0:  # The adapter's terms are skipped.
        return None
    if meshes.explicit(kernel.qvalue) is not None:
        return None
    if choose.choose("factored_norm", None, (transposing_norm, call), optional=True) is None:
        return None
    norm, codes = primitive.call(NORM, NormSettings(None, want_codes=True), operands)
    return norm, save_codes(codes, lax.stop_gradient(kernel.qvalue))


def _common_dtype(lora_a: jax.Array, lora_b: jax.Array) -> Any:
    """Returns the dtype in which the kernels take an adapter, and no number is rounded."""
    same = lora_a.dtype == lora_b.dtype
    return lora_a.dtype if same else accumulation_dtype(lora_a.dtype, lora_b.dtype)


def norm_implementation(implementation: str | None) -> str | None:
    """Returns the norm's implementation in a layer with the given one: "xla" and "eager" use no
    kernel for it either, and "mosaic" and "triton" concern only the projection."""
    return "xla" if implementation in choose.PLAIN else None


def _run(settings: NormSettings, shard: Shard, operands: AdaptedKernel) -> tuple[Any, Any]:
    """Returns (the norm, the transposed codes or None)."""
    kernel, lora_a, lora_b, scale = operands
    implementation = settings.implementation
    if settings.scale_is_zero and implementation is None:
        implementation = "xla"
    (in_features, out), rank = kernel.shape, lora_a.shape[1]
    is_quantised = quantised.is_quantised(kernel)
    stored = quantised.format_of(kernel) if is_quantised else kernel.dtype
    adapter = _common_dtype(lora_a, lora_b)
    kernels = candidates(in_features, rank, out, stored, adapter)
    if settings.want_codes:
        kernels.insert(0, (transposing_norm, kernels[0][1]))
    choice, codes = choose.choose("factored_norm", implementation, *kernels), None
    if choice is not None:
        arrays = jax.tree.leaves(kernel)
        squared = choice.launch(*arrays, lora_a.astype(adapter), lora_b.astype(adapter), scale)
        if choice.kernel is transposing_norm:
            squared, codes = squared
        norm = jnp.sqrt(shard.sum(squared))
    else:
        define = _define_quantised if is_quantised else _define
        norm = define(shard, settings.scale_is_zero, operands)
    if settings.want_codes and codes is None:
        codes = row_scaled.transposed(kernel.qvalue)
    return norm, codes


def candidates(
    in_features: int, rank: int, out: int, stored: Any, adapter_dtype: Any
) -> list[tuple[ModuleType, tuple[Any, ...]]]:
    """Returns the (kernel, call) pairs of a norm for `choose.choose`, the fastest first. `stored`
    is the kernel's dtype, or its `Format` if it is quantised."""
    is_quantised = isinstance(stored, quantised.Format)
    kernels = (stationary_norm, kernel_norm, triton_norm)
    if is_quantised:
        kernels = (stationary_norm, kernel_quantised_norm, triton_quantised_norm)
    call = (in_features, rank, out, stored, adapter_dtype)
    return [(kernel, call) for kernel in kernels]


def _for_types(settings: NormSettings) -> NormSettings:
    return settings._replace(scale_is_zero=True)


NORM = Op(
    "norm",
    _run,
    AdaptedKernel("i o", "i r", "r o", ""),
    ("o", "o i"),
    contracted="i",
    for_types=_for_types,
    is_constant=True,
)


# The norm must have the same bits when computed alone, to initialise a magnitude, and inside a
# model's program: only then is g = magnitude / norm exactly 1 for a new adapter. So it is jitted,
# and its last barrier keeps XLA from fusing later operations, such as this division, into it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _define(shard: Shard, scale_is_zero: bool, operands: AdaptedKernel) -> jax.Array:
    kernel, lora_a, lora_b, scale = operands
    dtype = accumulation_dtype(kernel.dtype, lora_a.dtype, lora_b.dtype)
    terms = [
        jnp.sum(jnp.square(kernel.astype(accumulation_dtype(kernel.dtype))), axis=0).astype(dtype)
    ]
    if not scale_is_zero:
        b, gram = lora_b.astype(dtype), _exact_dot(lora_a, lora_a)
        terms.append(jnp.sum(b * _exact_dot(lora_a, kernel).astype(dtype), axis=0))
        terms.append(jnp.sum(b * _exact_dot(gram, lora_b).astype(dtype), axis=0))
    # This barrier makes XLA compile each reduction the same way in every program.
    squared, *added = lax.optimization_barrier(terms)
    if added:
        s = scale.astype(dtype)
        squared = squared + (2 * s * added[0] + s * s * added[1])
    # jnp.maximum propagates NaN, unlike jnp.where with a comparison.
    return lax.optimization_barrier(jnp.sqrt(jnp.maximum(shard.sum(squared), 0)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _define_quantised(shard: Shard, scale_is_zero: bool, operands: AdaptedKernel) -> jax.Array:
    kernel, lora_a, lora_b, scale = lax.optimization_barrier(operands)
    dtype = accumulation_dtype(kernel.scale.dtype, lora_a.dtype, lora_b.dtype)
    in_features, out = kernel.shape
    count = quantised.rows_per_block(kernel, BLOCK_ELEMENTS)
    s = scale.astype(dtype)

    def squared_norm(start: Any, count: int) -> jax.Array:
        block = quantised.dequantise(quantised.slice_rows(kernel, start, count), dtype)
        if not scale_is_zero:
            a, b = lax.dynamic_slice_in_dim(lora_a, start, count), lora_b
            if a.dtype != b.dtype or a.dtype.itemsize != 2:
                a, b = a.astype(dtype), b.astype(dtype)
            block = block + s * _dot(a, b, dtype, axes=(1, 0))
        return jnp.sum(jnp.square(block), axis=0)

    def step(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return total + squared_norm(number * count, count), None

    blocks = in_features // count
    total, _ = lax.scan(step, jnp.zeros(out, dtype), jnp.arange(blocks, dtype=jnp.int32))
    if remaining := in_features - blocks * count:
        total = total + squared_norm(blocks * count, remaining)
    return lax.optimization_barrier(jnp.sqrt(shard.sum(total)))


def magnitude_scale(
    magnitude: jax.Array, norm: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns g = magnitude / max(norm, eps), with one fp32 number per output feature.

    Args:
      magnitude: [out], any float dtype.
      norm: f32[out] from `factored_norm`; a constant for differentiation.
      dtype: the dtype of the layer's result. eps is 1e-6 for bf16 and fp16, else 1e-12.

    Returns:
      f32[out] (f64 if `dtype` is fp64), with dg/dmagnitude = 1 / max(norm, eps). A zero norm gives
      a finite g; NaN gives NaN.

    Raises:
      TypeError, ValueError: a dtype is not a float dtype, or the shapes differ.
    """
    check.is_float("magnitude", magnitude)
    check.is_float("norm", norm)
    check.has_shape("magnitude", magnitude, (None,), "[out]")
    check.has_shape("norm", norm, magnitude.shape, "[out]")
    check.is_float_dtype("dtype", dtype)
    return ratio(magnitude, norm, dtype)


def ratio(magnitude: jax.Array, norm: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `magnitude_scale` without checks, for arrays of any shape."""
    result = accumulation_dtype(dtype)
    norm = jnp.maximum(lax.stop_gradient(norm).astype(result), epsilon(dtype))
    return magnitude.astype(result) / norm


def epsilon(dtype: jax.typing.DTypeLike) -> float:
    """Returns the smallest number that the magnitude is divided by, for a result of `dtype`."""
    return EPS_HALF if jnp.dtype(dtype).itemsize == 2 else EPS_FULL


def _exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns aᵀ b, with products that are exact in the accumulator's dtype."""
    dtype = accumulation_dtype(a.dtype, b.dtype)
    if {a.dtype, b.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        # A bf16 array is one piece; three bf16 pieces of 8 bits each add up to fp32.
        a_pieces, b_pieces = (cut(x, 1 if x.dtype == jnp.bfloat16 else 3) for x in (a, b))
        product = _dot(jnp.concatenate(a_pieces, 1), jnp.concatenate(b_pieces, 1), dtype)
        blocks = product.reshape(len(a_pieces), a.shape[1], len(b_pieces), b.shape[1])
        return blocks.sum(axis=(0, 2))
    if a.dtype == b.dtype and a.dtype.itemsize == 2:
        return _dot(a, b, dtype)
    return _dot(a.astype(dtype), b.astype(dtype), dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype, axes: tuple[int, int] = (0, 0)) -> jax.Array:
    numbers = ((axes[:1], axes[1:]), ((), ()))
    highest = lax.Precision.HIGHEST
    return lax.dot_general(a, b, numbers, precision=highest, preferred_element_type=dtype)
