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
    Expansion,
    Projection,
    bank_linears,
    expand,
    expansion,
    takes_tokens_as_rows,
)
from jax_dora.ops.bank_slots import Rows, Slots, rows_of
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.primitive import call_differentiable
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulator, static_precision
from jax_dora.ops.mosaic.bank import bank_project, bank_shrink


class WholeProjection(NamedTuple):
    """One of several projections of the same x, including the product with the kernel.

    Attributes:
      kernel: [in, out] in x's dtype; or the kernels of a stack of layers, [layers, in, out].
      slots, part, bias: see `bank.bank_linear`.
      layer: i32[], the index of the layer in a stack.
    """

    kernel: jax.Array
    slots: Slots
    layer: jax.Array | None = None
    part: tuple[jax.Array, int] | None = None
    bias: jax.Array | None = None


def bank_projections(
    x: jax.Array,
    projections: Sequence[WholeProjection],
    ids: jax.Array,
    *,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Sequence[jax.Array]:
    """Returns several projections of the same x, with an adapter for each row of the batch.

    Args:
      x: [batch, time, in].
      projections: the projections.
      ids, precision: see `bank.bank_linear`.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" uses the kernels
        for the whole projection if they support the call, else the kernel of `bank.bank_linear`.

    Returns:
      [batch, time, out] for each projection, in x's dtype. A row of id -1 is XLA's x W + bias, bit
      for bit. A row of an invalid id or an empty slot is NaN.

    Raises:
      NotImplementedError: the named implementation does not support the call.
    """
    settings = WholeSettings(
        implementation, BankSettings(implementation, static_precision(precision))
    )
    if takes_tokens_as_rows(x.shape[0], x.shape[1], implementation):
        bases = [
            Projection(_base(settings, x, kernel, layer), slots, part, bias)
            for kernel, slots, layer, part, bias in projections
        ]
        return bank_linears(x, bases, ids, precision=precision)
    operands = []
    for kernel, slots, layer, part, bias in projections:
        first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
        rows = rows_of(slots, ids, first, count, accumulator(x.dtype))
        lora_a, lora_b = slots.lora_a.astype(x.dtype), slots.lora_b.astype(x.dtype)
        if kernel.ndim == 2:
            kernel, layer = kernel[None], jnp.int32(0)
        operands.append(ProjectionOperands(kernel, layer, lora_a, lora_b, *rows, bias))
    prompts = PromptOperands(x, ids < 0, tuple(operands))
    return call_differentiable(PROJECT, _define, settings, prompts)


class WholeSettings(NamedTuple):
    """The settings of `PROJECT`: `bank_projections`' implementation, and those of `EXPAND`."""

    implementation: str | None
    expand: BankSettings


class ProjectionOperands(NamedTuple):
    """The operands of one projection.

    Attributes:
      kernel: [layers, in, out].
      layer: i32[].
      lora_a: [slots, rank, in].
      lora_b: [slots, rank, out].
      slot, g, scale: see `bank_slots.Rows`.
      bias: [out], or None.
    """

    kernel: Any
    layer: Any
    lora_a: Any
    lora_b: Any
    slot: Any
    g: Any
    scale: Any
    bias: Any


class PromptOperands(NamedTuple):
    """The operands of all projections of the same x.

    Attributes:
      x: [batch, time, in].
      is_base: bool[batch], which rows have no adapter.
      projections: the operands of each projection.
    """

    x: Any
    is_base: Any
    projections: tuple[ProjectionOperands, ...]


def _run(settings: WholeSettings, shard: Shard, prompts: PromptOperands) -> tuple[jax.Array, ...]:
    x, is_base, projections = prompts
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
        next(found) if launch else primitive.call(EXPAND, *_expansion(settings, x, p))[0]
        for p, launch in zip(projections, launches, strict=True)
    )


def _with_kernels(
    settings: WholeSettings, x: jax.Array, p: ProjectionOperands
) -> Callable[[], jax.Array] | None:
    """Returns a function that computes a projection with Mosaic kernels, or None.

    x A is computed here, the rest when the function is called.
    """
    (batch, time, in_features), out, rank = x.shape, p.g.shape[-1], p.lora_a.shape[1]

    def choice(kernel: Any, *sizes: int) -> choose.Choice | None:
        call = (kernel, (batch, time, *sizes, x.dtype))
        return choose.choose(OP, settings.implementation, call, optional=True)

    shrink = choice(bank_shrink, in_features, rank)
    project = choice(bank_project, in_features, out, rank)
    if shrink is None or project is None:
        return None
    unscaled = shrink.launch(x, p.lora_a, p.slot)
    z = (p.scale[:, None, None] * unscaled).astype(x.dtype)
    operands = x, p.kernel, p.layer, z, p.lora_b, p.slot, p.g, p.bias
    return functools.partial(project.launch, *operands)


# The operator has no axis names, so on a mesh of several devices XLA computes and partitions it,
# except for `EXPAND`.
PROJECT = Op("bank_project", _run, (), ())


def _base(
    settings: WholeSettings, x: jax.Array, kernel: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """Returns x W."""
    if layer is not None:
        kernel = lax.dynamic_index_in_dim(kernel, layer, keepdims=False)
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, contracted, precision=settings.expand.precision)


def _without_adapter(settings: WholeSettings, x: jax.Array, p: ProjectionOperands) -> jax.Array:
    """Returns x W + bias."""
    # The barrier keeps XLA from copying the layer's kernel out of a stack before the branch.
    base = _base(settings, x, p.kernel, lax.optimization_barrier(p.layer))
    # Added as `nnx.Linear` does: XLA can add such a bias before it rounds the product, so that any
    # other sum may have other bits.
    return base if p.bias is None else base + p.bias.astype(x.dtype)[None, None]


def _expansion(
    settings: WholeSettings, x: jax.Array, p: ProjectionOperands
) -> tuple[BankSettings, Expansion]:
    """Returns the settings and operands of `EXPAND`, after the products x W and x A."""
    base, rows = _base(settings, x, p.kernel, p.layer), Rows(p.slot, p.g, p.scale)
    operands = expansion(settings.expand, x, base, (p.lora_a, p.lora_b), rows, p.bias)
    return settings.expand, operands


def _define(settings: WholeSettings, prompts: PromptOperands) -> tuple[jax.Array, ...]:
    x, _, projections = prompts
    return tuple(expand(*_expansion(settings, x, p))[0] for p in projections)
