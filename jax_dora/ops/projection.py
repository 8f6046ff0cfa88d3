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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_dora.ops import check, choose, primitive, products, quantised, residuals
from jax_dora.ops.compose import (
    COMPOSE_BACKWARD,
    Returned,
    Wanted,
    accumulator,
    refuse_scale_gradient,
)
from jax_dora.ops.dropout import drop
from jax_dora.ops.operands import Projection
from jax_dora.ops.products import BACK, FORWARD, Back, Forward, Reduced, Static
from jax_dora.ops.reduction import REDUCE, REDUCE_BACK, Reducing, Reduction, dot_general

INNER_NAME = "dora_inner"
RESULT_NAME = "dora_result"
# A smaller g counts as one of this size: a result would lose bits of inner.
LEAST_G = 2.0**-40


class Options(NamedTuple):
    """What is static in a call, as its caller gave it.

    Attributes:
      op: the operator's name, for messages.
      implementation, precision, keep_inner: as `dora_linear`'s.
      rate: the rate at which x is dropped.
      mode: the dropout's.
      act_qtype: what x is quantised to for its product with the kernel, or None.
    """

    op: str
    implementation: str | None
    precision: Any
    rate: float
    mode: str
    keep_inner: bool
    act_qtype: str | None = None


def define(options: Options, operands: Projection) -> jax.Array:
    """Returns y, or inner where g is None."""
    scaled = _scaled_lora_a(operands)
    return primitive.call(FORWARD, *_reduced(options, operands, scaled, want_inner=False))[0]


projection = jax.custom_vjp(define, nondiff_argnums=(0,))
"""`define` with a gradient of its own."""


def _told_by_result(operands: Projection, dtype: Any) -> bool:
    """Returns whether inner is y / g to inner's own precision, `dtype`'s, so that y alone is
    kept."""
    return operands.bias is None and dtype != jnp.float16


def _divisible(operands: Projection) -> Projection:
    """Returns operands whose g, where the gradient divides by it, is at least `LEAST_G` in size."""
    g = operands.g
    if g is None or not _told_by_result(operands, operands.x.dtype):
        return operands
    return operands._replace(g=jnp.where(jnp.abs(g) < LEAST_G, jnp.copysign(LEAST_G, g), g))


def _scaled_lora_a(operands: Projection) -> jax.Array:
    """Returns s·A in x's dtype."""
    return products.scaled(operands.lora_a, operands.scale, operands.x.dtype)


def _reduced(
    options: Options, operands: Projection, scaled: jax.Array, *, want_inner: bool
) -> tuple[Forward, Reduced]:
    """Returns what `FORWARD` takes, with z = drop(x) (s·A)."""
    x, kernel, lora_a, lora_b, g, scale, bias, seed = operands
    (z,) = primitive.call(REDUCE, _reducing(options, x), Reduction(x, scaled, seed))
    static = Forward(
        options.op, options.implementation, options.precision, want_inner, options.act_qtype
    )
    # A dropped x has its own kernels for z, and an FP8 product sums its parts by itself.
    lora_a = lora_a if seed is None and options.act_qtype is None else None
    return static, Reduced(x, kernel, z, lora_b, g, bias, lora_a, scale)


def _reducing(options: Options, x: jax.Array) -> Reducing:
    # Only a dropped x has kernels, so that none can be asked for otherwise.
    implementation = options.implementation
    if implementation == "mosaic" and not options.rate:
        implementation = None
    return Reducing(options.op, implementation, options.precision, options.rate, x.shape)


def _projection_fwd(options: Options, primals: Any) -> tuple[jax.Array, Any]:
    operands, wanted = residuals.values(primals), residuals.wanted(primals)
    refuse_scale_gradient(wanted.scale)
    if wanted.kernel and quantised.is_quantised(operands.kernel):
        check.not_differentiated(operands.kernel)
    operands = _divisible(operands)
    told = _told_by_result(operands, operands.x.dtype)
    scaled, want_inner = _scaled_lora_a(operands), wanted.g is not None and not told
    static, reduced = _reduced(options, operands, scaled, want_inner=want_inner)
    y, inner = primitive.call(FORWARD, static, reduced)
    name = INNER_NAME if options.keep_inner else RESULT_NAME
    if wanted.g is not None and told:
        y = inner = jnp.asarray(checkpoint_name(y, name))
    elif wanted.g is not None:
        # What follows needs y again, which inner alone does not spare.
        y = jnp.asarray(checkpoint_name(y, RESULT_NAME))
        inner = jnp.asarray(checkpoint_name(inner, name))
    # What the wanted gradients need; the bias says what inner is.
    needed = operands._replace(x=operands.x if wanted.lora_a or wanted.kernel else None)
    z = reduced.z if wanted.lora_b else None
    return y, residuals.pack((needed, wanted, z, inner, scaled if wanted.x else None))


def _projection_bwd(options: Options, packed: Any, dy: Any) -> tuple[Any]:
    nothing = Projection(*(None,) * 8)
    if isinstance(dy, SymbolicZero):
        return (nothing,)
    operands, wanted, z, inner, scaled = residuals.unpack(packed)
    x, kernel, _, lora_b, g, scale, bias, _ = operands
    wide = accumulator(dy.dtype)
    dot = functools.partial(dot_general, options.precision)
    rows = tuple(range(dy.ndim - 1))
    d, found = dy, {}
    if g is not None:
        static = Wanted(options.op, options.implementation)
        d, _, d_g = primitive.call(COMPOSE_BACKWARD, static, Returned(dy, inner, g, scale))
        if d_g is not None:
            if _told_by_result(operands, dy.dtype):
                d_g = d_g / g
            found["g"] = d_g.astype(g.dtype)
    if wanted.x or wanted.lora_a:
        dz = dot(d, lora_b, (-1, 1))
        if wanted.x:
            found["x"] = _dx(options, operands, scaled, d, dz)
        if wanted.lora_a:
            d_lora_a = _d_scaled_lora_a(options, operands, dz)
            d_lora_a = scale.astype(wide) * d_lora_a.astype(wide)
            found["lora_a"] = d_lora_a.astype(operands.lora_a.dtype)
    if wanted.kernel:
        found["kernel"] = dot(x, d, (rows, rows), kernel.dtype)
    if wanted.lora_b:
        found["lora_b"] = dot(z, d, (rows, rows), lora_b.dtype)
    if wanted.bias:
        found["bias"] = jnp.sum(dy.astype(wide), axis=rows).astype(bias.dtype)
    return (nothing._replace(**found),)


projection.defvjp(_projection_fwd, _projection_bwd, symbolic_zeros=True)


def _dx(
    options: Options, operands: Projection, scaled: jax.Array, d: Any, dz: jax.Array
) -> jax.Array:
    """Returns d Wᵀ + dz (s·A)ᵀ, the latter dropped as x was."""
    kernel, seed = operands.kernel, operands.seed
    if seed is None:
        static = Static(options.op, options.implementation, options.precision)
        return primitive.call(BACK, static, Back(d, kernel, dz, scaled, operands.lora_b))[0]
    through_adapter = drop(dot_general(options.precision, dz, scaled, (-1, 1)), seed, options.rate)
    kernel = quantised.dense(kernel, d.dtype)
    return dot_general(options.precision, d, kernel, (-1, 1)) + through_adapter


def _d_scaled_lora_a(options: Options, operands: Projection, dz: jax.Array) -> jax.Array:
    """Returns drop(x)ᵀ dz in the accumulator's dtype, or, where several devices may add it up and
    all is in bf16, in bf16: what LoRA sends."""
    x, seed = operands.x, operands.seed
    dtype = jnp.dtype(accumulator(x.dtype))
    if choose.target().partitioned and x.dtype == operands.lora_a.dtype == jnp.bfloat16:
        dtype = x.dtype
    if seed is None:
        rows = tuple(range(x.ndim - 1))
        return dot_general(options.precision, x, dz, (rows, rows), dtype)
    static = _reducing(options, x)._replace(dtype=dtype)
    return primitive.call(REDUCE_BACK, static, Reduction(x, dz, seed))[0]
