"""The custom gradient of an adapted projection.

With z = x (s·A), d = g∘dy and g from `magnitude_scale`:

    y  = g∘(base + zB) + bias     dz = d Bᵀ     dx = d Wᵀ + dz (s·A)ᵀ
    dA = s·(xᵀ dz)     dB = zᵀ d     d_g = Σ_rows dy∘(base + zB)     dbias = Σ_rows dy

s is multiplied into A, once and in fp32, so that what is gathered or summed over devices is one
array for both directions, and no wider than the activations.

inner = base + zB is y / g, so that d_g takes Σ_rows dy∘y / g and nothing beside y is kept for it;
under a bias, and in fp16, whose range is short, inner is kept.

The order never makes an [in, out] product, but for the kernel's own gradient, xᵀ d, which is
computed only where somebody differentiates it.

What is kept for the gradient of a quantised kernel is the quantised one. Where activations are
quantised too, gradients are as above.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dora.ops import check, choose, primitive, products, quantised, residuals
from jax_dora.ops.compose import (
    COMPOSE_BACKWARD,
    ComposeBackward,
    accumulator,
    refuse_scale_gradient,
)
from jax_dora.ops.dropout import drop
from jax_dora.ops.operands import Projection, Static
from jax_dora.ops.products import BACK, FORWARD, Back
from jax_dora.ops.reduction import REDUCE, REDUCE_BACK, Reduction, dot_general

INNER_NAME = "dora_inner"
RESULT_NAME = "dora_result"
# A smaller g counts as one of this size: a result would lose bits of inner.
LEAST_G = 2.0**-40


def define(static: Static, operands: Projection) -> jax.Array:
    """Returns y, or inner where g is None."""
    return primitive.call(FORWARD, static, _with_z(static, operands, _scaled_lora_a(operands)))[0]


def _result_holds_inner(operands: Projection, dtype: Any) -> bool:
    """Returns whether inner is y / g to inner's own precision, `dtype`'s, so that y alone is
    kept."""
    return operands.bias is None and dtype != jnp.float16


def _divisible(operands: Projection) -> Projection:
    """Returns operands whose g, where the gradient divides by it, is at least `LEAST_G` in size."""
    g = operands.g
    if g is None or not _result_holds_inner(operands, operands.x.dtype):
        return operands
    return operands._replace(g=jnp.where(jnp.abs(g) < LEAST_G, jnp.copysign(LEAST_G, g), g))


def _scaled_lora_a(operands: Projection) -> jax.Array:
    """Returns s·A in x's dtype."""
    return products.scaled(operands.lora_a, operands.scale, operands.x.dtype)


def _with_z(static: Static, operands: Projection, scaled: jax.Array) -> Projection:
    """Returns the operands of `FORWARD`, with z = drop(x) (s·A)."""
    x, seed = operands.x, operands.seed
    (z,) = primitive.call(REDUCE, _reducing(static, x), Reduction(x, scaled, seed))
    # A dropped x has its own kernels for z, and an FP8 product sums its parts by itself.
    lora_a = operands.lora_a if seed is None and static.act_qtype is None else None
    return operands._replace(lora_a=lora_a, seed=None, z=z)


def _reducing(static: Static, x: jax.Array) -> Static:
    # Only a dropped x has kernels, so that none can be asked for otherwise.
    if static.implementation == "mosaic" and not static.rate:
        static = static._replace(implementation=None)
    return static._replace(whole=x.shape)


def _projection_fwd(
    static: Static, operands: Projection, wanted: Projection
) -> tuple[jax.Array, Any]:
    refuse_scale_gradient(wanted.scale)
    if wanted.kernel and quantised.is_quantised(operands.kernel):
        check.not_differentiated(operands.kernel)
    operands = _divisible(operands)
    from_y, scaled = _result_holds_inner(operands, operands.x.dtype), _scaled_lora_a(operands)
    forward = _with_z(static, operands, scaled)
    want_inner = wanted.g is not None and not from_y
    y, inner = primitive.call(FORWARD, static._replace(want_inner=want_inner), forward)
    name = INNER_NAME if static.keep_inner else RESULT_NAME
    if wanted.g is not None and from_y:
        y = inner = jnp.asarray(checkpoint_name(y, name))
    elif wanted.g is not None:
        # What follows needs y again, which inner alone does not spare.
        y = jnp.asarray(checkpoint_name(y, RESULT_NAME))
        inner = jnp.asarray(checkpoint_name(inner, name))
    # What the wanted gradients need; the bias says what inner is.
    needed = operands._replace(x=operands.x if wanted.lora_a or wanted.kernel else None)
    z = forward.z if wanted.lora_b else None
    return y, (needed, wanted, z, inner, scaled if wanted.x else None)


def _projection_bwd(static: Static, kept: Any, dy: jax.Array) -> dict[str, jax.Array]:
    operands, wanted, z, inner, scaled = kept
    x, kernel, _, lora_b, g, scale, bias, *_ = operands
    wide = accumulator(dy.dtype)
    dot = functools.partial(dot_general, static.precision)
    rows = tuple(range(dy.ndim - 1))
    d, found = dy, {}
    if g is not None:
        d, _, d_g = primitive.call(COMPOSE_BACKWARD, static, ComposeBackward(dy, inner, g, scale))
        if d_g is not None:
            if _result_holds_inner(operands, dy.dtype):
                d_g = d_g / g
            found["g"] = d_g.astype(g.dtype)
    if wanted.x or wanted.lora_a:
        dz = dot(d, lora_b, (-1, 1))
        if wanted.x:
            found["x"] = _dx(static, operands, scaled, d, dz)
        if wanted.lora_a:
            d_lora_a = _d_scaled_lora_a(static, operands, dz)
            d_lora_a = scale.astype(wide) * d_lora_a.astype(wide)
            found["lora_a"] = d_lora_a.astype(operands.lora_a.dtype)
    if wanted.kernel:
        found["kernel"] = dot(x, d, (rows, rows), kernel.dtype)
    if wanted.lora_b:
        found["lora_b"] = dot(z, d, (rows, rows), lora_b.dtype)
    if wanted.bias:
        found["bias"] = jnp.sum(dy.astype(wide), axis=rows).astype(bias.dtype)
    return found


projection = residuals.with_gradient(Projection, define, _projection_fwd, _projection_bwd)
"""`define` with a gradient of its own."""


def _dx(
    static: Static, operands: Projection, scaled: jax.Array, d: jax.Array, dz: jax.Array
) -> jax.Array:
    """Returns d Wᵀ + dz (s·A)ᵀ, the latter dropped as x was."""
    kernel, seed = operands.kernel, operands.seed
    if seed is None:
        return primitive.call(BACK, static, Back(d, kernel, dz, scaled, operands.lora_b))[0]
    through_adapter = drop(dot_general(static.precision, dz, scaled, (-1, 1)), seed, static.rate)
    kernel = quantised.dense(kernel, d.dtype)
    return dot_general(static.precision, d, kernel, (-1, 1)) + through_adapter


def _d_scaled_lora_a(static: Static, operands: Projection, dz: jax.Array) -> jax.Array:
    """Returns drop(x)ᵀ dz in the accumulator's dtype, or, where several devices may add it up and
    all is in bf16, in bf16: what LoRA sends."""
    x, seed = operands.x, operands.seed
    dtype = jnp.dtype(accumulator(x.dtype))
    if choose.target().partitioned and x.dtype == operands.lora_a.dtype == jnp.bfloat16:
        dtype = x.dtype
    if seed is None:
        rows = tuple(range(x.ndim - 1))
        return dot_general(static.precision, x, dz, (rows, rows), dtype)
    static = _reducing(static, x)._replace(dtype=dtype)
    return primitive.call(REDUCE_BACK, static, Reduction(x, dz, seed))[0]
