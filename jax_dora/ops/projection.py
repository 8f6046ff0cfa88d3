"""The custom gradient of an adapted projection, and the choice of its kernels.

With z = xA, d = g∘dy and g from `magnitude_scale`:

    y  = base + ((g-1)∘base + g∘(s·zB)) + bias     dz = s·(d Bᵀ)     dx = d Wᵀ + dz Aᵀ
    dA = xᵀ dz     dB = s·(zᵀ d)     d_g = Σ_rows dy∘(base + s·zB)     dbias = Σ_rows dy

The order never makes an [in, out] product, but for the kernel's own gradient, xᵀ d, which is
computed only where somebody differentiates it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_dora.ops import choose, residuals
from jax_dora.ops.choose import Choice
from jax_dora.ops.compose import accumulator, backward, forward, refuse_scale_gradient
from jax_dora.ops.dropout import drop, kept_share
from jax_dora.ops.mosaic import (
    compose,
    compose_backward,
    dropped_product,
    dropped_product_back,
    expand_compose,
    project,
    project_back,
)
from jax_dora.ops.operands import Projection

INNER_NAME = "dora_inner"


class Options(NamedTuple):
    """What is static in a call, as its caller gave it.

    Attributes:
      op: the operator's name, for messages.
      implementation, precision, keep_inner: as `dora_linear`'s.
      rate: the rate at which x is dropped.
      mode: the dropout's.
    """

    op: str
    implementation: str | None
    precision: Any
    rate: float
    mode: str
    keep_inner: bool


class Plan(NamedTuple):
    """What is static in a call once its kernels are chosen; None stands for XLA.

    Attributes:
      forward: makes y: `project`, `expand_compose` or `compose`.
      dx: `project_back`.
      scaled: `compose_backward`, which makes d and d_g.
      drops, drops_back: draw the dropout's mask in z's product, and in dA's.
      rate, precision, keep_inner: as the options'.
    """

    forward: Choice | None
    dx: Choice | None
    scaled: Choice | None
    drops: Choice | None
    drops_back: Choice | None
    rate: float
    precision: Any
    keep_inner: bool


def plan(options: Options, operands: Projection) -> Plan:
    """Returns the kernels of a call on one device, or of a device's part of it."""
    rows, in_features, rank, out = operands.sizes
    dtype, rate = operands.x.dtype, options.rate
    pick = functools.partial(choose.choose, options.op, options.implementation)
    maybe = functools.partial(pick, optional=True)
    projection, reduction = (rows, in_features, out, dtype), (rows, in_features, rank, dtype)
    return Plan(
        forward=pick(
            (project, projection),
            (expand_compose, (rows, rank, out, dtype)),
            (compose, (rows, out, dtype)),
        ),
        # Of a dropped x, the adapter's part of dx is masked before it is added.
        dx=None if rate else maybe((project_back, projection)),
        scaled=pick((compose_backward, (rows, out, dtype))),
        drops=maybe((dropped_product, reduction)) if rate else None,
        drops_back=maybe((dropped_product_back, reduction)) if rate else None,
        rate=rate,
        precision=options.precision,
        keep_inner=options.keep_inner,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def projection(plan: Plan, operands: Projection) -> jax.Array:
    """Returns y, or inner where g is None."""
    return _forward(plan, operands, want_inner=False)[0]


def _forward(
    plan: Plan, operands: Projection, *, want_inner: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns (y, inner or None, z); y is inner where g is None, and z is scaled where the plan is
    to project."""
    x, kernel, _, lora_b, g, scale, bias, _ = operands
    dot, choice = functools.partial(dot_general, plan.precision), plan.forward
    if choice is not None and choice.kernel is project:
        z = (scale.astype(jnp.float32) * _reduce(plan, operands, jnp.float32)).astype(x.dtype)
        b = lora_b.astype(x.dtype)
        options = {"want_inner": want_inner, **choice.knobs}
        return *project.launch(x, kernel, z, b, g, bias, **options), z
    z = _reduce(plan, operands, x.dtype)
    base = dot(x, kernel, (-1, 0))
    if choice is not None and choice.kernel is expand_compose:
        ones = jnp.ones(kernel.shape[1], jnp.float32) if g is None else g
        b, options = lora_b.astype(x.dtype), {"want_inner": want_inner, **choice.knobs}
        return *expand_compose.launch(base, z, b, ones, scale, bias, **options), z
    lora = dot(z, lora_b, (-1, 0))
    return *forward(choice, base, lora, g, scale, bias, want_inner=want_inner), z


def _reduce(plan: Plan, operands: Projection, dtype: Any) -> jax.Array:
    """Returns z = drop(x) A in `dtype`."""
    x, lora_a, seed = operands.x, operands.lora_a.astype(operands.x.dtype), operands.seed
    if plan.drops is not None:
        rows = x.reshape(-1, x.shape[-1])
        z = _dropped_product(plan.drops, plan.rate, rows, lora_a, seed, transposed=False)
        return z.reshape(*x.shape[:-1], -1).astype(dtype)
    seen = drop(x, seed, plan.rate) if seed is not None else x
    return dot_general(plan.precision, seen, lora_a, (-1, 0), dtype)


def _dropped_product(
    choice: Choice, rate: float, x: jax.Array, right: jax.Array, seed: Any, *, transposed: bool
) -> jax.Array:
    """Returns f32: drop(x) right, or drop(x)ᵀ right if `transposed`, of x [rows, in]."""
    product = dropped_product.launch(
        x, right, seed, rate=rate, transposed=transposed, **choice.knobs
    )
    return product * jnp.float32(1 / kept_share(rate))


def _projection_fwd(plan: Plan, primals: Any) -> tuple[jax.Array, Any]:
    operands, wanted = residuals.values(primals), residuals.wanted(primals)
    refuse_scale_gradient(wanted.scale)
    y, inner, z = _forward(plan, operands, want_inner=wanted.g is not None)
    if inner is not None and plan.keep_inner:
        inner = jnp.asarray(checkpoint_name(inner, INNER_NAME))
    # What the wanted gradients need, and nothing else.
    needed = operands._replace(
        x=operands.x if wanted.lora_a or wanted.kernel else None,
        bias=operands.bias if wanted.bias else None,
    )
    return y, residuals.pack((needed, wanted, z if wanted.lora_b else None, inner))


def _projection_bwd(plan: Plan, packed: Any, dy: Any) -> tuple[Any]:
    nothing = Projection(*(None,) * 8)
    if isinstance(dy, SymbolicZero):
        return (nothing,)
    operands, wanted, z, inner = residuals.unpack(packed)
    x, kernel, _, lora_b, g, scale, bias, _ = operands
    wide = accumulator(dy.dtype)
    dot = functools.partial(dot_general, plan.precision)
    rows = tuple(range(dy.ndim - 1))
    scale = scale.astype(wide)
    # Over rows that lie on several devices: their sums are added up in the wider dtype.
    partitioned = choose.target().partitioned

    def summed(left, right, dtype):
        return dot(left, right, (rows, rows), wide if partitioned else dtype).astype(dtype)

    d, found = dy, {}
    if g is not None:
        ct = backward(plan.scaled, dy, inner, g, scale, want_lora=False)
        d = ct.base
        if ct.g is not None:
            found["g"] = ct.g.astype(g.dtype)
    if wanted.x or wanted.lora_a:
        dz = (scale * dot(d, lora_b, (-1, 1), wide)).astype(dy.dtype)
        if wanted.x:
            found["x"] = _dx(plan, operands, d, dz)
        if wanted.lora_a:
            found["lora_a"] = _d_lora_a(plan, summed, operands, dz)
    if wanted.kernel:
        found["kernel"] = summed(x, d, kernel.dtype)
    if wanted.lora_b:
        if plan.forward is not None and plan.forward.kernel is project:  # s is in z
            found["lora_b"] = summed(z, d, lora_b.dtype)
        else:
            found["lora_b"] = (scale * dot(z, d, (rows, rows), wide)).astype(lora_b.dtype)
    if wanted.bias:
        found["bias"] = jnp.sum(dy.astype(wide), axis=rows).astype(bias.dtype)
    return (nothing._replace(**found),)


projection.defvjp(_projection_fwd, _projection_bwd, symbolic_zeros=True)


def _dx(plan: Plan, operands: Projection, d: Any, dz: jax.Array) -> jax.Array:
    """Returns d Wᵀ + dz Aᵀ, the latter dropped as x was."""
    kernel, lora_a, seed = operands.kernel, operands.lora_a, operands.seed
    if plan.dx is not None:
        return project_back.launch(d, kernel, dz, lora_a.astype(d.dtype), **plan.dx.knobs)
    through_adapter = dot_general(plan.precision, dz, lora_a, (-1, 1))
    if seed is not None:
        through_adapter = drop(through_adapter, seed, plan.rate)
    return dot_general(plan.precision, d, kernel, (-1, 1)) + through_adapter


def _d_lora_a(plan: Plan, summed: Any, operands: Projection, dz: jax.Array) -> jax.Array:
    """Returns drop(x)ᵀ dz in lora_a's dtype."""
    x, seed, dtype = operands.x, operands.seed, operands.lora_a.dtype
    if plan.drops_back is not None:
        rows, dz = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
        found = _dropped_product(plan.drops_back, plan.rate, rows, dz, seed, transposed=True)
        return found.astype(dtype)
    if seed is not None:
        # XLA may not take the dropped x from the forward pass: that would keep it.
        x = drop(*lax.optimization_barrier((x, seed)), plan.rate)
    return summed(x, dz, dtype)


def dot_general(precision, a, b, axes, dtype=None):
    """Returns a and b, in a's dtype, contracted over `axes`, accumulated in fp32, in `dtype`."""
    left, right = (
        [axis % operand.ndim for axis in ((ax,) if isinstance(ax, int) else ax)]
        for ax, operand in zip(axes, (a, b), strict=True)
    )
    return lax.dot_general(
        a,
        b.astype(a.dtype),
        ((left, right), ((), ())),
        precision=precision,
        preferred_element_type=dtype or a.dtype,
    )
