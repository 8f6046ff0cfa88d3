"""Many adapters in one batch: y = g[id]∘(base + s[id]·x A[id] B[id]) + bias, row by row.

An adapter that is served does not move, so that g = magnitude / ‖W + sAB‖ is a constant of its slot
and DoRA costs what LoRA does. Ranks lie along the first axis of a slot's matrices, so that the real
ranks of a slot are one piece of memory, whatever the rank that the bank has room for.

Rows of one token (decoding) have kernels, `mosaic.bank_few_rows` and `mosaic.bank_rows`, which read
the adapters that rows have once each, and are taken of up to 256 rows; elsewhere XLA multiplies
(`bank_ways`). Either gives the product with the adapters alone, which waits for nothing of the
base's and may run beside it; XLA fuses what puts both together with what follows. Rows of several
tokens (prompts) are a batched product, the adapter looked up once for each row; with a kernel,
`mosaic.bank_expand`, the second product is taken in one pass with what follows it. Where base is a
product that nobody else needs, `bank_projection` takes all of it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import choose, primitive
from jax_dora.ops import mesh as meshes
from jax_dora.ops.bank_slots import Rows, Slots, composed, rows_of
from jax_dora.ops.bank_ways import low_rank_product
from jax_dora.ops.compose import accumulator
from jax_dora.ops.mosaic import bank_expand, bank_few_rows, bank_rows
from jax_dora.ops.mosaic.bank_rows_sizes import Member, plan
from jax_dora.ops.operands import Static
from jax_dora.ops.reduction import static_precision
from jax_dora.ops.shard import Op, Shard


def bank_linear(
    base: jax.Array,
    x: jax.Array,
    slots: Slots,
    ids: jax.Array,
    *,
    part: tuple[jax.Array, int] | None = None,
    step: jax.Array | None = None,
    bias: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns each row of a projection's result with the adapter of its slot.

    Args:
      base: [batch, time, out], x times the kernel.
      x: [batch, time, in].
      slots: the adapters.
      ids: i32[batch], each row's slot, as `checked_ids` returns them; -1 for the base alone.
      part: (first, count), which of the slots are meant: those of one layer, where `slots` has
        those of a whole stack; ids count from the first.
      step: `step_of` the ids, which all projections of a model share; None to take it here.
      bias: [out]; never scaled.
      precision: of the products, as in `jax.lax.dot_general`.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" stands for the
        second product with all that follows it, and where rows have one token, for both products.

    Returns:
      [batch, time, out] in base's dtype. A row of -1 is base + bias, bit for bit; one of an id that
      has no slot, or of an empty slot, is NaN.

    Raises:
      NotImplementedError: the named implementation cannot take the call.
    """
    if x.shape[1] == 1:
        (y,) = bank_linears(
            x,
            [Projection(base, slots, part, bias)],
            ids,
            step=step,
            precision=precision,
            implementation=implementation,
        )
        return y
    first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
    rows = rows_of(slots, ids, first, count, accumulator(base.dtype))
    lora_a = slots.lora_a[rows.slot].astype(x.dtype)
    z = jnp.einsum("nti,nri->ntr", x, lora_a, precision=precision)
    lora_b = slots.lora_b.astype(x.dtype)
    static = Static("bank_linear", implementation, static_precision(precision))
    (y,) = called(EXPAND, expanded, static, Expansion(base, z, lora_b, *rows, bias))
    return y


class Projection(NamedTuple):
    """One of several projections of the same x, by `bank_linear`'s arguments."""

    base: jax.Array
    slots: Slots
    part: tuple[jax.Array, int] | None = None
    bias: jax.Array | None = None


def bank_linears(
    x: jax.Array,
    projections: Sequence[Projection],
    ids: jax.Array,
    *,
    step: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Sequence[jax.Array]:
    """Returns `bank_linear` of several projections of the same x [batch, 1, in], which kernels take
    at once: as many launches as for one.

    Args:
      projections: with slots of the same number and room; all have g or none has, and so with the
        bias.
    """
    static = Static("bank_linear", implementation, static_precision(precision))
    members, rows = [], []
    for base, slots, part, _ in projections:
        first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
        static = static._replace(slots=count)
        members.append(Member(slots.lora_a, slots.lora_b, slots.rank, first))
        rows.append(rows_of(slots, ids, first, count, accumulator(base.dtype)))
    tokens = TokenOperands(x[:, 0], tuple(members), ids, step)
    if _choice(static, tokens) is None:
        products = _multiplied(static, tokens)
    else:
        products = called(MULTIPLY, _multiplied, static, tokens)
    return [
        composed(one.base, lora[:, None], own, one.bias)
        for one, lora, own in zip(projections, products, rows, strict=True)
    ]


def step_of(
    ids: jax.Array,
    slots: int,
    projections: Iterable[tuple[int, int, int, Any]],
    implementation: str | None = None,
) -> jax.Array | None:
    """Returns the array that tells kernels of a step's rows, made once for all projections of a
    model; None where no kernel takes one.

    Args:
      ids: i32[batch], as `bank_slots.checked_ids` returns them.
      projections: (in, out, ranks that have room, dtype of x and of the adapters) of each.
      implementation: as `bank_linear`'s.
    """
    calls = (
        (ids.shape[0], fan_in, out, slots, rank, dtype, dtype)
        for fan_in, out, rank, dtype in projections
    )
    named = "bank_linear", implementation
    taken = any(choose.choose(*named, *_candidates(call), optional=True) for call in calls)
    return plan(ids, slots) if taken else None


def called(
    op: Op, define: Callable[[Any, Any], tuple[jax.Array, ...]], static: Any, operands: Any
) -> tuple[jax.Array, ...]:
    """Returns the results of an operator, the gradient of which is that of its definition."""
    return meshes.differentiable(_called)((op, define, static), meshes.vary_alike(operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _called(call: tuple[Op, Any, Any], operands: Any) -> tuple[jax.Array, ...]:
    op, _, static = call
    return primitive.call(op, static, operands)


@_called.defjvp
def _called_jvp(call: tuple[Op, Any, Any], primals: Any, tangents: Any) -> Any:
    _, define, static = call
    return jax.jvp(functools.partial(define, static), primals, tangents)


class Expansion(NamedTuple):
    """The operands of the second product and of what follows it: base [batch, time, out], z
    [batch, time, rank], lora_b [slots, rank, out], `Rows`, bias [out] or None."""

    base: Any
    z: Any
    lora_b: Any
    slot: Any
    g: Any
    scale: Any
    bias: Any


def _run(static: Static, shard: Shard, operands: Expansion) -> tuple[jax.Array]:
    base, z, lora_b, slot, g, scale, bias = operands
    groups, out, rank = slot.size, base.shape[-1], z.shape[-1]
    time = base.size // max(groups * out, 1)
    flat = Expansion(
        base.reshape(groups, time, out),
        z.reshape(groups, time, rank),
        lora_b,
        slot.reshape(groups),
        g.reshape(groups, out),
        scale.reshape(groups),
        bias,
    )
    call = (groups, time, rank, out, base.dtype)
    choice = choose.choose(static.op, static.implementation, (bank_expand, call))
    if choice is None:
        (y,) = expanded(static, flat)
    else:
        y = bank_expand.launch(*flat, **choice.knobs)
    return (y.reshape(base.shape),)


EXPAND = Op("bank_expand", _run, Expansion("t o", "t r", "s r o", "t", "t o", "t", "o"), ("t o",))


def expanded(static: Static, operands: Expansion) -> tuple[jax.Array]:
    base, z, lora_b, slot, g, scale, bias = operands
    lora = jnp.einsum("ntr,nro->nto", z, lora_b[slot], precision=static.precision)
    return (composed(base, lora, Rows(slot, g, scale), bias),)


class TokenOperands(NamedTuple):
    """The operands of rows that have one token each: x [rows, in], the projections of it, ids
    i32[rows], `step_of` the ids or None."""

    x: Any
    members: tuple[Member, ...]
    ids: Any
    step: Any


def _candidates(call: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the kernels of rows of one token for a call."""
    return [(bank_few_rows, call), (bank_rows, call)]


def _choice(static: Static, tokens: TokenOperands) -> choose.Choice | None:
    """Returns the kernels that take every projection, or None."""
    x, lora_a = tokens.x, tokens.members[0].lora_a
    outs = [one.lora_b.shape[2] for one in tokens.members]

    def call(out: int) -> tuple[Any, ...]:
        return (*x.shape, out, static.slots, lora_a.shape[1], x.dtype, lora_a.dtype)

    named = static.op, static.implementation
    choices = [choose.choose(*named, *_candidates(call(out))) for out in outs]
    kernels = {choice and choice.kernel for choice in choices}
    if choices[0] is None or len(kernels) > 1:
        return None
    config = choices[0].kernel.config(*call(sum(outs)), members=len(outs))
    return choices[0]._replace(config=config)


def _run_tokens(static: Static, shard: Shard, tokens: TokenOperands) -> tuple[jax.Array, ...]:
    choice = _choice(static, tokens)
    if choice is None:
        return _multiplied(static, tokens)
    return choice.kernel.launch(*tokens, slots=static.slots, **choice.knobs)


# Without names: on a mesh of several devices XLA shares the work, as it knows which of them have
# which features and rows.
MULTIPLY = Op("bank_rows", _run_tokens, (), ())


def _multiplied(static: Static, tokens: TokenOperands) -> tuple[jax.Array, ...]:
    x, members, ids, _ = tokens
    of_call = static.slots, static.precision
    return tuple(
        low_rank_product(x, (one.lora_a, one.lora_b), ids, one.first, *of_call) for one in members
    )
