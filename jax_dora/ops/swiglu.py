"""SwiGLU of two DoRA layers, composed at once: no layer's own result is ever in memory.

    h = silu(y₁)∘y₂      y₁ = g₁∘gate + b₁      y₂ = g₂∘up + b₂

(arXiv 2002.05202, section 2.) gate and up are the layers' inner = x (W + s·A B), from
`jax_dora.ops.lora_linear`; they are all that the gradient reads, so that inner takes the place of
the layers' results instead of lying beside them. With σ = sigmoid(y₁):

    d₁ = dh∘y₂∘σ∘(1 + y₁∘(1-σ))      d₂ = dh∘silu(y₁)
    d_gate = g₁∘d₁    d_up = g₂∘d₂    d_g₁ = Σ_rows d₁∘gate    d_g₂ = Σ_rows d₂∘up    d_b = Σ_rows d
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_dora.ops import check, device, dispatch
from jax_dora.ops import mesh as meshes
from jax_dora.ops.compose import accumulator, per_feature, pick_rowwise, rowwise_config, witness
from jax_dora.ops.mosaic import swiglu_backward as mosaic
from jax_dora.ops.residuals import pack, unpack

KERNEL = "swiglu_backward"


def swiglu(
    gate: jax.Array,
    up: jax.Array,
    gate_g: jax.Array,
    up_g: jax.Array,
    *,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """silu(gate_g∘gate + gate_bias)∘(up_g∘up + up_bias), evaluated in fp32 and rounded once.

    Args:
      gate, up: [..., out] of one dtype, from `lora_linear`.
      gate_g, up_g: f32[out] from `magnitude_scale`.
      gate_bias, up_bias: [out].
      implementation: of the gradient: None, "mosaic" or "xla"; a named one runs or raises. "mosaic"
        is one pass over dh, gate and up. The result itself is XLA's, which fuses it into one pass.

    Returns:
      [..., out] in gate's dtype.

    Raises:
      TypeError, ValueError: an argument's dtype or shape does not fit; unknown implementation.
      NotImplementedError: the named implementation cannot take the call.
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
    operands = (gate, up, gate_g, gate_bias, up_g, up_bias)
    return meshes.elementwise(_planned, (implementation,), *operands)


def _planned(implementation, *operands):
    plan = pick_rowwise("swiglu", KERNEL, operands[0], implementation, mosaic.refuses)
    return meshes.differentiable(_swiglu, (plan,), *operands)


def define(gate, up, gate_g, gate_bias, up_g, up_bias) -> jax.Array:
    """The definition of the result."""
    (y1, y2), _ = _composed(gate, up, gate_g, gate_bias, up_g, up_bias)
    return (y1 * jax.nn.sigmoid(y1) * y2).astype(gate.dtype)


def define_backward(dh, gate, up, gate_g, gate_bias, up_g, up_bias) -> tuple[jax.Array, ...]:
    """The definition of the gradient: (d_gate, d_up, d_gate_g, d_gate_bias, d_up_g, d_up_bias)."""
    (y1, y2), (g1, g2) = _composed(gate, up, gate_g, gate_bias, up_g, up_bias)
    wide = dh.astype(y1.dtype)
    sigma = jax.nn.sigmoid(y1)
    d1 = wide * y2 * sigma * (1 + y1 * (1 - sigma))
    d2 = wide * y1 * sigma
    rows = tuple(range(dh.ndim - 1))
    return (
        (g1 * d1).astype(dh.dtype),
        (g2 * d2).astype(dh.dtype),
        jnp.sum(d1 * gate.astype(d1.dtype), axis=rows),
        jnp.sum(d1, axis=rows),
        jnp.sum(d2 * up.astype(d2.dtype), axis=rows),
        jnp.sum(d2, axis=rows),
    )


def _composed(gate, up, gate_g, gate_bias, up_g, up_bias):
    dtype = accumulator(gate.dtype)

    def composed(inner, g, bias):
        wide = inner.astype(dtype)
        g = per_feature(g, wide)
        return g * wide if bias is None else g * wide + per_feature(bias, wide), g

    (y1, g1), (y2, g2) = composed(gate, gate_g, gate_bias), composed(up, up_g, up_bias)
    return (y1, y2), (g1, g2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(plan, gate, up, gate_g, gate_bias, up_g, up_bias):
    return define(gate, up, gate_g, gate_bias, up_g, up_bias)


def _swiglu_fwd(plan, *primals):
    values = tuple(None if p is None else p.value for p in primals)
    like = tuple(None if p is None else witness(p.value, p.perturbed) for p in primals)
    return define(*values), pack((values, like))


def _swiglu_bwd(plan, residuals, dh):
    values, like = unpack(residuals)
    if isinstance(dh, SymbolicZero):
        return (None,) * 6
    if plan == "mosaic":
        gate, up, gate_g, gate_bias, up_g, up_bias = values
        d_gate, d_up, d_gate_g, d_up_g, *d_biases = mosaic.swiglu_backward(
            dispatch.on_cuda(dh, device.target()),
            *(gate, up, gate_g, up_g, gate_bias, up_bias),
            want_bias=like[3] is not None or like[5] is not None,
            sm_count=device.sm_count(),
            config=rowwise_config(KERNEL, dh, mosaic.fits),
        )
        d_gate_bias, d_up_bias = d_biases or (None, None)
        found = (d_gate, d_up, d_gate_g, d_gate_bias, d_up_g, d_up_bias)
    else:
        found = define_backward(dh, *values)
    return tuple(
        None if want is None or one is None else one.astype(want.dtype)
        for one, want in zip(found, like, strict=True)
    )


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd, symbolic_zeros=True)
