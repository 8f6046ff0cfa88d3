"""Compose: combines the base and adapter results into the result of the DoRA layer.

    y  = g∘inner        ΔY = (g-1)∘base + g∘(s·lora)        inner = base + s·lora

(arXiv 2603.22276, section 4; base, lora [..., out], g [out].) In trained adapters g differs from 1
by about 0.002, so ΔY computes g-1 in fp32. y = base + ΔY does not need g-1: it is computed in fp32
and rounded once, which is accurate for any g. The gradients are

    d_base = g∘dy  ((g-1)∘dy for ΔY)     d_lora = s·g∘dy     d_g = Σ_rows dy∘inner

`inner` is kept for the backward pass only if g is differentiated.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_dora.ops import check, residuals
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dispatch.choose import Choice
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype, per_feature
from jax_dora.ops.mosaic.rows import compose_backward as kernel_backward
from jax_dora.ops.mosaic.rows import compose_forward as kernel
from jax_dora.ops.operands import Composition, CompositionSettings
from jax_dora.ops.triton import triton_compose_backward, triton_compose_forward


def compose(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: ArrayLike,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Returns y = base + ((g-1)·base + g·(scale·lora)) = g·(base + scale·lora).

    It is computed in fp32 and rounded once.

    Args:
      base: [..., out], the frozen projection's result without its bias.
      lora: [..., out], `(x @ lora_a) @ lora_b`, without the scale.
      g: f32[out] from `magnitude_scale`.
      scale: alpha/r or alpha/sqrt(r).
      implementation: None, "mosaic", "triton", "xla" or "eager", as in `dora_linear`; a named one
        runs or raises.

    Returns:
      [..., out] in base's dtype.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation does not support the call.
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
    """Returns ΔY = (g-1)·base + g·(scale·lora), the paper's operator, to be added to base.

    Prefer `compose`: adding a rounded ΔY takes another pass over memory and rounds a second time.
    Arguments, result and errors are the same as for `compose`.
    """
    return _checked("compose_delta", base, lora, g, scale, implementation)


def _checked(op, base, lora, g, scale, implementation):
    for name, array in (("base", base), ("lora", lora), ("g", g)):
        check.is_float(name, array)
    if base.ndim == 0:
        raise ValueError("base has shape (); expected [..., out]")
    check.has_shape("lora", lora, base.shape, "base's shape")
    check.has_shape("g", g, base.shape[-1:], "[out]")
    choose.check_name(implementation)
    operands = Composition(base, lora, g, check.scale_array(scale))
    function = functools.partial(_compose, CompositionSettings(op, implementation))
    with meshes.forward_mode_named():
        return COMPOSE.on_explicit_axes(function, operands)(operands)


def _compose(settings: CompositionSettings, operands: Composition) -> jax.Array:
    """Returns the result on one device, or on a mesh without explicit axes."""
    operands = meshes.vary_alike(operands._replace(lora=operands.lora.astype(operands.base.dtype)))
    if settings.implementation == "eager":
        return _composed(settings, operands)
    return meshes.differentiable(_with_gradient)(settings, operands)


def forward(
    choice: Choice | None, base, lora, g, scale, bias=None, *, want_inner: bool, delta: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y or ΔY, inner or None) for operands [..., out], without a custom gradient, by the
    chosen kernel, or by XLA for None. If g is None, y is inner."""
    options = {"delta": delta, "want_inner": want_inner}
    if choice is None:
        return define(base, lora, g, scale, bias, **options)
    g = jnp.ones(base.shape[-1:], jnp.float32) if g is None else g
    return choice.launch(base, lora, g, scale, bias, **options)


def define(base, lora, g, scale, bias=None, *, delta: bool, want_inner: bool):
    """Returns (y or ΔY, inner or None): the definition that every implementation must match."""
    dtype = accumulation_dtype(base.dtype)
    wide, scaled = base.astype(dtype), scale.astype(dtype) * lora.astype(dtype)
    inner = wide + scaled
    y = inner
    if g is not None:
        g = per_feature(g, wide)
        y = (g - 1) * wide + g * scaled if delta else g * inner
    if bias is not None:
        y = y + per_feature(bias, wide)
    return y.astype(base.dtype), inner.astype(base.dtype) if want_inner else None


def _forward(settings: CompositionSettings, shard: Shard, operands: Composition) -> tuple[Any, Any]:
    call = _sizes(operands.base)
    candidates = (kernel, call), (triton_compose_forward, call)
    choice = choose.choose(settings.op, settings.implementation, *candidates)
    delta = settings.op == "compose_delta"
    return forward(choice, *operands, want_inner=settings.want_inner, delta=delta)


COMPOSE = Op("compose", _forward, Composition("t o", "t o", "o", ""), ("t o", "t o"))


class ComposeBackward(NamedTuple):
    """The operands of compose's gradient: dy, inner [..., out], g f32[out], scale f32[]. inner is
    None if the gradient of g is not wanted."""

    dy: Any
    inner: Any
    g: Any
    scale: Any


class ComposeBackwardSettings(NamedTuple):
    """The settings of compose's gradient: `CompositionSettings`', and which gradients are
    computed."""

    op: str
    implementation: str | None
    want_base: bool = True
    want_lora: bool = False


def _backward(
    settings: ComposeBackwardSettings, shard: Shard, operands: ComposeBackward
) -> tuple[Any, Any, Any]:
    """Returns d_base and d_lora in dy's dtype and d_g f32[out], or None if not wanted, in one pass
    over dy and inner."""
    dy, inner, g, scale = operands
    candidates = (kernel_backward, _sizes(dy)), (triton_compose_backward, _sizes(dy))
    choice = choose.choose(settings.op, settings.implementation, *candidates)
    delta = settings.op == "compose_delta"
    if choice is not None:
        options = {"delta": delta, "want_base": settings.want_base, "want_lora": settings.want_lora}
        d_base, d_lora, d_g = choice.launch(dy, inner, g, scale, **options)
        return d_base, d_lora, shard.sum(d_g)
    dtype = accumulation_dtype(dy.dtype)
    wide = dy.astype(dtype)
    g = per_feature(g, wide)
    d_base = ((g - 1 if delta else g) * wide).astype(dy.dtype) if settings.want_base else None
    d_lora = (scale.astype(dtype) * (g * wide)).astype(dy.dtype) if settings.want_lora else None
    d_g = None
    if inner is not None:
        d_g = shard.sum(jnp.sum(wide * inner.astype(dtype), axis=tuple(range(dy.ndim - 1))))
    return d_base, d_lora, d_g


COMPOSE_BACKWARD = Op(
    "compose_backward",
    _backward,
    ComposeBackward("t o", "t o", "o", ""),
    ("t o", "t o", "o"),
    contracted="t",
)


def _sizes(array: jax.Array) -> tuple[int, int, Any]:
    """Returns (rows, out, dtype) of an array [..., out]."""
    return array.size // max(array.shape[-1], 1), array.shape[-1], array.dtype


def _composed(settings: CompositionSettings, operands: Composition) -> jax.Array:
    return primitive.call(COMPOSE, settings, operands)[0]


def _compose_fwd(
    settings: CompositionSettings, operands: Composition, wanted: Composition
) -> tuple[jax.Array, Any]:
    refuse_scale_gradient(wanted.scale)
    settings = settings._replace(want_inner=wanted.g is not None)
    y, inner = primitive.call(COMPOSE, settings, operands)
    return y, (operands.g, operands.scale, inner, wanted)


def _compose_bwd(settings: CompositionSettings, kept: Any, dy: jax.Array) -> dict[str, Any]:
    g, scale, inner, wanted = kept
    back = ComposeBackwardSettings(
        settings.op, settings.implementation, bool(wanted.base), bool(wanted.lora)
    )
    operands = ComposeBackward(dy, inner, g, scale)
    d_base, d_lora, d_g = primitive.call(COMPOSE_BACKWARD, back, operands)
    return {"base": d_base, "lora": d_lora, "g": None if d_g is None else d_g.astype(g.dtype)}


_with_gradient = residuals.with_gradient(Composition, _composed, _compose_fwd, _compose_bwd)


def refuse_scale_gradient(wanted: bool | None) -> None:
    """Raises TypeError if `wanted`, the gradient with respect to the scale, is requested."""
    if wanted:
        raise TypeError(
            "scale is being differentiated; it is a constant of the adapter (alpha/r): wrap it in "
            "jax.lax.stop_gradient, or take the gradient with respect to the other arguments only"
        )
