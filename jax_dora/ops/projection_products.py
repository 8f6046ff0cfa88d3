"""The products of an adapted projection, forward and backward, and the choice of their kernels.

Calls with few rows, as in decoding and for prompts, have kernels that read a quantised W
directly. Otherwise a quantised W is dequantised to x's dtype for each product. With quantised
activations, base is a product in FP8 (`row_scaled`), and so is d Wᵀ with quantised gradients.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import quantised, row_scaled, weight_only
from jax_dora.ops.compose import forward
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype, dot_general
from jax_dora.ops.mosaic.decode import decode_finish, decode_project
from jax_dora.ops.mosaic.projection import coded_matmul, expand_compose, project, project_back
from jax_dora.ops.mosaic.rows import compose_forward
from jax_dora.ops.operands import ProductSettings, Projection
from jax_dora.ops.triton import triton_compose_forward, triton_expand_compose, triton_few_rows


def scaled_lora_a(lora_a: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns s·A in `dtype`, multiplied in the accumulator's dtype."""
    wide = accumulation_dtype(lora_a.dtype)
    return (scale.astype(wide) * lora_a.astype(wide)).astype(dtype)


class ForwardSettings(NamedTuple):
    """The settings of `FORWARD`: those of `ProjectionSettings`, and whether inner, or a copy of y,
    is a result."""

    op: str
    implementation: str | None
    precision: Any = None
    bwd_qtype: str | None = None
    want_inner: bool = False
    want_copy: bool = False


def _forward(settings: ForwardSettings, shard: Shard, operands: Projection) -> tuple[Any, Any]:
    """Returns (y, inner, a copy of y, or None); y is inner if g is None. The operands have z.

    If the inputs are sharded, each device computes its partial z from lora_a, so that no product
    waits for the sum of z over devices. The kernels for few rows also do, which saves a pass over
    x.
    """
    if isinstance(operands.x, row_scaled.RowScaled):
        return _forward_with_quantised_rows(settings, shard, operands)
    if shard.summed:
        return _forward_with_sharded_inputs(settings, shard, operands)
    x, kernel, lora_a, lora_b, g, scale, bias, _, z, _ = operands
    dot, unscaled = functools.partial(dot_general, settings.precision), jnp.float32(1)
    (in_features, out), rank = kernel.shape, z.shape[-1]
    rows, is_quantised = x.size // max(in_features, 1), quantised.is_quantised(kernel)
    form = quantised.format_of(kernel) if is_quantised else None
    expand = (rows, rank, out, x.dtype)
    whole = (rows, in_features, out, rank, form, x.dtype)
    candidates = {
        decode_project: whole,
        project: (rows, in_features, out, x.dtype),
        decode_finish: expand,
        expand_compose: expand,
        compose_forward: (rows, out, x.dtype),
        triton_few_rows: whole,
        triton_expand_compose: expand,
        triton_compose_forward: (rows, out, x.dtype),
    }
    # The kernels for few rows return no inner, and those for whole projections need lora_a.
    if settings.want_inner or lora_a is None:
        del candidates[decode_project], candidates[triton_few_rows]
    if settings.want_inner:
        del candidates[decode_finish]
    choice = choose.choose(settings.op, settings.implementation, *candidates.items())
    options = {"want_inner": settings.want_inner}
    lora_b = lora_b.astype(x.dtype)
    # The kernels for few rows multiply x A by s: computing s·A would be another pass over A.
    a = None if lora_a is None else lora_a.astype(x.dtype)
    if choice is not None and a is not None and choice.kernel in (decode_project, triton_few_rows):
        w = (kernel.qvalue, kernel.scale) if is_quantised else (kernel, None)
        return choice.launch(x, *w, a, lora_b, g, scale, bias), None
    # The dense copy of a quantised kernel lives only as long as its product.
    if choice is not None and choice.kernel is project:
        choice = choice.during_collectives(shard.gathered)
        lora_b, g, bias = shard.as_copies(lora_b, g, bias)
        kernel = quantised.dense(kernel, x.dtype)
        return choice.launch(x, kernel, z, lora_b, g, bias, **options)
    by_codes = None
    if is_quantised:
        by_codes = weight_only.choice(settings.implementation, rows, kernel, x.dtype)
    if by_codes is not None:
        base = by_codes.launch(x, kernel.qvalue, kernel.scale)
    else:
        base = dot(x, quantised.dense(kernel, x.dtype), (-1, 0))
    if choice is not None and choice.kernel is decode_finish:
        z, s = (z, unscaled) if a is None else (dot(x, a, (-1, 0)), scale)
        return choice.launch(base, z, lora_b, g, s, bias), None
    if choice is not None and choice.kernel in (expand_compose, triton_expand_compose):
        g = jnp.ones(out, jnp.float32) if g is None else g
        return choice.launch(base, z, lora_b, g, unscaled, bias, **options)
    return forward(choice, base, dot(z, lora_b, (-1, 0)), g, unscaled, bias, **options)


def _forward_with_sharded_inputs(
    settings: ForwardSettings, shard: Shard, operands: Projection
) -> tuple[Any, Any]:
    """Returns (y, inner or None), summed over the devices that share the input features."""
    x, _, lora_a, _, g, scale, bias, _, z, _ = operands
    if lora_a is None:
        z = shard.on_first_device(z)
    else:
        a = scaled_lora_a(lora_a, scale, x.dtype)
        z = dot_general(settings.precision, x, a, (-1, 0))
    operands = operands._replace(z=z, bias=shard.on_first_device(bias))
    single = Shard(gathered=shard.gathered)
    if not settings.want_inner:
        return shard.sum(_forward(settings, single, operands)[0]), None
    # inner is summed before g is applied, because the backward pass needs the whole inner.
    operands = operands._replace(g=None, bias=None)
    inner = shard.sum(_forward(settings._replace(want_inner=False), single, operands)[0])
    zeros, unscaled = jnp.zeros_like(inner), jnp.float32(1)
    return forward(None, inner, zeros, g, unscaled, bias, want_inner=False)[0], inner


def _forward_with_quantised_rows(
    settings: ForwardSettings, shard: Shard, operands: Projection
) -> tuple[Any, Any]:
    """Returns (y, inner, a copy of y, or None), with base as an FP8 product with one scale per row
    of x; all else has the same dtypes as without quantised activations."""
    rows, kernel, _, lora_b, g, _, bias, _, z, turned = operands
    x = rows.x
    turned = None if turned is None else _gathered(shard, turned)
    unscaled, options = jnp.float32(1), {"want_inner": settings.want_inner}
    lora_b = lora_b.astype(x.dtype)
    if bias is None and not settings.want_inner:
        choice = _coded(settings, shard, x, z, lora_b.shape[1])
        if choice is not None:
            codes = turned
            if codes is None:
                codes = row_scaled.transposed_codes(kernel, settings.bwd_qtype)
            codes, lora_b, g = shard.as_copies(codes, lora_b, g)
            columns = row_scaled.scales_of(kernel, lora_b.shape[1])
            arrays = rows.codes, rows.scales, codes, shard.on_first_device(z), lora_b.T, columns, g
            if shard.summed:
                y = shard.sum(choice.launch(*arrays)[0])
                return y, y if settings.want_copy else None
            y, *copy = choice.launch(*arrays, want_copy=settings.want_copy)
            return y, copy[0] if copy else None
    turned = None if turned is None else row_scaled.in_one_piece(turned)
    base = row_scaled.sums(rows, kernel, shard, settings.bwd_qtype, turned)
    choice = _expand(settings, base, z)
    if choice is not None:
        options["want_copy"] = settings.want_copy
        return _expanded(choice, base, z, lora_b, g, bias, **options)
    dot = functools.partial(dot_general, settings.precision, axes=(-1, 0))
    scaled, lora = base.scaled, dot(z, lora_b)
    if settings.implementation == "eager":
        # JAX differentiates this, and the rounding of x has no gradient.
        exact = quantised.apply_dense(dot, x, kernel).astype(scaled.dtype)
        scaled = exact + lax.stop_gradient(scaled - exact)
    y, inner = forward(None, scaled, lora, g, unscaled, bias, **options)
    y = y.astype(x.dtype)
    inner = y if settings.want_copy else inner
    return y, None if inner is None else inner.astype(x.dtype)


def _gathered(shard: Shard, codes: jax.Array) -> jax.Array:
    """Returns whole codes, in parts (`Shard.gather`) only if `coded_matmul` can read each."""
    codes = shard.gather(codes)
    is_readable = codes.ndim == 2 or codes.shape[-1] % coded_matmul.CODES == 0
    return codes if is_readable else row_scaled.in_one_piece(codes)


def _coded(
    settings: Any, shard: Shard, x: jax.Array, z: jax.Array, cols: int
) -> choose.Choice | None:
    """Returns the kernel of an FP8 product of x [..., in], with `cols` results, that multiplies by
    its scales and adds z B itself. Of a part of the summed features it gives a partial sum in z's
    dtype, in which devices add theirs: in fp16 a partial sum could overflow."""
    if shard.summed and z.dtype == jnp.float16:
        return None
    summed = x.shape[-1]
    call = (x.size // max(summed, 1), summed, cols, z.shape[-1], z.dtype)
    candidate = coded_matmul, call
    choice = choose.choose(BACK.name, settings.implementation, candidate, optional=True)
    return choice and choice.during_collectives(shard.gathered or shard.shares_rows)


def _expand(
    settings: Any, base: row_scaled.Sums, z: jax.Array, *, optional: bool = False
) -> choose.Choice | None:
    """Returns the kernel that adds z B to an FP8 product while it scales the product."""
    out = base.total.shape[-1]
    call = (base.total.size // max(out, 1), z.shape[-1], out, base.total.dtype)
    op = getattr(settings, "op", BACK.name)
    candidate = expand_compose, call
    return choose.choose(op, settings.implementation, candidate, optional=optional)


def _expanded(
    choice: choose.Choice, base: row_scaled.Sums, z: Any, lora_b: Any, g: Any, bias: Any, **options
) -> tuple[jax.Array, jax.Array | None]:
    g = jnp.ones(lora_b.shape[1], jnp.float32) if g is None else g
    scales = base.rows, base.columns
    return choice.launch(base.total, z, lora_b, g, jnp.float32(1), bias, scales, **options)


def _codes_of_forward(settings: ForwardSettings) -> str | None:
    """Returns the axis names of the codes that `FORWARD` gathers itself."""
    return None if settings.bwd_qtype is None else "o i"


FORWARD = Op(
    "project",
    _forward,
    Projection(
        row_scaled.RowScaled("t i", "t i", "t"),
        "i o",
        "i r",
        "r o",
        "o",
        "",
        "o",
        "s",
        "t r",
        "o i",
    ),
    ("t o", "t o"),
    contracted="i",
    is_projection=True,
    gathers=_codes_of_forward,
)


class Back(NamedTuple):
    """The operands of `BACK`: d [..., out], kernel [in, out], dz = d lora_bᵀ [..., r], lora_a = s·A
    [in, r], and lora_b [r, out], from which each device computes its partial dz if the outputs are
    sharded, so that no product waits for the sum of dz over devices. For a product in FP8, d may
    lack its factor g f32[out]."""

    d: Any
    kernel: Any
    dz: Any
    lora_a: Any
    lora_b: Any
    g: Any = None


def _back(settings: ProductSettings, shard: Shard, operands: Back) -> tuple[jax.Array]:
    """Returns dx = (g∘d) Wᵀ + dz (s·A)ᵀ."""
    d, kernel, dz, lora_a, lora_b, g = operands
    dot = functools.partial(dot_general, settings.precision)
    if settings.bwd_qtype is not None:
        codes = _gathered(shard, kernel.qvalue)
        choice = _coded(settings, shard, d, dz, lora_a.shape[0])
        # Partial sums are scaled before devices add them, so that each may have its own scales.
        rows = row_scaled.coded_gradient(settings, d, kernel, Shard() if choice else shard, g)
        if choice is not None:
            codes, lora_a = shard.as_copies(codes, lora_a)
            arrays = rows.codes, rows.scales, codes, shard.on_first_device(dz), lora_a
            return (shard.sum(choice.launch(*arrays)[0]),)
        base = row_scaled.transposed_sums(rows, row_scaled.in_one_piece(codes), shard)
        choice = _expand(settings, base, dz, optional=True)
        if choice is not None:
            return _expanded(choice, base, dz, lora_a.T, None, None, want_inner=False)[:1]
        return ((base.scaled + dot(dz, lora_a, (-1, 1), jnp.float32)).astype(d.dtype),)
    if shard.summed:
        dz = dot(d, lora_b, (-1, 1))
    kernel = quantised.dense(kernel, d.dtype)
    in_features, out = kernel.shape
    call = (d.size // max(out, 1), in_features, out, d.dtype)
    choice = choose.choose(BACK.name, settings.implementation, (project_back, call), optional=True)
    if choice is not None:
        choice = choice.during_collectives(shard.gathered or shard.shares_rows)
        dx = choice.launch(d, kernel, dz, *shard.as_copies(lora_a))
        return (shard.sum(dx),)
    return (shard.sum(dot(d, kernel, (-1, 1)) + dot(dz, lora_a, (-1, 1))),)


def _codes_of_back(settings: ProductSettings) -> str | None:
    """Returns the axis names of the codes that `BACK` gathers itself."""
    return None if settings.bwd_qtype is None else "i o"


BACK = Op(
    "project_back",
    _back,
    Back("t o", "i o", "t r", "i r", "r o", "o"),
    ("t i",),
    contracted="o",
    is_projection=True,
    gathers=_codes_of_back,
)
