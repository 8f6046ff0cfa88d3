"""Whole projections of prompts with many adapters: y = g[id]∘(x W + s[id]·x A[id] B[id]) + bias.

With kernels, z = x A comes first, by `mosaic.bank_shrink`, which reads each adapter where it lies.
Then x W and z B are one product, `mosaic.bank_project`: no base result is written or read, nor a
layer's W copied out of a stack, as XLA does for its own product.

A row of -1 is to have the bits of XLA's product without a bank, and no row's bits may depend on the
others': where a batch has a row of -1, XLA multiplies too, and such rows keep its result. Where the
kernels are not taken, XLA's product is all rows', and what is the adapters' is added as in `bank`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import choose, primitive
from jax_dora.ops.bank import EXPAND, Expansion, called, expanded
from jax_dora.ops.bank_slots import Slots, rows_of
from jax_dora.ops.compose import accumulator
from jax_dora.ops.mosaic import bank_project, bank_shrink
from jax_dora.ops.operands import Static
from jax_dora.ops.reduction import static_precision
from jax_dora.ops.shard import Op, Shard


def bank_projection(
    x: jax.Array,
    kernel: jax.Array,
    slots: Slots,
    ids: jax.Array,
    *,
    layer: jax.Array | None = None,
    part: tuple[jax.Array, int] | None = None,
    bias: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns each row of a projection with the adapter of its slot, the base's product included.

    Args:
      x: [batch, time, in].
      kernel: [in, out], of x's dtype; or those of a stack, [layers, in, out].
      layer: i32[], the one that is meant, where there are several.
      slots, ids, part, bias, precision: as `bank.bank_linear`'s.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" stands for one
        product where there is a kernel for it, and else for what `bank.bank_linear` means by it.

    Returns:
      [batch, time, out] in x's dtype. A row of -1 is XLA's x W + bias, bit for bit; one of an id
      that has no slot, or of an empty slot, is NaN.

    Raises:
      NotImplementedError: the named implementation cannot take the call.
    """
    first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
    rows = rows_of(slots, ids, first, count, accumulator(x.dtype))
    lora_a, lora_b = (one.astype(x.dtype) for one in (slots.lora_a, slots.lora_b))
    if kernel.ndim == 2:
        kernel, layer = kernel[None], jnp.int32(0)
    operands = Prompts(x, kernel, layer, lora_a, lora_b, *rows, ids < 0, bias)
    by = static_precision(precision)
    static = Static("bank_linear", implementation, by, of_expand=implementation)
    (y,) = called(PROJECT, _define, static, operands)
    return y


class Prompts(NamedTuple):
    """The operands of a call: x [batch, time, in], kernel [layers, in, out], layer i32[], lora_a
    [slots, rank, in], lora_b [slots, rank, out], `Rows`, is_base bool[batch], bias [out] or
    None."""

    x: Any
    kernel: Any
    layer: Any
    lora_a: Any
    lora_b: Any
    slot: Any
    g: Any
    scale: Any
    is_base: Any
    bias: Any


def _run(static: Static, shard: Shard, prompts: Prompts) -> tuple[jax.Array]:
    x, lora_a, g = prompts.x, prompts.lora_a, prompts.g
    (batch, time, in_features), out, rank = x.shape, g.shape[-1], lora_a.shape[1]

    def chosen(kernel: Any, *sizes: int) -> choose.Choice | None:
        call = (kernel, (batch, time, *sizes, x.dtype))
        return choose.choose(static.op, static.implementation, call, optional=True)

    shrink = chosen(bank_shrink, in_features, rank)
    project = chosen(bank_project, in_features, out, rank)
    if shrink is None or project is None:
        return primitive.call(EXPAND, *_expansion(static, prompts))
    unscaled = bank_shrink.launch(x, lora_a, prompts.slot, **shrink.knobs)
    z = (prompts.scale[:, None, None] * unscaled).astype(x.dtype)
    of_all = x, prompts.kernel, prompts.layer
    adapted = z, prompts.lora_b, prompts.slot, g, prompts.bias
    y = bank_project.launch(*of_all, *adapted, **project.knobs)

    def with_base() -> jax.Array:
        # XLA would take the layer's kernel out of a stack for either way, by a copy.
        here = prompts._replace(layer=lax.optimization_barrier(prompts.layer))
        base = _base(static, here)
        if prompts.bias is not None:
            base = (base.astype(g.dtype) + prompts.bias.astype(g.dtype)[None, None]).astype(x.dtype)
        return jnp.where(prompts.is_base[:, None, None], base, y)

    return (lax.cond(jnp.any(prompts.is_base), with_base, lambda: y),)


# Without names: on a mesh of several devices XLA shares the work, but for the second product.
PROJECT = Op("bank_project", _run, (), ())


def _base(static: Static, prompts: Prompts) -> jax.Array:
    kernel = lax.dynamic_index_in_dim(prompts.kernel, prompts.layer, keepdims=False)
    contracted = (((prompts.x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(prompts.x, kernel, contracted, precision=static.precision)


def _expansion(static: Static, prompts: Prompts) -> tuple[Static, Expansion]:
    """Returns the second product, and what follows it, of the results of the others."""
    lora_a = prompts.lora_a[prompts.slot]
    z = jnp.einsum("nti,nri->ntr", prompts.x, lora_a, precision=static.precision)
    given = prompts.lora_b, prompts.slot, prompts.g, prompts.scale, prompts.bias
    operands = Expansion(_base(static, prompts), z, *given)
    return static._replace(implementation=static.of_expand), operands


def _define(static: Static, prompts: Prompts) -> tuple[jax.Array]:
    return expanded(*_expansion(static, prompts))
