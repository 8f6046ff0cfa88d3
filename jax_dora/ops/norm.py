"""The factored norm of an adapted kernel, and the scale g that it makes of the magnitude.

With kernel W [in, out], lora_a A [in, r], lora_b B [r, out] and scale s, per output feature
(arXiv 2603.22276, section 3; sums over the axis that is named):

    ‖W + sAB‖² = Σ_in W² + 2s Σ_r B∘(AᵀW) + s² Σ_r B∘(AᵀA B)

The product AB is never formed: the largest temporary is AᵀW, [r, out].

Everything accumulates in fp32 (fp64 for fp64 operands). bf16 × bf16 and fp16 × fp16 products are
exact in fp32, so those operands go to the tensor cores as they are. An fp32 operand beside a bf16
one is split into three bf16 pieces that add up to it, which keeps its products exact too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_dora.ops import check, device, dispatch, tuning
from jax_dora.ops import mesh as meshes
from jax_dora.ops.mosaic import norm as mosaic_norm

CHUNK_ALIGNMENT = 64

EPS_FULL = 1e-12
EPS_HALF = 1e-6


def factored_norm(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: ArrayLike,
    *,
    kernel_sq_norm: jax.Array | None = None,
    chunk_bytes: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """‖kernel + scale · lora_a @ lora_b‖ per output feature, without forming the product.

    Args:
      kernel: [in, out], fp16, bf16, fp32 or fp64.
      lora_a: [in, r].
      lora_b: [r, out].
      scale: a number, or a traced scalar. A Python 0 skips the adapter's terms.
      kernel_sq_norm: f32[out], `squared_norm(kernel)` computed earlier; saves one pass over
        the kernel while it is frozen, and changes no bit of the result.
      chunk_bytes: bound on the temporaries, in bytes: the norm is taken over blocks of output
        features, one after the other. None takes all of them at once, with temporaries of
        about 8 · r · out bytes; leave it so where the kernel is sharded.
      implementation: None, "mosaic" (one pass over the kernel, with no temporaries, to which
        `kernel_sq_norm` and `chunk_bytes` make no difference) or "xla"; a named one runs or raises.

    Returns:
      f32[out] (f64 if an operand is fp64). No gradient flows through it (arXiv 2402.09353,
      section 4.3). A NaN in the operands stays a NaN.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit, `chunk_bytes` is too small
        for one output feature, or the implementation is unknown.
      NotImplementedError: the named implementation cannot take the call.
    """
    dispatch.check_name(implementation)
    check.adapter(kernel, lora_a, lora_b)
    out_features = kernel.shape[1]
    if kernel_sq_norm is not None:
        check.is_float("kernel_sq_norm", kernel_sq_norm)
        check.has_shape("kernel_sq_norm", kernel_sq_norm, (out_features,), "[out]")
    checked = check.scale_array(scale)
    if not isinstance(chunk_bytes, int | None) or isinstance(chunk_bytes, bool):
        raise TypeError(
            f"chunk_bytes is {chunk_bytes!r}; expected a whole number of bytes, or None"
        )
    is_zero = not isinstance(scale, jax.Array) and bool(scale == 0)
    operands = jax.tree.map(lax.stop_gradient, (kernel, lora_a, lora_b, checked, kernel_sq_norm))
    mesh = meshes.explicit(kernel)
    if mesh is None:
        return _norm(chunk_bytes, implementation, is_zero, (), *operands)
    of_in, columns = meshes.spec(kernel)
    static = (chunk_bytes, implementation, is_zero, meshes.names(of_in))
    vector = jax.P(columns)
    specs = (jax.P(of_in, columns), jax.P(of_in, None), jax.P(None, columns), jax.P(), vector)
    return meshes.per_device(_norm, static, mesh, specs, vector, *operands)


def _norm(
    chunk_bytes: int | None,
    implementation: str | None,
    is_zero: bool,
    summed: tuple[str, ...],
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    kernel_sq_norm: jax.Array | None,
) -> jax.Array:
    """Of detached operands, whose inputs are sharded over the axes `summed`; the scale may be known
    to be zero."""
    in_features, out_features = kernel.shape
    skips = is_zero and implementation != "mosaic"
    chosen = "xla" if skips else _choose(kernel, lora_a, implementation, summed)
    if chosen == "mosaic":
        target = device.target()
        dtypes = kernel.dtype, lora_a.dtype
        config = tuning.config(
            target.device_kind,
            "norm",
            _sizes(kernel, lora_a),
            lambda config: mosaic_norm.fits(config, lora_a.shape[1], *dtypes),
        )
        kernel = dispatch.on_cuda(kernel, target)
        sm_count = device.sm_count()
        return mosaic_norm.norm(kernel, lora_a, lora_b, scale, sm_count=sm_count, config=config)
    if kernel_sq_norm is None:
        kernel_sq_norm = _squared_norm(summed, kernel)
    dtype = _accumulator(kernel, lora_a, lora_b)
    base_sq = kernel_sq_norm.astype(dtype)
    if skips:
        return jnp.sqrt(base_sq)

    width = None
    if chunk_bytes is not None:
        per_feature = _bytes_per_feature(in_features, lora_a.shape[1], dtype)
        width = min(_chunk_width(chunk_bytes, per_feature), out_features)
    return _assemble(width, summed, kernel, lora_a, lora_b, base_sq, scale.astype(dtype))


# Compiled as one program, and closed by a barrier so that nothing after it (the division that
# makes g) is fused into it: the same bits whether a norm is taken alone, for a fresh adapter's
# magnitude, or inside a whole model's program. A fresh adapter's g is 1 by this.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _assemble(
    width: int | None,
    summed: tuple[str, ...],
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    base_sq: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    correction = functools.partial(_correction, lora_a, _gram(lora_a), scale)
    if width is None:
        added = correction(kernel, lora_b)
    else:
        added = _in_chunks(correction, kernel, lora_b, width)
    added = _sum_over(summed, added)
    # maximum, unlike a comparison, keeps NaN.
    return lax.optimization_barrier(jnp.sqrt(jnp.maximum(base_sq + added, 0)))


def of_layer(implementation: str | None) -> str | None:
    """By what a layer's norm is taken whose `implementation` is this: "xla" takes no kernel, a
    kernel of the projection names none for the norm."""
    return "xla" if implementation == "xla" else None


def squared_norm(kernel: jax.Array) -> jax.Array:
    """Σ_in kernel² per output feature: f32[out] of a kernel [in, out], detached."""
    check.is_float("kernel", kernel)
    check.has_shape("kernel", kernel, (None, None), "[in, out]")
    kernel = lax.stop_gradient(kernel)
    mesh = meshes.explicit(kernel)
    if mesh is None:
        return _squared_norm((), kernel)
    of_in, columns = meshes.spec(kernel)
    static, specs = (meshes.names(of_in),), (jax.P(of_in, columns),)
    return meshes.per_device(_squared_norm, static, mesh, specs, jax.P(columns), kernel)


def _squared_norm(summed: tuple[str, ...], kernel: jax.Array) -> jax.Array:
    return _sum_over(summed, _sum_of_squares(kernel))


def _sum_over(axes: tuple[str, ...], partial: jax.Array) -> jax.Array:
    return lax.psum(partial, axes) if axes else partial


# The barrier gives this reduction one form, whatever program it is a part of, so that a squared
# norm kept from earlier equals one computed in place bit for bit.
@jax.jit
def _sum_of_squares(kernel: jax.Array) -> jax.Array:
    squares = jnp.sum(jnp.square(kernel.astype(_accumulator(kernel))), axis=0)
    return lax.optimization_barrier(squares)


def magnitude_scale(
    magnitude: jax.Array, norm: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """g = magnitude / max(norm, eps): one number per output feature, in fp32.

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
    dtype = jnp.dtype(dtype)
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype is {dtype}; expected float16, bfloat16, float32 or float64")
    result = jnp.float64 if dtype == jnp.float64 else jnp.float32
    eps = EPS_HALF if dtype.itemsize == 2 else EPS_FULL
    return magnitude.astype(result) / jnp.maximum(lax.stop_gradient(norm).astype(result), eps)


def _choose(
    kernel: jax.Array, lora_a: jax.Array, implementation: str | None, summed: tuple[str, ...]
) -> str:
    target = device.target()
    fits = dispatch.runs_mosaic(target)
    (in_features, out), rank = kernel.shape, lora_a.shape[1]
    refusal = mosaic_norm.refuses(in_features, rank, out, kernel.dtype, lora_a.dtype)
    if summed:
        refusal = f"the kernel's inputs are sharded over {', '.join(summed)}, and it takes them all"
    mosaic = dispatch.Option(
        "mosaic",
        fits.refusal or refusal,
        fits.slower or tuning.slower(target.device_kind, "norm", _sizes(kernel, lora_a)),
    )
    return dispatch.choose("factored_norm", implementation, (mosaic, dispatch.Option("xla")))


def _sizes(kernel: jax.Array, lora_a: jax.Array) -> dict[str, int]:
    return {"in": kernel.shape[0], "rank": lora_a.shape[1], "out": kernel.shape[1]}


def _correction(
    lora_a: jax.Array, gram: jax.Array, scale: jax.Array, kernel: jax.Array, lora_b: jax.Array
) -> jax.Array:
    """2s Σ_r B∘(AᵀW) + s² Σ_r B∘(AᵀA B), [out]."""
    b = lora_b.astype(gram.dtype)
    cross = jnp.sum(b * _exact_dot(lora_a, kernel), axis=0)
    ba_sq = jnp.sum(b * _exact_dot(gram, lora_b), axis=0)
    # As in `squared_norm`: the same bits in every program, so that a fresh adapter's g is 1.
    cross, ba_sq = lax.optimization_barrier((cross, ba_sq))
    return 2 * scale * cross + scale * scale * ba_sq


def _gram(lora_a: jax.Array) -> jax.Array:
    return _exact_dot(lora_a, lora_a)


def _exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """aᵀ b over the first axis of both, with products exact in the accumulator's dtype."""
    dtype = _accumulator(a, b)
    if jnp.bfloat16 in (a.dtype, b.dtype) and dtype == jnp.float32 and a.dtype != b.dtype:
        if jnp.float32 in (a.dtype, b.dtype):
            a_pieces, b_pieces = _bf16_pieces(a), _bf16_pieces(b)
            product = _dot(jnp.concatenate(a_pieces, 1), jnp.concatenate(b_pieces, 1), dtype)
            blocks = product.reshape(len(a_pieces), a.shape[1], len(b_pieces), b.shape[1])
            return blocks.sum(axis=(0, 2))
    if a.dtype == b.dtype and a.dtype.itemsize == 2:
        return _dot(a, b, dtype)
    return _dot(a.astype(dtype), b.astype(dtype), dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _bf16_pieces(x: jax.Array) -> list[jax.Array]:
    """bf16 arrays that add up to x: x itself, or three pieces of 8 bits each for fp32."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(3):
        # reduce_precision rather than a cast there and back, which XLA may drop.
        piece = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return pieces


def _accumulator(*arrays: jax.Array) -> jnp.dtype:
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def _bytes_per_feature(in_features: int, rank: int, dtype: jnp.dtype) -> int:
    # A column of the kernel, which some backends widen for the product, the split products of
    # that column, and a column of AᵀA B.
    return dtype.itemsize * (in_features + 5 * rank)


def _chunk_width(chunk_bytes: int, per_feature: int) -> int:
    width = chunk_bytes // per_feature
    if width < 1:
        raise ValueError(
            f"chunk_bytes is {chunk_bytes}; one output feature of this layer needs {per_feature} "
            "bytes: give at least that, or None for no bound"
        )
    return width - width % CHUNK_ALIGNMENT if width >= CHUNK_ALIGNMENT else width


def _in_chunks(correction, kernel: jax.Array, lora_b: jax.Array, width: int) -> jax.Array:
    out_features = kernel.shape[1]
    if width >= out_features:
        return correction(kernel, lora_b)
    whole = out_features // width

    def one(start):
        return correction(
            lax.dynamic_slice_in_dim(kernel, start, width, 1),
            lax.dynamic_slice_in_dim(lora_b, start, width, 1),
        )

    parts = [lax.map(one, jnp.arange(whole) * width).reshape(-1)]
    if whole * width < out_features:
        parts.append(correction(kernel[:, whole * width :], lora_b[:, whole * width :]))
    return jnp.concatenate(parts)
