"""Compose: base and adapter results into the result of the DoRA layer.

    y  = base + ((g-1)∘base + g∘(s·lora))          ΔY = (g-1)∘base + g∘(s·lora)

(arXiv 2603.22276, section 4; base, lora [..., out], g [out].) In trained adapters g lies within
about 0.002 of 1, so g-1 is taken in fp32 and everything is rounded once, at the end. With
inner = base + s·lora, the gradients are

    d_base = g∘dy  ((g-1)∘dy for ΔY)     d_lora = s·g∘dy     d_g = Σ_rows dy∘inner

`inner` is kept for the backward pass only where g is differentiated.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_dora.ops import check, choose, residuals
from jax_dora.ops import mesh as meshes
from jax_dora.ops.choose import Choice
from jax_dora.ops.mosaic import compose as kernel
from jax_dora.ops.mosaic import compose_backward as kernel_backward
from jax_dora.ops.operands import Composition


def compose(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Returns y = base + ((g-1)·base + g·(scale·lora)), evaluated in fp32 and rounded once.

    Args:
      base: [..., out], the frozen projection's result without its bias.
      lora: [..., out], `(x @ lora_a) @ lora_b`, not yet scaled.
      g: f32[out] from `magnitude_scale`.
      scale: alpha/r or alpha/sqrt(r).
      implementation: None, "mosaic" or "xla"; a named one runs or raises.

    Returns:
      [..., out] in base's dtype.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation cannot take the call.
    """
    return _checked("compose", base, lora, g, scale, implementation)


def compose_delta(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Returns ΔY = (g-1)·base + g·(scale·lora), the paper's operator.

    It is for callers who add it to base. Arguments, result and errors are `compose`'s, which is to
    be preferred: adding a rounded ΔY costs another pass and another rounding.
    """
    return _checked("compose_delta", base, lora, g, scale, implementation)


class Plan(NamedTuple):
    """What is static in a call: the operator, and the kernels; None stands for XLA."""

    delta: bool
    forward: Choice | None
    backward: Choice | None


def _checked(op, base, lora, g, scale, implementation):
    for name, array in (("base", base), ("lora", lora), ("g", g)):
        check.is_float(name, array)
    if base.ndim == 0:
        raise ValueError("base has shape (); expected [..., out]")
    check.has_shape("lora", lora, base.shape, "base's shape")
    check.has_shape("g", g, base.shape[-1:], "[out]")
    choose.check_name(implementation)
    operands = Composition(base, lora, g, check.scale_array(scale))
    return meshes.elementwise(_planned, (op, implementation), "base", "lora", operands)


def _planned(static: tuple[str, str | None], operands: Composition) -> jax.Array:
    base = operands.base
    call = (base.size // max(base.shape[-1], 1), base.shape[-1], base.dtype)
    forward, backward = (choose.choose(*static, (one, call)) for one in (kernel, kernel_backward))
    plan = Plan(static[0] == "compose_delta", forward, backward)
    operands = meshes.vary_alike(operands._replace(lora=operands.lora.astype(base.dtype)))
    return meshes.differentiable(_compose)(plan, operands)


def forward(
    choice: Choice | None, base, lora, g, scale, bias=None, *, want_inner: bool, delta: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y or ΔY, inner or None) for [..., out] operands, without a gradient of its own.

    Without g, y is inner.
    """
    options = {"delta": delta, "want_inner": want_inner}
    if choice is None:
        return define(base, lora, g, scale, bias, **options)
    g = jnp.ones(base.shape[-1:], jnp.float32) if g is None else g
    return kernel.launch(base, lora, g, scale, bias, **options, **choice.knobs)


def define(base, lora, g, scale, bias=None, *, delta: bool, want_inner: bool):
    """Returns (y or ΔY, inner or None): the definition that every implementation is held to."""
    dtype = accumulator(base.dtype)
    wide, scaled = base.astype(dtype), scale.astype(dtype) * lora.astype(dtype)
    inner = wide + scaled
    y = inner
    if g is not None:
        g = per_feature(g, wide)
        y = (g - 1) * wide + g * scaled
        if not delta:
            y = wide + y
    if bias is not None:
        y = y + per_feature(bias, wide)
    return y.astype(base.dtype), inner.astype(base.dtype) if want_inner else None


class Cotangents(NamedTuple):
    """The gradients of `forward`, None where one is not wanted."""

    base: jax.Array | None
    lora: jax.Array | None
    g: jax.Array | None


def backward(
    choice: Choice | None,
    dy,
    inner,
    g,
    scale,
    *,
    want_base: bool = True,
    want_lora: bool = True,
    delta: bool = False,
) -> Cotangents:
    """Returns d_base and d_lora in dy's dtype, and d_g f32[out] if inner is given, in one pass that
    reads dy and inner and writes what is wanted."""
    if choice is not None:
        options = {"delta": delta, "want_base": want_base, "want_lora": want_lora}
        return Cotangents(*kernel_backward.launch(dy, inner, g, scale, **options, **choice.knobs))
    dtype = accumulator(dy.dtype)
    wide = dy.astype(dtype)
    g = per_feature(g, wide)
    d_base = ((g - 1 if delta else g) * wide).astype(dy.dtype) if want_base else None
    d_lora = (scale.astype(dtype) * (g * wide)).astype(dy.dtype) if want_lora else None
    d_g = None
    if inner is not None:
        d_g = jnp.sum(wide * inner.astype(dtype), axis=tuple(range(dy.ndim - 1)))
    return Cotangents(d_base, d_lora, d_g)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compose(plan: Plan, operands: Composition) -> jax.Array:
    return forward(plan.forward, *operands, delta=plan.delta, want_inner=False)[0]


def _compose_fwd(plan: Plan, primals: Any) -> tuple[jax.Array, Any]:
    operands, wanted = residuals.values(primals), residuals.wanted(primals)
    refuse_scale_gradient(wanted.scale)
    options = {"delta": plan.delta, "want_inner": wanted.g is not None}
    y, inner = forward(plan.forward, *operands, **options)
    return y, residuals.pack((operands.g, operands.scale, inner, wanted))


def _compose_bwd(plan: Plan, packed: Any, dy: Any) -> tuple[Any]:
    if isinstance(dy, SymbolicZero):
        return (Composition(None, None, None, None),)
    g, scale, inner, wanted = residuals.unpack(packed)
    options = {"want_base": bool(wanted.base), "want_lora": bool(wanted.lora)}
    ct = backward(plan.backward, dy, inner, g, scale, **options, delta=plan.delta)
    d_g = None if ct.g is None else ct.g.astype(g.dtype)
    return (Composition(ct.base, ct.lora, d_g, None),)


_compose.defvjp(_compose_fwd, _compose_bwd, symbolic_zeros=True)


def refuse_scale_gradient(wanted: bool | None) -> None:
    """Raises TypeError where the scale itself is differentiated."""
    if wanted:
        raise TypeError(
            "scale is being differentiated; it is a constant of the adapter (alpha/r): wrap it in "
            "jax.lax.stop_gradient, or take the gradient with respect to the other arguments only"
        )


def per_feature(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns [out] as [1, ..., out], in the dtype and rank of `like`."""
    return lax.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - 1)))


def accumulator(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype that arithmetic on `dtypes` is done in: fp64 where one is, else fp32."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)
