"""Compose: base and adapter results into the result of the DoRA layer.

    y  = base + ((g-1)∘base + g∘(s·lora))          ΔY = (g-1)∘base + g∘(s·lora)

(arXiv 2603.22276, section 4; base, lora [..., out], g [out].) In trained adapters g lies within
about 0.002 of 1, so g-1 is taken in fp32 and everything is rounded once, at the end. With
inner = base + s·lora, the gradients are

    d_base = g∘dy  ((g-1)∘dy for ΔY)     d_lora = s·g∘dy     d_g = Σ_rows dy∘inner

`inner` is kept for the backward pass only where g is differentiated.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_dora.ops import check, device, dispatch, tuning
from jax_dora.ops import mesh as meshes
from jax_dora.ops.mosaic import compose as mosaic_forward
from jax_dora.ops.mosaic import compose_backward as mosaic_backward
from jax_dora.ops.mosaic import rowwise
from jax_dora.ops.residuals import pack, unpack


def compose(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """y = base + ((g-1)·base + g·(scale·lora)), evaluated in fp32 and rounded once.

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
    return _checked("compose", False, base, lora, g, scale, implementation)


def compose_delta(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """ΔY = (g-1)·base + g·(scale·lora): the paper's operator, for callers who add it to base.

    Arguments, result and errors as `compose`. Prefer `compose`: adding a rounded ΔY costs another
    pass and another rounding.
    """
    return _checked("compose_delta", True, base, lora, g, scale, implementation)


class Plan(NamedTuple):
    """What is static in a call. `forward` and `backward` name the implementations."""

    delta: bool
    forward: str
    backward: str


def plan_compose(op: str, delta: bool, base: jax.Array, implementation: str | None) -> Plan:
    """Chooses the implementations for a result of `base`'s shape and dtype."""
    pick = functools.partial(pick_rowwise, op, like=base, implementation=implementation)
    return Plan(delta, pick("compose"), pick("compose_backward"))


def pick_rowwise(
    op: str,
    kernel: str,
    like: jax.Array,
    implementation: str | None,
    refuses: Callable[..., str | None] = rowwise.refuses,
) -> str:
    """The implementation of an elementwise kernel over tensors like `like`."""
    target = device.target()
    fits = dispatch.runs_mosaic(target)
    rows, out = math.prod(like.shape[:-1]), like.shape[-1]
    sizes = rowwise.sizes(rows, out, like.dtype)
    mosaic = dispatch.Option(
        "mosaic",
        fits.refusal or refuses(rows, out, like.dtype),
        fits.slower or tuning.slower(target.device_kind, kernel, sizes),
    )
    return dispatch.choose(op, implementation, (mosaic, dispatch.Option("xla")))


def _checked(op, delta, base, lora, g, scale, implementation):
    for name, array in (("base", base), ("lora", lora), ("g", g)):
        check.is_float(name, array)
    if base.ndim == 0:
        raise ValueError("base has shape (); expected [..., out]")
    check.has_shape("lora", lora, base.shape, "base's shape")
    check.has_shape("g", g, base.shape[-1:], "[out]")
    dispatch.check_name(implementation)
    operands = (base, lora, g, check.scale_array(scale))
    return meshes.elementwise(_planned, (op, delta, implementation), *operands)


def _planned(op, delta, implementation, *operands):
    plan = plan_compose(op, delta, operands[0], implementation)
    return meshes.differentiable(_compose, (plan,), *operands)


def forward(
    plan: Plan, base, lora, g, scale, bias=None, *, want_inner: bool
) -> tuple[jax.Array, jax.Array | None]:
    """(y or ΔY, inner or None) for [..., out] operands; no gradient of its own."""
    if plan.forward == "mosaic":
        target = device.target()
        return mosaic_forward.compose(
            dispatch.on_cuda(base, target),
            lora.astype(base.dtype),
            g,
            scale,
            bias,
            delta=plan.delta,
            want_inner=want_inner,
            sm_count=device.sm_count(),
            config=rowwise_config(
                "compose",
                base,
                functools.partial(rowwise.fits, inputs=2, outputs=2 if want_inner else 1),
            ),
        )
    return define(base, lora, g, scale, bias, delta=plan.delta, want_inner=want_inner)


def rowwise_config(kernel: str, like: jax.Array, fits: Callable[[Any], bool]) -> Any | None:
    """The measured config for a launch over tensors like `like`, or None."""
    sizes = rowwise.sizes(math.prod(like.shape[:-1]), like.shape[-1], like.dtype)
    return tuning.config(device.target().device_kind, kernel, sizes, fits)


def define(base, lora, g, scale, bias=None, *, delta: bool, want_inner: bool):
    """The definition that every implementation is held to: (y or ΔY, inner or None)."""
    dtype = accumulator(base.dtype)
    wide = base.astype(dtype)
    g = per_feature(g, wide)
    scaled = scale.astype(dtype) * lora.astype(dtype)
    y = (g - 1) * wide + g * scaled
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + per_feature(bias, wide)
    return y.astype(base.dtype), (wide + scaled).astype(base.dtype) if want_inner else None


class Cotangents(NamedTuple):
    base: jax.Array | None
    lora: jax.Array | None
    g: jax.Array | None


def backward(
    plan: Plan, dy, inner, g, scale, *, want_base: bool = True, want_lora: bool = True
) -> Cotangents:
    """The cotangents of `forward`: d_base and d_lora in dy's dtype, d_g f32[out] if inner is given.

    One pass: reads dy and inner, writes what is wanted.
    """
    if plan.backward == "mosaic":
        target = device.target()
        return Cotangents(
            *mosaic_backward.compose_backward(
                dispatch.on_cuda(dy, target),
                inner,
                g,
                scale,
                delta=plan.delta,
                want_base=want_base,
                want_lora=want_lora,
                sm_count=device.sm_count(),
                config=rowwise_config(
                    "compose_backward",
                    dy,
                    functools.partial(
                        rowwise.fits,
                        inputs=1 if inner is None else 2,
                        outputs=want_base + want_lora,
                    ),
                ),
            )
        )
    dtype = accumulator(dy.dtype)
    wide = dy.astype(dtype)
    g = per_feature(g, wide)
    d_base = ((g - 1 if plan.delta else g) * wide).astype(dy.dtype) if want_base else None
    d_lora = (scale.astype(dtype) * (g * wide)).astype(dy.dtype) if want_lora else None
    d_g = None
    if inner is not None:
        d_g = jnp.sum(wide * inner.astype(dtype), axis=tuple(range(dy.ndim - 1)))
    return Cotangents(d_base, d_lora, d_g)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compose(plan, base, lora, g, scale):
    return forward(plan, base, lora, g, scale, want_inner=False)[0]


def _compose_fwd(plan, base, lora, g, scale):
    refuse_scale_gradient(scale.perturbed)
    want = (base.perturbed, lora.perturbed)
    base, lora, g, scale, keep = base.value, lora.value, g.value, scale.value, g.perturbed
    y, inner = forward(plan, base, lora, g, scale, want_inner=keep)
    like = (witness(base, want[0]), witness(lora, want[1]), witness(g, keep))
    return y, pack((g, scale, inner, like))


def _compose_bwd(plan, residuals, dy):
    g, scale, inner, (base, lora, like_g) = unpack(residuals)
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    ct = backward(
        plan,
        dy,
        inner,
        g,
        scale,
        want_base=base is not None,
        want_lora=lora is not None,
    )
    d_lora = None if ct.lora is None or lora is None else ct.lora.astype(lora.dtype)
    d_g = None if ct.g is None or like_g is None else ct.g.astype(like_g.dtype)
    return ct.base, d_lora, d_g, None


_compose.defvjp(_compose_fwd, _compose_bwd, symbolic_zeros=True)


def refuse_scale_gradient(perturbed: bool) -> None:
    """Raises TypeError where the scale itself is differentiated."""
    if perturbed:
        raise TypeError(
            "scale is being differentiated; it is a constant of the adapter (alpha/r): wrap it in "
            "jax.lax.stop_gradient, or take the gradient with respect to the other arguments only"
        )


def witness(array: jax.Array, perturbed: bool) -> jax.Array | None:
    """A zero-sized array, to carry through the residuals that and in which dtype one is wanted."""
    return lax.full((0,), 0, array.dtype) if perturbed else None


def per_feature(vector: jax.Array, like: jax.Array) -> jax.Array:
    """[out] as [1, ..., out], in the dtype and rank of `like`."""
    return lax.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - 1)))


def accumulator(dtype) -> jnp.dtype:
    """The dtype that elementwise arithmetic on `dtype` is done in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
