"""An adapted projection on any mesh (arXiv 2603.22276, section 2).

    y = g∘(base + s·lora) + bias      base = xW      lora = xAB

`lora_linear` returns inner = base + s·lora.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_dora.ops import check, quantised, row_scaled
from jax_dora.ops import dropout as dropouts
from jax_dora.ops.compose import compose_delta
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dropout import Dropout, drop_for
from jax_dora.ops.dtypes import accumulation_dtype, dot_general, per_feature, static_precision
from jax_dora.ops.norm import factored_norm, magnitude_scale, norm_implementation
from jax_dora.ops.operands import Projection, ProjectionSettings
from jax_dora.ops.projection import INNER_NAME, RESULT_NAME, define, projection
from jax_dora.ops.projection_products import FORWARD
from jax_dora.ops.saved_norm import save_norm


def dora_linear(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    magnitude: jax.Array,
    scale: ArrayLike,
    *,
    bias: jax.Array | None = None,
    norm: jax.Array | None = None,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout: Dropout | None = None,
    keep_inner: bool | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
) -> jax.Array:
    """Returns magnitude ∘ x (kernel + scale·lora_a lora_b) / ‖kernel + scale·lora_a lora_b‖ + bias.

    Args:
      x: [..., in].
      kernel: [in, out], frozen; or a `qwix.QArray`, which is dequantised to x's dtype for each
        product and has no gradient.
      lora_a: [in, r].
      lora_b: [r, out].
      magnitude: [out].
      scale: alpha/r or alpha/sqrt(r).
      bias: [out]; never scaled.
      norm: f32[out], a precomputed `factored_norm` of the same kernel, lora_a, lora_b and scale. It
        is used without a check.
      implementation: None chooses the fastest that supports the call. A named one runs or raises:

        - "eager": the definition, differentiated by JAX: in forward and reverse mode, to any
          order. It keeps more arrays for the gradient than the others.
        - "xla": a custom gradient in reverse mode, without kernels of our own.
        - "mosaic": the custom gradient with the most fused Mosaic kernel that supports the call:
          the whole projection (for up to 64 rows the kernel for few rows), else expand and
          compose, else compose. The norm is computed as with None. With dropout, the kernels of
          lora_a's product and gradient also draw the mask where they support the call; x's
          gradient, and mode "input", use XLA.
        - "triton": the custom gradient with Triton's kernels, on NVIDIA GPUs since Ampere: expand
          and compose, else compose. The norm is computed as with None.
      precision: the precision of the matrix products with x, as in `jax.lax.dot_general`.
      dropout: the dropout of x, for training. Its mask is never stored in memory; see
        `jax_dora.ops.Dropout`.
      keep_inner: whether `jax.checkpoint` keeps the array that the magnitude's gradient reads: the
        result; with a bias or in fp16 x (kernel + scale·lora_a lora_b) [..., out]. With None it
        does so if it would otherwise compute the projection again for this gradient alone; see
        `saved_inner`. False never keeps it. True also gives it the name that
        `jax_dora.remat_policy()` keeps. Ignored for dropout in mode "input", where no such array
        exists.
      act_qtype: "float8_e4m3fn" (qwix's name) rounds x to this format for the product with the
        kernel, with one scale per row. The kernel must be a `QArray` of this format with scales
        [1, out]. The adapter's products and all gradients use the unrounded x. None rounds nothing.
      bwd_qtype: "float8_e4m3fn" or "float8_e5m2" (qwix's name) also rounds the gradient of the
        result, times g and the kernel's scales, for its product with the kernel, with one scale per
        row. The adapter's gradients use the unrounded one, as do all with None. It needs act_qtype.

    Returns:
      [..., out] in the dtype that x and kernel promote to (x's dtype for a quantised kernel).
      Adapters of a wider dtype are cast to this dtype for the products with activations, but not
      for the norm; their gradients have the adapters' dtype. The norm has the checkpoint name
      "dora_norm".

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation does not support the call; act_qtype is given
        and dropout has mode "input".
    """
    _check_operands(x, kernel, lora_a, lora_b, implementation, act_qtype, bwd_qtype)
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, kernel.shape[1:], "[out]")
    if norm is None:
        norm = save_norm(
            factored_norm(
                kernel, lora_a, lora_b, scale, implementation=norm_implementation(implementation)
            )
        )
    g = magnitude_scale(magnitude, norm, _dtype(x, kernel))
    return scaled_linear(
        x,
        kernel,
        lora_a,
        lora_b,
        g,
        scale,
        bias=bias,
        dropout=dropout,
        implementation=implementation,
        precision=precision,
        keep_inner=keep_inner,
        act_qtype=act_qtype,
        bwd_qtype=bwd_qtype,
    )


def scaled_linear(
    x: Any,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    g: Any,
    scale: ArrayLike,
    *,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    keep_inner: bool | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
    codes: jax.Array | None = None,
    of_inner: bool = False,
) -> jax.Array:
    """Returns g ∘ x (kernel + scale·lora_a lora_b) + bias: `dora_linear` with a given g [out] of
    any float dtype, or None for ones, or a pytree that returns g when it is called, which is traced
    once for equal calls. x may be its `row_scaled.RowScaled`, of act_qtype; `codes` are those of
    `norm_with_codes`, or None. With `of_inner`, without a bias, g is a constant, and the result's
    cotangent is that of the result divided by g."""
    _check_operands(
        row_scaled.plain(x), kernel, lora_a, lora_b, implementation, act_qtype, bwd_qtype
    )
    for name, vector in (("g", g), ("bias", bias)):
        if vector is not None and not callable(vector):
            check.is_float(name, vector)
            check.has_shape(name, vector, kernel.shape[1:], "[out]")
    dtype = _dtype(x, kernel)
    kernel = kernel if quantised.is_quantised(kernel) else kernel.astype(dtype)
    rate, mode, seed = dropouts.active(dropout)
    if mode == "input" and rate and act_qtype is not None:
        raise NotImplementedError(
            f"act_qtype is {act_qtype!r} and dropout has mode 'input', which multiplies both x and "
            "the dropped x by the kernel; expected mode 'adapter', or act_qtype None"
        )
    if bwd_qtype is not None and implementation == "eager":
        raise NotImplementedError(
            f"bwd_qtype is {bwd_qtype!r} and implementation 'eager', which JAX differentiates by "
            "the definition; expected implementation None, 'xla' or 'mosaic', or bwd_qtype None"
        )
    op = "lora_linear" if g is None else "dora_linear"
    settings = ProjectionSettings(
        op,
        implementation,
        static_precision(precision),
        act_qtype,
        bwd_qtype,
        keep_inner,
        rate,
        mode,
        of_inner,
    )
    has_codes = isinstance(x, row_scaled.RowScaled)
    x = x._replace(x=x.x.astype(dtype)) if has_codes else x.astype(dtype)
    scale = check.scale_array(scale)
    projected = Projection(x, kernel, lora_a, lora_b, g, scale, bias, seed, codes=codes)
    operands = meshes.vary_alike(projected)
    is_jitted = implementation != "eager" and not (rate and mode == "input")
    if not is_jitted or meshes.explicit(quantised.stored(kernel), lora_a) is not None:
        operands = _with_g(settings, operands)
    if is_jitted:
        function = meshes.jitted(_projection)
    else:
        function = define if implementation == "eager" else _with_dropped_input
    if act_qtype is not None and not has_codes:
        function = functools.partial(_with_codes, function)
    function = functools.partial(function, settings)
    with meshes.forward_mode_named():
        return FORWARD.on_explicit_axes(function, operands)(operands)


def _projection(settings: ProjectionSettings, operands: Projection) -> jax.Array:
    return projection(settings, _with_g(settings, operands))


def _with_g(settings: ProjectionSettings, operands: Projection) -> Projection:
    """Returns the operands with g in the accumulator's dtype, computed if it is a function."""
    g: Any = operands.g() if callable(operands.g) else operands.g
    if g is None:
        return operands
    g = g.astype(accumulation_dtype(row_scaled.plain(operands.x).dtype))
    return operands._replace(g=lax.stop_gradient(g) if settings.of_inner else g)


def lora_linear(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    dropout: Dropout | None = None,
    keep_inner: bool | None = None,
    act_qtype: str | None = None,
    bwd_qtype: str | None = None,
) -> jax.Array:
    """Returns inner = x (kernel + scale·lora_a lora_b): a LoRA layer, or a DoRA layer before its
    magnitude and norm are applied.

    Args:
      x, kernel, lora_a, lora_b, scale, implementation, precision, keep_inner, act_qtype, bwd_qtype:
        see `dora_linear`.
      dropout: the dropout of x, in mode "adapter".

    Returns:
      [..., out] in the dtype that x and kernel promote to (x's dtype for a quantised kernel).

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation does not support the call; dropout has mode
        "input", which needs g.
    """
    if dropouts.active(dropout)[1] == "input":
        raise NotImplementedError(
            "dropout has mode 'input', which scales the kernel's product with the dropped x by g, "
            "and lora_linear has no g; expected mode 'adapter'"
        )
    inner = scaled_linear(
        x,
        kernel,
        lora_a,
        lora_b,
        None,
        scale,
        dropout=dropout,
        implementation=implementation,
        precision=precision,
        keep_inner=keep_inner,
        act_qtype=act_qtype,
        bwd_qtype=bwd_qtype,
    )
    if bwd_qtype is not None:
        return inner  # The projection has named it.
    return jnp.asarray(checkpoint_name(inner, INNER_NAME if keep_inner else RESULT_NAME))


def times_transposed(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    g: jax.Array,
    scale: float,
    precision: Any = None,
) -> jax.Array:
    """Returns x W'ᵀ of x [..., out], as x̂ Wᵀ + s·(x̂ lora_bᵀ) lora_aᵀ with x̂ = g∘x."""
    dtype, dot = x.dtype, functools.partial(jnp.matmul, precision=precision)
    scaled = (x.astype(g.dtype) * g.reshape((1,) * (x.ndim - 1) + g.shape)).astype(dtype)
    wide = lora_b.astype(accumulation_dtype(lora_b.dtype, dtype))
    z = dot(scaled, (scale * wide).astype(dtype).T)
    return dot(scaled, kernel.T) + dot(z, lora_a.astype(dtype).T)


def _with_codes(
    function: Callable[..., jax.Array], settings: ProjectionSettings, operands: Projection
) -> jax.Array:
    """Returns the result of `function` with the codes of x, which are made here, where no mesh axis
    is explicit."""
    x = row_scaled.coded(operands.x, settings.implementation)
    return function(settings, operands._replace(x=x))


def _with_dropped_input(settings: ProjectionSettings, operands: Projection) -> jax.Array:
    """Returns the result of dropout mode "input": base of x plus ΔY of the dropped x."""
    x, kernel, lora_a, lora_b, g, scale, bias, seed, *_ = operands
    assert g is not None
    assert seed is not None
    dot = functools.partial(dot_general, settings.precision, axes=(-1, 0))
    implementation = settings.implementation
    dropped = drop_for(implementation)(x, seed, settings.rate)
    dropped_base = quantised.apply_dense(dot, dropped, kernel)
    base, lora = quantised.apply_dense(dot, x, kernel), dot(dot(dropped, lora_a), lora_b)
    y = base + compose_delta(dropped_base, lora, g, scale, implementation=implementation)
    return y if bias is None else y + per_feature(bias, y)


def _check_operands(x, kernel, lora_a, lora_b, implementation, act_qtype, bwd_qtype) -> None:
    choose.check_name(implementation)
    check.is_float("x", x)
    check.adapter(kernel, lora_a, lora_b)
    in_features = kernel.shape[0]
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must have kernel's {in_features} input features"
        )
    row_scaled.check_act_qtype(act_qtype, "kernel", kernel, bwd_qtype)


def _dtype(x: jax.Array, kernel: Any) -> Any:
    return x.dtype if quantised.is_quantised(kernel) else jnp.promote_types(x.dtype, kernel.dtype)
