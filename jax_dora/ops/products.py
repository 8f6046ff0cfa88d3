"""The products of an adapted projection, forward and backward, and the choice of their kernels.

Calls with few rows, as in decoding, have Mosaic kernels that read a quantised W directly. Otherwise
a quantised W is dequantised to x's dtype for each product. With quantised activations, base is a
product in FP8 (`row_wise`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops import choose, quantised, row_wise
from jax_dora.ops.compose import forward
from jax_dora.ops.mosaic import (
    compose,
    expand_compose,
    few_rows,
    few_rows_finish,
    project,
    project_back,
)
from jax_dora.ops.operands import Projection, Static
from jax_dora.ops.reduction import Reduction, dot_general, reduce
from jax_dora.ops.shard import Op, Shard


def _forward(static: Static, shard: Shard, operands: Projection) -> tuple[Any, Any, jax.Array]:
    """Returns (y, inner or None, z); y is inner if g is None."""
    if static.act_qtype is not None:
        return _forward_with_quantised_rows(static, shard, operands)
    if shard.summed:
        return _forward_with_sharded_inputs(static, shard, operands)
    x, kernel, lora_a, lora_b, g, scale, bias, seed, scaled = operands
    dot, one = functools.partial(dot_general, static.precision), jnp.float32(1)
    (in_features, out), rank = kernel.shape, lora_a.shape[-1]
    rows, is_quantised = x.size // max(in_features, 1), quantised.is_quantised(kernel)
    form = quantised.format_of(kernel) if is_quantised else None
    expand = (rows, rank, out, x.dtype)
    candidates = {
        few_rows: (rows, in_features, out, rank, form, x.dtype),
        project: (rows, in_features, out, x.dtype),
        few_rows_finish: expand,
        expand_compose: expand,
        compose: (rows, out, x.dtype),
    }
    # `few_rows` does not drop x, and neither kernel for few rows returns inner.
    if static.want_inner or seed is not None:
        del candidates[few_rows]
    if static.want_inner:
        del candidates[few_rows_finish]
    choice = choose.choose(static.op, static.implementation, *candidates.items())
    options = {"want_inner": static.want_inner}
    lora_b = lora_b.astype(x.dtype)
    if choice is not None and choice.kernel is project:
        choice = choice.during_collectives(shard.gathered)
        x, kernel, scaled, lora_b, g, bias = shard.gathered_first(
            x, kernel, scaled, lora_b, g, bias
        )
    z = reduce(static, shard, Reduction(x, scaled, seed))
    # The kernels for few rows multiply x A by s: computing s·A would be another pass over A.
    a = lora_a.astype(x.dtype)
    if choice is not None and choice.kernel is few_rows:
        w = (kernel.qvalue, kernel.scale) if is_quantised else (kernel, None)
        return choice.launch(x, *w, a, lora_b, g, scale, bias), None, z
    # The dense copy of a quantised kernel lives only as long as this product.
    kernel = quantised.dense(kernel, x.dtype)
    if choice is not None and choice.kernel is project:
        return *choice.launch(x, kernel, z, lora_b, g, bias, **options), z
    base = dot(x, kernel, (-1, 0))
    if choice is not None and choice.kernel is few_rows_finish:
        unscaled, s = (dot(x, a, (-1, 0)), scale) if seed is None else (z, one)
        return choice.launch(base, unscaled, lora_b, g, s, bias), None, z
    if choice is not None and choice.kernel is expand_compose:
        g = jnp.ones(out, jnp.float32) if g is None else g
        return *choice.launch(base, z, lora_b, g, one, bias, **options), z
    return *forward(choice, base, dot(z, lora_b, (-1, 0)), g, one, bias, **options), z


def _forward_with_sharded_inputs(
    static: Static, shard: Shard, operands: Projection
) -> tuple[Any, Any, jax.Array]:
    """Returns (y, inner or None, z), summed over the devices that share the input features.

    Each device uses its own summand of z, so that no product waits for the sum of z.
    """
    single = dataclasses.replace(shard, summed=())
    g, bias = operands.g, shard.on_first_device(operands.bias)
    if not static.want_inner:
        y, _, z = _forward(static, single, operands._replace(bias=bias))
        return shard.sum(y), None, shard.sum(z)
    # inner is summed before g is applied, because the backward pass needs the whole inner.
    static = static._replace(want_inner=False)
    inner, _, z = _forward(static, single, operands._replace(g=None, bias=None))
    inner = shard.sum(inner)
    zeros, one = jnp.zeros_like(inner), jnp.float32(1)
    y, _ = forward(None, inner, zeros, g, one, operands.bias, want_inner=False)
    return y, inner, shard.sum(z)


def _forward_with_quantised_rows(
    static: Static, shard: Shard, operands: Projection
) -> tuple[Any, Any, jax.Array]:
    """Returns (y, inner or None, z), with base as an FP8 product with one scale per row of x.

    The adapter's products, g and the bias have the same dtypes as without quantised activations.
    """
    x, kernel, _, lora_b, g, _, bias, seed, scaled = operands
    one, options = jnp.float32(1), {"want_inner": static.want_inner}
    lora_b = lora_b.astype(x.dtype)
    z = shard.sum(reduce(static, shard, Reduction(x, scaled, seed)))
    base = row_wise.sums(x, kernel, shard, static.implementation)
    out, rank = kernel.shape[1], z.shape[-1]
    call = (base.total.size // max(out, 1), rank, out, base.total.dtype)
    choice = choose.choose(static.op, static.implementation, (expand_compose, call))
    if choice is not None:
        g = jnp.ones(out, jnp.float32) if g is None else g
        scales = base.rows, base.columns
        return *choice.launch(base.total, z, lora_b, g, one, bias, scales, **options), z
    lora = dot_general(static.precision, z, lora_b, (-1, 0))
    y, inner = forward(None, base.scaled, lora, g, one, bias, **options)
    return y.astype(x.dtype), None if inner is None else inner.astype(x.dtype), z


FORWARD = Op(
    "project",
    _forward,
    Projection("t i", "i o", "i r", "r o", "o", "", "o", "s", "i r"),
    ("t o", "t o", "t r"),
    contracted="i",
    is_projection=True,
)


class Back(NamedTuple):
    """The operands of `BACK`.

    If the outputs are sharded, each device computes its partial dz from lora_b, so that no product
    waits for the sum of dz over devices.

    Attributes:
      d: [..., out].
      kernel: [in, out].
      dz: [..., r], d lora_bᵀ.
      lora_a: [in, r], s·A.
      lora_b: [r, out].
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
    choice = choose.choose(static.op, static.implementation, (project_back, call), optional=True)
    if choice is not None:
        choice = choice.during_collectives(shard.gathered or shard.shares_rows)
        dx = choice.launch(d, kernel, dz, *shard.gathered_first(lora_a))
        return (shard.sum(dx),)
    return (shard.sum(dot(d, kernel, (-1, 1)) + dot(dz, lora_a, (-1, 1))),)


BACK = Op(
    "project_back",
    _back,
    Back("t o", "i o", "t r", "i r", "r o"),
    ("t i",),
    contracted="o",
    is_projection=True,
)
