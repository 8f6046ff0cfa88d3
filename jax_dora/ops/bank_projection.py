"""Whole projections of prompts with many adapters: y = g[id]∘(x W + s[id]·x A[id] B[id]) + bias.

With Mosaic kernels, `bank_shrink` first computes z = x A from the slots, without copying adapters.
`bank_project` then computes x W and z B as one product. Compared with XLA's product, this neither
writes nor reads base, and does not copy a layer's W out of a stack of layers.

A row of id -1 must have the same bits as XLA's product without a bank, and a row's bits must not
depend on other rows. So if a batch has a row of id -1, XLA computes its product too, and those rows
use XLA's result. For a projection that the kernels do not support, and for few tokens, XLA computes
base, and the adapters are added as in `bank`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.bank_linear import (
    EXPAND,
    OP,
    BankSettings,
    bank_linears,
    expand,
    shrunk,
    takes_tokens_as_rows,
)
from jax_dora.ops.bank_slots import Batch, SlotProjection, Slots
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.primitive import call_differentiable
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype, static_precision
from jax_dora.ops.mosaic.bank import bank_project, bank_shrink


def bank_projections(
    x: jax.Array,
    projections: Sequence[SlotProjection],
    ids: jax.Array,
    *,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Sequence[jax.Array]:
    """Returns several projections of the same x [batch, time, in], each [batch, time, out] in x's
    dtype, with an adapter for each row. The arguments are those of `bank_linears`; "mosaic" uses
    the kernels for the whole projection if they support the call, else that of `bank_linears`.

    A row of id -1 is XLA's x W + bias, bit for bit. A row of an invalid id or an empty slot is NaN.
    Raises NotImplementedError if the named implementation does not support the call.
    """
    settings = WholeSettings(
        implementation, BankSettings(implementation, static_precision(precision))
    )
    if takes_tokens_as_rows(x.shape[0], x.shape[1], implementation):
        bases = [
            projection._replace(base=_base(settings, x, projection), kernel=None, layer=None)
            for projection in projections
        ]
        return bank_linears(x, bases, ids, precision=precision)
    operands = [_operands(x, ids, projection) for projection in projections]
    return call_differentiable(PROJECT, _define, settings, Batch(x, ids, tuple(operands)))


def _operands(x: jax.Array, ids: jax.Array, projection: SlotProjection) -> SlotProjection:
    """Returns a projection as an operand of `PROJECT`, with a stack of kernels."""
    found = projection.of_rows(ids, accumulation_dtype(x.dtype))
    lora_a, lora_b = (array.astype(x.dtype) for array in found.slots[:2])
    found = found._replace(slots=Slots(lora_a, lora_b, None, None, None), first=None)
    if found.kernel.ndim == 2:
        return found._replace(kernel=found.kernel[None], layer=jnp.int32(0))
    return found


class WholeSettings(NamedTuple):
    """The settings of `PROJECT`: `bank_projections`' implementation, and those of `EXPAND`."""

    implementation: str | None
    expand: BankSettings


def _run(settings: WholeSettings, shard: Shard, batch: Batch) -> tuple[jax.Array, ...]:
    x, is_base, projections = batch.x, batch.ids < 0, batch.projections
    launches = [_with_kernels(settings, x, p) for p in projections]
    with_kernels = [(p, launch) for p, launch in zip(projections, launches, strict=True) if launch]

    # Both branches launch the kernels themselves: XLA copies an array that a branch only passes on.
    def without_base() -> tuple[jax.Array, ...]:
        return tuple(launch() for _, launch in with_kernels)

    def with_base() -> tuple[jax.Array, ...]:
        return tuple(
            jnp.where(is_base[:, None, None], _without_adapter(settings, x, p), launch())
            for p, launch in with_kernels
        )

    found = iter(lax.cond(jnp.any(is_base), with_base, without_base) if with_kernels else ())
    return tuple(
        next(found)
        if launch
        else primitive.call(EXPAND, settings.expand, _shrunk(settings, x, p))[0]
        for p, launch in zip(projections, launches, strict=True)
    )


def _with_kernels(
    settings: WholeSettings, x: jax.Array, p: SlotProjection
) -> Callable[[], jax.Array] | None:
    """Returns a function that computes a projection with Mosaic kernels, after x A, or None."""
    (batch, time, in_features), out, rank = x.shape, p.rows.g.shape[-1], p.slots.lora_a.shape[1]

    def choice(kernel: Any, *sizes: int) -> choose.Choice | None:
        call = (kernel, (batch, time, *sizes, x.dtype))
        return choose.choose(OP, settings.implementation, call, optional=True)

    shrink = choice(bank_shrink, in_features, rank)
    project = choice(bank_project, in_features, out, rank)
    if shrink is None or project is None:
        return None
    unscaled = shrink.launch(x, p.slots.lora_a, p.rows.slot)
    z = (p.rows.scale[:, None, None] * unscaled).astype(x.dtype)
    operands = x, p.kernel, p.layer, z, p.slots.lora_b, *p.rows[:2], p.bias
    return functools.partial(project.launch, *operands)


# The operator has no axis names, so on a mesh of several devices XLA computes and partitions it,
# except for `EXPAND`.
PROJECT = Op("bank_project", _run, (), ())


def _base(settings: WholeSettings, x: jax.Array, p: SlotProjection) -> jax.Array:
    """Returns x W."""
    kernel = p.kernel
    if p.layer is not None:
        kernel = lax.dynamic_index_in_dim(kernel, p.layer, keepdims=False)
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, contracted, precision=settings.expand.precision)


def _without_adapter(settings: WholeSettings, x: jax.Array, p: SlotProjection) -> jax.Array:
    """Returns x W + bias."""
    # The barrier keeps XLA from copying the layer's kernel out of a stack before the branch.
    base = _base(settings, x, p._replace(layer=lax.optimization_barrier(p.layer)))
    # Added as `nnx.Linear` does: XLA can add such a bias before it rounds the product, so that any
    # other sum may have other bits.
    return base if p.bias is None else base + p.bias.astype(x.dtype)[None, None]


def _shrunk(settings: WholeSettings, x: jax.Array, p: SlotProjection) -> SlotProjection:
    """Returns the operands of `EXPAND`, after the products x W and x A."""
    return shrunk(settings.expand, x, p._replace(base=_base(settings, x, p)))


def _define(settings: WholeSettings, batch: Batch) -> tuple[jax.Array, ...]:
    return tuple(
        expand(settings.expand, _shrunk(settings, batch.x, p))[0] for p in batch.projections
    )
