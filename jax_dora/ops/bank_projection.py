"""Whole projections of prompts with many adapters: y = g[id]∘(x W + s[id]·x A[id] B[id]) + bias.

With kernels, z = x A comes first, by `mosaic.bank_shrink`, which reads each adapter where it lies.
Then x W and z B are one product, `mosaic.bank_project`: no base result is written or read, nor a
layer's W copied out of a stack, as XLA does for its own product.

A row of -1 is to have the bits of XLA's product without a bank, and no row's bits may depend on the
others': where a batch has a row of -1, XLA multiplies too, and such rows keep its result. Where the
kernels do not take every projection of an x, XLA's product is all rows', and what is the adapters'
is added as in `bank`.
"""

import functools
from collections.abc import Callable, Sequence
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


class WholeProjection(NamedTuple):
    """One of several projections of the same x, the base's product included.

    Attributes:
      kernel: [in, out], of x's dtype; or those of a stack, [layers, in, out].
      slots, part, bias: as `bank.bank_linear`'s.
      layer: i32[], the one that is meant, where there are several.
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
    """Returns each row of several projections of the same x with the adapter of its slot.

    Args:
      x: [batch, time, in].
      ids, precision: as `bank.bank_linear`'s.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" stands for one
        product where there is a kernel for it, and else for what `bank.bank_linear` means by it.

    Returns:
      [batch, time, out] of each, in x's dtype. A row of -1 is XLA's x W + bias, bit for bit; one of
      an id that has no slot, or of an empty slot, is NaN.

    Raises:
      NotImplementedError: the named implementation cannot take the call.
    """
    operands = []
    for kernel, slots, layer, part, bias in projections:
        first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
        rows = rows_of(slots, ids, first, count, accumulator(x.dtype))
        lora_a, lora_b = (one.astype(x.dtype) for one in (slots.lora_a, slots.lora_b))
        stack, number = (kernel[None], jnp.int32(0)) if kernel.ndim == 2 else (kernel, layer)
        operands.append(ProjectionOperands(stack, number, lora_a, lora_b, *rows, bias))
    by = static_precision(precision)
    static = Static("bank_linear", implementation, by, of_expand=implementation)
    return called(PROJECT, _define, static, PromptOperands(x, ids < 0, tuple(operands)))


class ProjectionOperands(NamedTuple):
    """The operands of one of the projections: kernel [layers, in, out], layer i32[], lora_a
    [slots, rank, in], lora_b [slots, rank, out], `Rows`, bias [out] or None."""

    kernel: Any
    layer: Any
    lora_a: Any
    lora_b: Any
    slot: Any
    g: Any
    scale: Any
    bias: Any


class PromptOperands(NamedTuple):
    """The operands of all projections of x [batch, time, in]; is_base bool[batch] names the rows
    that are the base's alone."""

    x: Any
    is_base: Any
    projections: tuple[ProjectionOperands, ...]


def _run(static: Static, shard: Shard, prompts: PromptOperands) -> tuple[jax.Array, ...]:
    x, is_base, projections = prompts
    calls = [_by_kernels(static, x, one) for one in projections]
    taken = [(one, call) for one, call in zip(projections, calls, strict=True) if call]

    # Either way makes its own results: XLA copies what a way only hands on.
    def without_base() -> tuple[jax.Array, ...]:
        return tuple(project() for _, project in taken)

    def with_base() -> tuple[jax.Array, ...]:
        chosen = is_base[:, None, None]
        return tuple(jnp.where(chosen, _alone(static, x, one), project()) for one, project in taken)

    found = iter(lax.cond(jnp.any(is_base), with_base, without_base) if taken else ())
    return tuple(
        next(found) if call else primitive.call(EXPAND, *_expansion(static, x, one))[0]
        for one, call in zip(projections, calls, strict=True)
    )


def _by_kernels(
    static: Static, x: jax.Array, one: ProjectionOperands
) -> Callable[[], jax.Array] | None:
    """Returns a function that computes a projection by kernels, for which x A is computed already,
    or None where they do not take it."""
    (batch, time, in_features), out, rank = x.shape, one.g.shape[-1], one.lora_a.shape[1]

    def chosen(kernel: Any, *sizes: int) -> choose.Choice | None:
        call = (kernel, (batch, time, *sizes, x.dtype))
        return choose.choose(static.op, static.implementation, call, optional=True)

    shrink = chosen(bank_shrink, in_features, rank)
    project = chosen(bank_project, in_features, out, rank)
    if shrink is None or project is None:
        return None
    unscaled = bank_shrink.launch(x, one.lora_a, one.slot, **shrink.knobs)
    z = (one.scale[:, None, None] * unscaled).astype(x.dtype)
    operands = x, one.kernel, one.layer, z, one.lora_b, one.slot, one.g, one.bias
    return functools.partial(bank_project.launch, *operands, **project.knobs)


# Without names: on a mesh of several devices XLA shares the work, but for the second product.
PROJECT = Op("bank_project", _run, (), ())


def _base(static: Static, x: jax.Array, one: ProjectionOperands) -> jax.Array:
    kernel = lax.dynamic_index_in_dim(one.kernel, one.layer, keepdims=False)
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, contracted, precision=static.precision)


def _alone(static: Static, x: jax.Array, one: ProjectionOperands) -> jax.Array:
    """Returns the base's results."""
    # XLA would take the layer's kernel out of a stack for either way, by a copy.
    base = _base(static, x, one._replace(layer=lax.optimization_barrier(one.layer)))
    if one.bias is None:
        return base
    return (base.astype(one.g.dtype) + one.bias.astype(one.g.dtype)[None, None]).astype(x.dtype)


def _expansion(static: Static, x: jax.Array, one: ProjectionOperands) -> tuple[Static, Expansion]:
    """Returns the second product, and what follows it, of the results of the others."""
    z = jnp.einsum("nti,nri->ntr", x, one.lora_a[one.slot], precision=static.precision)
    given = one.lora_b, one.slot, one.g, one.scale, one.bias
    operands = Expansion(_base(static, x, one), z, *given)
    return static._replace(implementation=static.of_expand), operands


def _define(static: Static, prompts: PromptOperands) -> tuple[jax.Array, ...]:
    x, _, projections = prompts
    return tuple(expanded(*_expansion(static, x, one))[0] for one in projections)
