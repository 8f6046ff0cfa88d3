"""The factored norm of an adapted kernel, and the scale g that it makes of the magnitude.

With kernel W [in, out], lora_a A [in, r], lora_b B [r, out] and scale s, per output feature
(arXiv 2603.22276, section 3; sums over the axis that is named):

    ‖W + sAB‖² = Σ_in W² + 2s Σ_r B∘(AᵀW) + s² Σ_r B∘(AᵀA B)

The product AB is never formed: the largest temporary is AᵀW, [r, out].

Everything accumulates in fp32 (fp64 for fp64 operands). bf16 × bf16 and fp16 × fp16 products are
exact in fp32, so those operands go to the tensor cores as they are. An fp32 operand beside a bf16
one is split into three bf16 pieces that add up to it, which keeps its products exact too.

Of a quantised kernel XLA takes block by block of W's rows, dequantised:

    ‖W + sAB‖² = Σ_blocks Σ_rows (W + s·A B)²

A block, its share of A B and their sum are all there is, `BLOCK_ELEMENTS` each. Nothing cancels, so
there is no clamp.
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_dora.ops import check, choose, primitive, quantised
from jax_dora.ops import mesh as meshes
from jax_dora.ops.compose import accumulator
from jax_dora.ops.mosaic import norm as kernel_norm
from jax_dora.ops.mosaic import quantised_norm as kernel_quantised_norm
from jax_dora.ops.mosaic import stationary_norm
from jax_dora.ops.mosaic.norm import cut
from jax_dora.ops.operands import Adapted, Static
from jax_dora.ops.shard import Op, Shard

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
        `jax_dora.ops.quantised.FORMATS`, which is read block by block: no [in, out] array of floats
        is made of it.
      lora_a: [in, r].
      lora_b: [r, out].
      scale: a number, or a traced scalar. A Python 0 skips the adapter's terms.
      implementation: None, "mosaic" (one pass over the kernel, with no temporaries), "xla" or
        "eager" (with temporaries of about 8 · r · out bytes); a named one runs or raises.

    Returns:
      f32[out] (f64 if an operand is fp64). No gradient flows through it (arXiv 2402.09353,
      section 4.3). A NaN in the operands stays a NaN.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit, or the implementation is
        unknown.
      NotImplementedError: the named implementation cannot take the call.
    """
    choose.check_name(implementation)
    check.adapter(kernel, lora_a, lora_b)
    operands = Adapted(kernel, lora_a, lora_b, check.scale_array(scale))
    operands = jax.tree.map(lax.stop_gradient, operands)
    is_zero = not isinstance(scale, jax.Array) and bool(scale == 0)
    static = Static("factored_norm", implementation, is_zero=is_zero)
    function = functools.partial(_norm, static)
    stored = quantised.stored(kernel)
    if mesh := meshes.explicit(stored):
        function = meshes.left_to_xla(function, mesh, jax.P(meshes.spec(stored)[1]))
    return function(operands)


def norm_implementation(implementation: str | None) -> str | None:
    """Returns the implementation of the norm in a layer whose own is given: "xla" and "eager" take
    no kernel; "mosaic" names a kernel of the projection, and leaves the norm to the best that
    accepts it."""
    return "xla" if implementation in choose.PLAIN else None


def _norm(static: Static, operands: Adapted) -> jax.Array:
    return primitive.call(NORM, static, operands)[0]


def _run(static: Static, shard: Shard, operands: Adapted) -> tuple[jax.Array]:
    kernel, lora_a, lora_b, scale = operands
    implementation = static.implementation
    if static.is_zero and implementation is None:
        implementation = "xla"
    (in_features, out), rank = kernel.shape, lora_a.shape[1]
    is_quantised = quantised.is_quantised(kernel)
    stored = quantised.format_of(kernel) if is_quantised else kernel.dtype
    kernels = candidates(in_features, rank, out, stored, lora_a.dtype)
    choice = choose.choose(static.op, implementation, *kernels)
    if choice is not None:
        arrays = jax.tree.leaves(kernel)
        squared = choice.kernel.launch(*arrays, lora_a, lora_b, scale, **choice.knobs)
        return (jnp.sqrt(shard.sum(squared)),)
    define = _define_quantised if is_quantised else _define
    return (define(shard, static.is_zero, operands),)


def candidates(
    in_features: int, rank: int, out: int, stored: Any, adapter_dtype: Any
) -> list[tuple[ModuleType, tuple[Any, ...]]]:
    """Returns the kernels for a norm, the fastest first, each with its call.

    Args:
      stored: the kernel's dtype, or its `Format` if it is quantised.
    """
    is_quantised = isinstance(stored, quantised.Format)
    other = kernel_quantised_norm if is_quantised else kernel_norm
    call = (in_features, rank, out, stored, adapter_dtype)
    return [(kernel, call) for kernel in (stationary_norm, other)]


NORM = Op("norm", _run, Adapted("i o", "i r", "r o", ""), ("o",), contracted="i")


# Compiled as one program, and closed by a barrier so that nothing after it (the division that
# makes g) is fused into it: the same bits whether a norm is taken alone, for a fresh adapter's
# magnitude, or inside a whole model's program. A fresh adapter's g is 1 by this.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _define(shard: Shard, is_zero: bool, operands: Adapted) -> jax.Array:
    kernel, lora_a, lora_b, scale = operands
    dtype = accumulator(kernel.dtype, lora_a.dtype, lora_b.dtype)
    terms = [jnp.sum(jnp.square(kernel.astype(accumulator(kernel.dtype))), axis=0).astype(dtype)]
    if not is_zero:
        b, gram = lora_b.astype(dtype), _exact_dot(lora_a, lora_a)
        terms.append(jnp.sum(b * _exact_dot(lora_a, kernel).astype(dtype), axis=0))
        terms.append(jnp.sum(b * _exact_dot(gram, lora_b).astype(dtype), axis=0))
    # Each reduction in one form, whatever program it is a part of.
    squared, *added = lax.optimization_barrier(terms)
    if added:
        s = scale.astype(dtype)
        squared = squared + (2 * s * added[0] + s * s * added[1])
    # maximum, unlike a comparison, keeps NaN.
    return lax.optimization_barrier(jnp.sqrt(jnp.maximum(shard.sum(squared), 0)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _define_quantised(shard: Shard, is_zero: bool, operands: Adapted) -> jax.Array:
    kernel, lora_a, lora_b, scale = lax.optimization_barrier(operands)
    dtype = accumulator(kernel.scale.dtype, lora_a.dtype, lora_b.dtype)
    in_features, out = kernel.shape
    count = quantised.rows_of_block(kernel, BLOCK_ELEMENTS)
    s = scale.astype(dtype)

    def of_rows(start: Any, count: int) -> jax.Array:
        block = quantised.dequantise(quantised.rows(kernel, start, count), dtype)
        if not is_zero:
            a, b = lax.dynamic_slice_in_dim(lora_a, start, count), lora_b
            if a.dtype != b.dtype or a.dtype.itemsize != 2:
                a, b = a.astype(dtype), b.astype(dtype)
            block = block + s * _dot(a, b, dtype, axes=(1, 0))
        return jnp.sum(jnp.square(block), axis=0)

    def step(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return total + of_rows(number * count, count), None

    blocks = in_features // count
    total, _ = lax.scan(step, jnp.zeros(out, dtype), jnp.arange(blocks, dtype=jnp.int32))
    if remaining := in_features - blocks * count:
        total = total + of_rows(blocks * count, remaining)
    return lax.optimization_barrier(jnp.sqrt(shard.sum(total)))


def magnitude_scale(
    magnitude: jax.Array, norm: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns g = magnitude / max(norm, eps): one number per output feature, in fp32.

    Args:
      magnitude: [out], any float dtype.
      norm: f32[out] from `factored_norm`; constant under differentiation.
      dtype: the dtype of the layer's result, which sets eps: 1e-6 for bf16 and fp16, else 1e-12.

    Returns:
      f32[out] (f64 where `dtype` is fp64); dg/dmagnitude = 1 / max(norm, eps). A zero norm gives
      a finite g, a NaN stays a NaN.

    Raises:
      TypeError, ValueError: a dtype is no float, or the two shapes differ.
    """
    check.is_float("magnitude", magnitude)
    check.is_float("norm", norm)
    check.has_shape("magnitude", magnitude, (None,), "[out]")
    check.has_shape("norm", norm, magnitude.shape, "[out]")
    check.is_float_dtype("dtype", dtype)
    return ratio(magnitude, norm, dtype)


def ratio(magnitude: jax.Array, norm: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `magnitude_scale` of arrays of any one shape, unchecked."""
    result = accumulator(dtype)
    norm = jnp.maximum(lax.stop_gradient(norm).astype(result), epsilon(dtype))
    return magnitude.astype(result) / norm


def epsilon(dtype: jax.typing.DTypeLike) -> float:
    """Returns the least number that the magnitude is divided by, for a result of `dtype`."""
    return EPS_HALF if jnp.dtype(dtype).itemsize == 2 else EPS_FULL


def _exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns aᵀ b over the first axis of both, with products exact in the accumulator's dtype."""
    dtype = accumulator(a.dtype, b.dtype)
    if {a.dtype, b.dtype} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        # bf16 is a piece itself; of fp32 three pieces of 8 bits each add up to it.
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
