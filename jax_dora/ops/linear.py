"""A whole adapted projection on any mesh, y = x W' + bias (arXiv 2603.22276, section 2).

    y = g∘(base + s·lora) + bias      base = xW      lora = xAB

`lora_linear` is inner = x (W + s·A B) alone, as if g were 1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_dora.ops import check, choose, quantised, row_wise
from jax_dora.ops import dropout as dropouts
from jax_dora.ops import mesh as meshes
from jax_dora.ops.compose import accumulator, compose_delta, per_feature
from jax_dora.ops.dropout import Dropout, drop_for
from jax_dora.ops.norm import factored_norm, magnitude_scale, norm_implementation
from jax_dora.ops.operands import Projection, Static
from jax_dora.ops.projection import INNER_NAME, RESULT_NAME, define, projection
from jax_dora.ops.reduction import dot_general, static_precision

NORM_NAME = "dora_norm"


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
    keep_inner: bool = False,
    act_qtype: str | None = None,
) -> jax.Array:
    """Returns magnitude ∘ x (kernel + scale·lora_a lora_b) / ‖kernel + scale·lora_a lora_b‖ + bias.

    Args:
      x: [..., in].
      kernel: [in, out], frozen; or a `qwix.QArray`, which is dequantised for each product with it,
        to x's dtype, and has no gradient.
      lora_a: [in, r].
      lora_b: [r, out].
      magnitude: [out].
      scale: alpha/r or alpha/sqrt(r).
      bias: [out]; never scaled.
      norm: f32[out], `factored_norm` of these very arrays, computed earlier. It is used as it is.
      implementation: None, "mosaic", "xla" or "eager"; a named one runs or raises. "eager" is the
        definition, which JAX differentiates by itself, in any mode and as often as it likes, and of
        which it keeps more; the others have a gradient of their own, in reverse mode, and "xla" is
        that without kernels. "mosaic" stands for the most fused of its kernels that takes the call:
        the whole projection (of up to 64 rows the one for few), else expand and compose, else
        compose alone; the norm then takes the best that accepts it. Under dropout it also draws the
        mask in the kernels of lora_a's product and gradient, where they accept the call; x's
        gradient, and mode "input", are XLA's.
      precision: of the matrix products with x, as in `jax.lax.dot_general`.
      dropout: of x, in training; its mask is never in memory, see `jax_dora.ops.Dropout`.
      keep_inner: names what the magnitude's gradient reads, so that `jax_dora.remat_policy()` keeps
        it: the result, or under a bias and in fp16 x (kernel + scale·lora_a lora_b) [..., out].
        Mode "input" of dropout has no such array, and ignores this.
      act_qtype: "float8_e4m3fn" rounds x to it for its product with the kernel, by a scale for each
        row (qwix's name; the kernel is a `QArray` of that format with scales [1, out]). What goes
        to lora_a, and all gradients, are of x as it is. None rounds nothing.

    Returns:
      [..., out] in the dtype that x and kernel promote to (x's for a quantised kernel); adapters of
      a wider dtype are cast to it for the products with activations (the norm takes them as they
      are), and their gradients come back in their own dtype. The norm carries the checkpoint name
      "dora_norm".

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation cannot take the call; act_qtype is given and
        dropout has mode "input".
    """
    _check_operands(x, kernel, lora_a, lora_b, implementation, act_qtype)
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, kernel.shape[1:], "[out]")
    if norm is None:
        by = norm_implementation(implementation)
        norm = factored_norm(kernel, lora_a, lora_b, scale, implementation=by)
        norm = jnp.asarray(checkpoint_name(norm, NORM_NAME))
    g = magnitude_scale(magnitude, norm, _dtype(x, kernel))
    return scaled_linear(
        Projection(x, kernel, lora_a, lora_b, g, scale, bias),
        dropout,
        implementation=implementation,
        precision=precision,
        keep_inner=keep_inner,
        act_qtype=act_qtype,
    )


def scaled_linear(
    operands: Projection,
    dropout: Dropout | None = None,
    *,
    implementation: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    keep_inner: bool = False,
    act_qtype: str | None = None,
) -> jax.Array:
    """Returns g ∘ x (kernel + scale·lora_a lora_b) + bias: `dora_linear`, given g.

    Args:
      operands: without seed and z; g is of any float dtype, and None stands for ones.
      dropout, implementation, precision, keep_inner, act_qtype: as `dora_linear`'s.
    """
    x, kernel, lora_a, lora_b, g, scale, bias, *_ = operands
    _check_operands(x, kernel, lora_a, lora_b, implementation, act_qtype)
    for name, vector in (("g", g), ("bias", bias)):
        if vector is not None:
            check.is_float(name, vector)
            check.has_shape(name, vector, kernel.shape[1:], "[out]")
    if g is not None:
        g = g.astype(accumulator(_dtype(x, kernel)))
    rate, mode, seed = dropouts.active(dropout)
    if mode == "input" and rate and act_qtype is not None:
        raise NotImplementedError(
            f"act_qtype is {act_qtype!r} and dropout has mode 'input', which multiplies two x with "
            "the kernel; expected mode 'adapter', or act_qtype None"
        )
    by, op = static_precision(precision), "lora_linear" if g is None else "dora_linear"
    static = Static(op, implementation, by, rate, mode, keep_inner, act_qtype)
    operands = operands._replace(g=g, scale=check.scale_array(scale), seed=seed)
    return _on_mesh(static, operands)(operands)


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
    keep_inner: bool = False,
    act_qtype: str | None = None,
) -> jax.Array:
    """Returns inner = x (kernel + scale·lora_a lora_b): a plain LoRA layer, and what a DoRA layer's
    magnitude and norm are applied to.

    Args:
      x, kernel, lora_a, lora_b, scale, implementation, precision, keep_inner, act_qtype: as
        `dora_linear`'s.
      dropout: of x, in mode "adapter".

    Returns:
      [..., out] in the dtype that x and kernel promote to (x's for a quantised kernel).

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation cannot take the call; dropout has mode "input",
        which is DoRA's.
    """
    if dropouts.active(dropout)[1] == "input":
        raise NotImplementedError(
            "dropout has mode 'input', in which the kernel's product of the dropped x is scaled by "
            "g; expected mode 'adapter'"
        )
    inner = scaled_linear(
        Projection(x, kernel, lora_a, lora_b, g=None, scale=scale),
        dropout,
        implementation=implementation,
        precision=precision,
        act_qtype=act_qtype,
    )
    return jnp.asarray(checkpoint_name(inner, INNER_NAME if keep_inner else RESULT_NAME))


def _on_mesh(static: Static, operands: Projection) -> Callable[[Projection], jax.Array]:
    """Returns the function of `operands` that computes the result: on a mesh with explicit axes
    sharded as x's rows and the kernel's columns are."""
    function = functools.partial(_on_any, static)
    kernel = quantised.stored(operands.kernel)
    mesh = meshes.explicit(operands.x, kernel)
    if mesh is None:
        return function
    *rows, contracted = meshes.spec(operands.x)
    of_in, columns = meshes.spec(kernel)
    axes = jax.tree.leaves((rows, columns))
    if (contracted and of_in) or len(axes) > len(set(axes)):
        return function  # JAX asks for an out_sharding, or refuses
    return meshes.left_to_xla(function, mesh, jax.P(*rows, columns))


def _on_any(static: Static, operands: Projection) -> jax.Array:
    """Returns the result on one device, or on axes that are not explicit."""
    operands = meshes.vary_alike(operands)
    x, kernel = operands.x, operands.kernel
    dtype = _dtype(x, kernel)
    if not quantised.is_quantised(kernel):
        kernel = kernel.astype(dtype)
    operands = operands._replace(x=x.astype(dtype), kernel=kernel)
    if static.rate and static.mode == "input":
        return _with_dropped_input(static, operands)
    if static.implementation == "eager":
        return define(static, operands)
    return meshes.differentiable(projection)(static, operands)


def _with_dropped_input(static: Static, operands: Projection) -> jax.Array:
    """Returns mode "input": base of x, the whole correction of the dropped x."""
    x, kernel, lora_a, lora_b, g, scale, bias, seed, _ = operands
    assert g is not None
    assert seed is not None
    dot = functools.partial(dot_general, static.precision, axes=(-1, 0))
    by = static.implementation
    dropped = drop_for(by)(x, seed, static.rate)
    corrected = quantised.multiplied(dot, dropped, kernel)
    y, lora = quantised.multiplied(dot, x, kernel), dot(dot(dropped, lora_a), lora_b)
    y = y + compose_delta(corrected, lora, g, scale, implementation=by)
    return y if bias is None else y + per_feature(bias, y)


def _check_operands(x, kernel, lora_a, lora_b, implementation, act_qtype) -> None:
    choose.check_name(implementation)
    check.is_float("x", x)
    check.adapter(kernel, lora_a, lora_b)
    in_features = kernel.shape[0]
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must have kernel's {in_features} input features"
        )
    row_wise.check_act_qtype(act_qtype, "kernel", kernel)


def _dtype(x: jax.Array, kernel: Any) -> Any:
    return x.dtype if quantised.is_quantised(kernel) else jnp.promote_types(x.dtype, kernel.dtype)
