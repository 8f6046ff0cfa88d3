"""SwiGLU of two DoRA layers, without storing the layers' results.

    h = silu(y₁)∘y₂      y₁ = g₁∘gate + b₁      y₂ = g₂∘up + b₂

(arXiv 2002.05202, section 2.) gate and up are inner = x (W + s·A B) of the two layers, from
`jax_dora.ops.lora_linear`. The backward pass reads only gate and up, so they are kept instead of
the layers' results y₁ and y₂. With gradients in FP8, where a projection's kernel multiplies by g at
no cost, gate and up may be y₁ and y₂ themselves (`swiglu_of_results`). SwiGLU then needs g in its
backward pass alone, which gives the same gradients, d_gate and d_up being those of inner, and d_g
from inner = y / g. With σ = sigmoid(y₁):

    d₁ = dh∘y₂∘σ∘(1 + y₁∘(1-σ))      d₂ = dh∘silu(y₁)
    d_gate = g₁∘d₁    d_up = g₂∘d₂    d_g₁ = Σ_rows d₁∘gate    d_g₂ = Σ_rows d₂∘up    d_b = Σ_rows d
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import check, residuals, row_scaled
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dispatch.choose import Choice
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype, divisible, per_feature
from jax_dora.ops.mosaic.rows import swiglu_backward as kernel_backward
from jax_dora.ops.mosaic.rows import swiglu_codes as kernel_with_codes
from jax_dora.ops.operands import Gating, GatingSettings
from jax_dora.ops.triton import triton_swiglu


def swiglu(
    gate: jax.Array,
    up: jax.Array,
    gate_g: jax.Array,
    up_g: jax.Array,
    *,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    implementation: str | None = None,
    with_codes: bool = False,
) -> Any:
    """Returns silu(gate_g∘gate + gate_bias)∘(up_g∘up + up_bias), computed in fp32, rounded once.

    Args:
      gate, up: [..., out] of one dtype, from `lora_linear`.
      gate_g, up_g: f32[out] from `magnitude_scale`.
      gate_bias, up_bias: [out].
      implementation: the gradient's implementation: None, "mosaic", "triton", "xla" or "eager", as
        in `dora_linear`; a named one runs or raises. "mosaic" and "triton" are one pass over dh,
        gate and up. The result itself is computed by XLA, which fuses it into one pass.
      with_codes: quantise the result's rows in the pass that computes it. With implementation None
        or "mosaic" this may be a Mosaic kernel.

    Returns:
      [..., out] in gate's dtype; with codes a `row_scaled.RowScaled` of it, except on a mesh with
      explicit axes.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation does not support the call.
    """
    check.is_float("gate", gate)
    if gate.ndim == 0:
        raise ValueError("gate has shape (); expected [..., out]")
    check.is_float("up", up)
    if up.shape != gate.shape:
        raise ValueError(
            f"up has shape {up.shape}; expected gate's, {gate.shape}: both layers have the same "
            "inputs and as many output features"
        )
    if up.dtype != gate.dtype:
        raise TypeError(f"up has dtype {up.dtype}; expected gate's, {gate.dtype}")
    vectors = {"gate_g": gate_g, "up_g": up_g}
    biases = {"gate_bias": gate_bias, "up_bias": up_bias}
    vectors |= {name: bias for name, bias in biases.items() if bias is not None}
    for name, vector in vectors.items():
        check.is_float(name, vector)
        check.has_shape(name, vector, gate.shape[-1:], "[out]")
    choose.check_name(implementation)
    operands = Gating(gate, up, gate_g, gate_bias, up_g, up_bias)
    return _of(GatingSettings(implementation), operands, with_codes)


def swiglu_of_results(
    gate: jax.Array, up: jax.Array, gate_g: jax.Array, up_g: jax.Array, *, with_codes: bool = False
) -> Any:
    """Returns `swiglu` of gate and up that are multiplied by gate_g and up_g already, as
    `scaled_linear` does with `of_inner`: it takes the gradients of gate and up, which are those of
    the products without g."""
    operands = Gating(gate, up, gate_g, None, up_g, None)
    return _of(_OF_RESULTS, operands, with_codes)


_OF_RESULTS = GatingSettings(None, scaled=True)


def gradients_and_result(dh: jax.Array, operands: Gating) -> tuple[Gating, jax.Array]:
    """Returns the gradient of every operand of `swiglu_of_results`, and its result, by one pass."""
    settings = _OF_RESULTS._replace(want_result=True)
    gradients, h = _gradients(settings, operands, dh)
    return Gating(*map(gradients.get, Gating._fields)), h


def _of(settings: GatingSettings, operands: Gating, with_codes: bool) -> Any:
    gate, up, *_ = operands
    if with_codes and meshes.explicit(gate, up) is None:
        return _with_codes(settings, meshes.vary_alike(operands))
    function = functools.partial(_swiglu, settings)
    with meshes.forward_mode_named():
        return SWIGLU_CODES.on_explicit_axes(function, operands)(operands)


def _swiglu(settings: GatingSettings, operands: Gating) -> jax.Array:
    """Returns the result on one device, or on a mesh without explicit axes."""
    if settings.implementation == "eager":
        return define(meshes.vary_alike(operands), settings.scaled)
    _choose(
        settings, operands.gate
    )  # raises already in the forward pass if a named kernel is unsupported
    return meshes.differentiable(_with_gradient)(settings, meshes.vary_alike(operands))


def _with_codes(settings: GatingSettings, operands: Gating) -> row_scaled.RowScaled:
    constants = jax.tree.map(lax.stop_gradient, operands)
    h, codes, scales = primitive.call(SWIGLU_CODES, settings, constants)
    if settings.implementation != "eager":
        operands = operands._replace(h=h)
    # A rematerialised layer computes no codes again, for which it would write h and read it.
    again = define(constants, settings.scaled)
    gated = operands._replace(h=None) if settings == _OF_RESULTS else None
    return row_scaled.RowScaled(_swiglu(settings, operands), codes, scales, again, gated)


def define(operands: Gating, scaled: bool = False) -> jax.Array:
    """Returns the result, by its definition unless it has been computed."""
    if operands.h is not None:
        return operands.h
    (y1, y2), _ = _composed(operands, scaled)
    return (y1 * jax.nn.sigmoid(y1) * y2).astype(operands.gate.dtype)


def define_backward(dh: jax.Array, operands: Gating, scaled: bool = False) -> Gating:
    """Returns the gradient of every operand, by its definition; if `scaled`, those of g times g."""
    (y1, y2), (g1, g2) = _composed(operands, scaled)
    gate, up = operands.gate.astype(y1.dtype), operands.up.astype(y1.dtype)
    wide = dh.astype(y1.dtype)
    sigma = jax.nn.sigmoid(y1)
    d1 = wide * y2 * sigma * (1 + y1 * (1 - sigma))
    d2 = wide * y1 * sigma
    rows = tuple(range(dh.ndim - 1))
    return Gating(
        gate=(g1 * d1).astype(dh.dtype),
        up=(g2 * d2).astype(dh.dtype),
        gate_g=jnp.sum(d1 * gate, axis=rows),
        gate_bias=jnp.sum(d1, axis=rows),
        up_g=jnp.sum(d2 * up, axis=rows),
        up_bias=jnp.sum(d2, axis=rows),
    )


def _composed(operands: Gating, scaled: bool) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns ((y₁, y₂), (g₁, g₂)) in the accumulator's dtype."""
    gate, up, gate_g, gate_bias, up_g, up_bias, *_ = operands

    def composed(inner, g, bias):
        wide = inner.astype(accumulation_dtype(inner.dtype))
        g = per_feature(g, wide)
        if scaled:
            return wide, g
        return g * wide if bias is None else g * wide + per_feature(bias, wide), g

    (y1, g1), (y2, g2) = composed(gate, gate_g, gate_bias), composed(up, up_g, up_bias)
    return (y1, y2), (g1, g2)


def _backward(settings: GatingSettings, shard: Shard, operands: Gating) -> tuple[Any, ...]:
    """Returns the gradient of every operand, None for the biases unless `want_bias`, and the result
    or None."""
    gate, up, gate_g, gate_bias, up_g, up_bias, dh, _ = operands
    choice, h = _choose(settings, gate), None
    if choice is None:
        gradients = define_backward(dh, operands, settings.scaled)
        h = define(operands, settings.scaled) if settings.want_result else None
    else:
        options = {"want_bias": settings.want_bias} | ({"scaled": True} if settings.scaled else {})
        options |= {"want_result": True} if settings.want_result else {}
        d_gate, d_up, *found = choice.launch(
            dh, gate, up, gate_g, up_g, gate_bias, up_bias, **options
        )
        h = found.pop(0) if settings.want_result else None
        d_gate_g, d_up_g, *d_biases = found
        d_gate_bias, d_up_bias = d_biases or (None, None)
        gradients = Gating(d_gate, d_up, d_gate_g, d_gate_bias, d_up_g, d_up_bias)
    if not settings.want_bias:
        gradients = gradients._replace(gate_bias=None, up_bias=None)
    return *gradients[:2], *map(shard.sum, gradients[2:6]), h


def _choose(settings: GatingSettings, gate: jax.Array) -> Choice | None:
    call = (gate.size // max(gate.shape[-1], 1), gate.shape[-1], gate.dtype)
    candidates = [(kernel_backward, call)]
    if not settings.scaled:
        candidates.append((triton_swiglu, call))
    return choose.choose("swiglu", settings.implementation, *candidates)


_RESULTS = ("t o", "t o", "o", "o", "o", "o")
SWIGLU_BACKWARD = Op(
    "swiglu_backward", _backward, Gating(*_RESULTS, "t o"), (*_RESULTS, "t o"), contracted="t"
)


def _run_codes(settings: GatingSettings, shard: Shard, operands: Gating) -> tuple[jax.Array, ...]:
    """Returns h, its codes and their scales."""
    gate, up, gate_g, gate_bias, up_g, up_bias, *_ = operands
    choice = None
    if not shard.summed:
        rows, vectors = gate.size // max(gate.shape[-1], 1), 2 if gate_bias is up_bias else 4
        if settings.scaled:
            vectors, gate_g, up_g = 0, None, None
        candidate = (kernel_with_codes, (rows, gate.shape[-1], gate.dtype, vectors))
        choice = choose.choose("swiglu", settings.implementation, candidate, optional=True)
    if choice is not None:
        return choice.launch(gate, up, gate_g, up_g, gate_bias, up_bias)
    # Without the barrier XLA computes h again for its codes, and does not round it.
    h = lax.optimization_barrier(define(operands, settings.scaled))
    return row_scaled.coded_by_xla(h, shard)[:3]


SWIGLU_CODES = Op(
    "swiglu_codes", _run_codes, Gating(*_RESULTS), ("t o", "t o", "t"), contracted="o"
)


def _swiglu_fwd(
    settings: GatingSettings, operands: Gating, wanted: Gating
) -> tuple[jax.Array, Any]:
    return define(operands, settings.scaled), (operands._replace(h=None), wanted)


def _swiglu_bwd(settings: GatingSettings, kept: Any, dh: jax.Array) -> dict[str, Any]:
    operands, wanted = kept
    settings = settings._replace(want_bias=bool(wanted.gate_bias or wanted.up_bias))
    gradients, _ = _gradients(settings, operands, dh)
    return {name: d for name, d in gradients.items() if getattr(wanted, name)}


def _gradients(
    settings: GatingSettings, operands: Gating, dh: jax.Array
) -> tuple[dict[str, Any], Any]:
    """Returns the gradients of the operands that have one, by name, and the result or None."""
    *gradients, h = primitive.call(SWIGLU_BACKWARD, settings, operands._replace(dh=dh))
    if settings.scaled:
        d_gate, d_up, of_gate, of_bias, of_up, *others = gradients
        of_gate, of_up = of_gate / divisible(operands.gate_g), of_up / divisible(operands.up_g)
        gradients = d_gate, d_up, of_gate, of_bias, of_up, *others
    found = {}
    for name, d, operand in zip(Gating._fields, gradients, operands, strict=False):
        if d is not None and operand is not None:
            found[name] = d.astype(operand.dtype)
    return found, h


_with_gradient = residuals.with_gradient(
    Gating,
    lambda settings, operands: define(operands, settings.scaled),
    _swiglu_fwd,
    _swiglu_bwd,
)
