"""The custom gradient of an adapted projection, and the choice of its kernels.

With z = x (s·A), d = g∘dy and g from `magnitude_scale`:

    y  = g∘(base + zB) + bias     dz = d Bᵀ     dx = d Wᵀ + dz (s·A)ᵀ
    dA = s·(xᵀ dz)     dB = zᵀ d     d_g = Σ_rows dy∘(base + zB)     dbias = Σ_rows dy

s is multiplied into A, once and in fp32, so that what is gathered or summed over devices is one
array for both directions, and no wider than the activations.

inner = base + zB is y / g, so that d_g takes Σ_rows dy∘y / g and nothing beside y is kept for it;
under a bias, and in fp16, whose range is short, inner is kept.

The order never makes an [in, out] product, but for the kernel's own gradient, xᵀ d, which is
computed only where somebody differentiates it.

A quantised kernel is dequantised for each of its products, to x's dtype, but for few rows, which a
kernel multiplies with what is stored; what is kept for the gradient is the quantised one. Where
activations are quantised too, base alone is a product in FP8 (`row_wise`): gradients are as above.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_dora.ops import check, choose, primitive, quantised, residuals, row_wise
from jax_dora.ops.compose import (
    COMPOSE_BACKWARD,
    Returned,
    Wanted,
    accumulator,
    forward,
    refuse_scale_gradient,
)
from jax_dora.ops.dropout import drop
from jax_dora.ops.mosaic import (
    compose,
    expand_compose,
    project,
    project_back,
    quantised_product,
)
from jax_dora.ops.operands import Projection
from jax_dora.ops.reduction import REDUCE, REDUCE_BACK, Reducing, Reduction, dot_general
from jax_dora.ops.shard import Op, Shard

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


class Static(NamedTuple):
    """What is static in `BACK`; the fields are the options'."""

    op: str
    implementation: str | None
    precision: Any


class Forward(NamedTuple):
    """What is static in `FORWARD`."""

    op: str
    implementation: str | None
    precision: Any
    want_inner: bool
    act_qtype: str | None


class Reduced(NamedTuple):
    """The operands of `FORWARD`: x [..., in], kernel [in, out], z = s·xA [..., r], lora_b [r, out],
    g f32[out] or None, bias [out] or None, lora_a = s·A [in, r] or None.

    Where inputs are sharded, a device takes its part of z from lora_a, so that nothing waits for
    the sum of z.
    """

    x: Any
    kernel: Any
    z: Any
    lora_b: Any
    g: Any
    bias: Any
    lora_a: Any


def _forward(static: Forward, shard: Shard, operands: Reduced) -> tuple[Any, Any]:
    """Returns (y, inner or None); y is inner where g is None."""
    if static.act_qtype is not None:
        return _by_quantised_rows(static, shard, operands)
    x, kernel, z, lora_b, g, bias, lora_a = operands
    dot, one = functools.partial(dot_general, static.precision), jnp.float32(1)
    if shard.summed:
        part = shard.once(z) if lora_a is None else dot(x, lora_a, (-1, 0))
        operands = operands._replace(z=part, bias=shard.once(bias))
    if shard.summed and static.want_inner:
        # y is not linear in a part of inner.
        linear = operands._replace(g=None, bias=None)
        inner = shard.sum(_forward(static._replace(want_inner=False), Shard(), linear)[0])
        return forward(None, inner, jnp.zeros_like(inner), g, one, bias, want_inner=False)[0], inner
    if shard.summed:
        return shard.sum(_forward(static, Shard(), operands)[0]), None
    (in_features, out), rank = kernel.shape, z.shape[-1]
    rows = x.size // max(in_features, 1)
    base = _few_rows(static, rows, x, kernel)
    if base is None:
        # Of a quantised kernel a copy that lasts as long as the product.
        kernel = quantised.dense(kernel, x.dtype)
    candidates = [
        (project, (rows, in_features, out, x.dtype)),
        (expand_compose, (rows, rank, out, x.dtype)),
        (compose, (rows, out, x.dtype)),
    ]
    choice = choose.choose(static.op, static.implementation, *candidates[base is not None :])
    options = {"want_inner": static.want_inner}
    lora_b = lora_b.astype(x.dtype)
    if choice is not None and choice.kernel is project:
        return project.launch(x, kernel, z, lora_b, g, bias, **options, **choice.knobs)
    if base is None:
        base = dot(x, kernel, (-1, 0))
    if choice is not None and choice.kernel is expand_compose:
        g = jnp.ones(out, jnp.float32) if g is None else g
        return expand_compose.launch(base, z, lora_b, g, one, bias, **options, **choice.knobs)
    return forward(choice, base, dot(z, lora_b, (-1, 0)), g, one, bias, **options)


def _by_quantised_rows(static: Forward, shard: Shard, operands: Reduced) -> tuple[Any, Any]:
    """Returns (y, inner or None) with the kernel's product in FP8; z and g stay as they are."""
    x, kernel, z, lora_b, g, bias, _ = operands
    choose.choose(static.op, static.implementation)
    base = row_wise.product(x, kernel, shard)
    lora = dot_general(static.precision, z, lora_b.astype(x.dtype), (-1, 0))
    options = {"want_inner": static.want_inner}
    y, inner = forward(None, base, lora, g, jnp.float32(1), bias, **options)
    return y.astype(x.dtype), None if inner is None else inner.astype(x.dtype)


def _few_rows(static: Forward, rows: int, x: jax.Array, kernel: Any) -> jax.Array | None:
    """Returns the product of few rows with a quantised kernel, read as it is; None where another
    way is taken."""
    if not quantised.is_quantised(kernel):
        return None
    call = (rows, *kernel.shape, quantised.format_of(kernel), x.dtype)
    candidate = (quantised_product, call)
    choice = choose.choose(static.op, static.implementation, candidate, optional=True)
    return choice and choice.kernel.launch(x, *jax.tree.leaves(kernel), **choice.knobs)


FORWARD = Op(
    "project",
    _forward,
    Reduced("t i", "i o", "t r", "r o", "o", "o", "i r"),
    ("t o", "t o"),
    contracted="i",
)


class Back(NamedTuple):
    """The operands of `BACK`: d [..., out], kernel [in, out], dz = d Bᵀ [..., r], lora_a = s·A
    [in, r], lora_b [r, out].

    Where outputs are sharded, a device takes its part of dz from lora_b, so that nothing waits for
    the sum of dz.
    """

    d: Any
    kernel: Any
    dz: Any
    lora_a: Any
    lora_b: Any


def _back(static: Static, shard: Shard, operands: Back) -> tuple[jax.Array]:
    """Returns dx = d Wᵀ + dz (s·A)ᵀ."""
    d, kernel, dz, lora_a, lora_b = operands
    dot = functools.partial(dot_general, static.precision)
    if shard.summed:
        dz = dot(d, lora_b, (-1, 1))
    kernel = quantised.dense(kernel, d.dtype)
    in_features, out = kernel.shape
    call = (d.size // max(out, 1), in_features, out, d.dtype)
    options = {"optional": True}
    choice = choose.choose(static.op, static.implementation, (project_back, call), **options)
    if choice is not None:
        return (shard.sum(project_back.launch(d, kernel, dz, lora_a, **choice.knobs)),)
    return (shard.sum(dot(d, kernel, (-1, 1)) + dot(dz, lora_a, (-1, 1))),)


BACK = Op("project_back", _back, Back("t o", "i o", "t r", "i r", "r o"), ("t i",), contracted="o")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def projection(options: Options, operands: Projection) -> jax.Array:
    """Returns y, or inner where g is None."""
    return define(options, _divisible(operands))


def define(options: Options, operands: Projection) -> jax.Array:
    """Returns what `projection` does, without a gradient of its own."""
    scaled = _scaled_lora_a(operands)
    return primitive.call(FORWARD, *_reduced(options, operands, scaled, want_inner=False))[0]


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
    wide = accumulator(operands.lora_a.dtype)
    return (operands.scale.astype(wide) * operands.lora_a.astype(wide)).astype(operands.x.dtype)


def _reduced(
    options: Options, operands: Projection, scaled: jax.Array, *, want_inner: bool
) -> tuple[Forward, Reduced]:
    """Returns what `FORWARD` takes, with z = drop(x) (s·A)."""
    x, kernel, _, lora_b, g, _, bias, seed = operands
    (z,) = primitive.call(REDUCE, _reducing(options, x), Reduction(x, scaled, seed))
    static = Forward(
        options.op, options.implementation, options.precision, want_inner, options.act_qtype
    )
    # A dropped x has its own kernels for z, and an FP8 product sums its parts by itself.
    lora_a = scaled if seed is None and options.act_qtype is None else None
    return static, Reduced(x, kernel, z, lora_b, g, bias, lora_a)


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
    # Over rows that lie on several devices: their sums are added up in the wider dtype.
    partitioned = choose.target().partitioned

    def summed(left, right, dtype):
        return dot(left, right, (rows, rows), wide if partitioned else dtype).astype(dtype)

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
            d_lora_a = scale.astype(wide) * _d_scaled_lora_a(options, operands, dz)
            found["lora_a"] = d_lora_a.astype(operands.lora_a.dtype)
    if wanted.kernel:
        found["kernel"] = summed(x, d, kernel.dtype)
    if wanted.lora_b:
        found["lora_b"] = summed(z, d, lora_b.dtype)
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
    """Returns drop(x)ᵀ dz in the accumulator's dtype."""
    x, seed = operands.x, operands.seed
    if seed is None:
        rows = tuple(range(x.ndim - 1))
        return dot_general(options.precision, x, dz, (rows, rows), accumulator(x.dtype))
    return primitive.call(REDUCE_BACK, _reducing(options, x), Reduction(x, dz, seed))[0]
