"""Many adapters in one batch: for each row, y = g[id]∘(base + s[id]·x A[id] B[id]) + bias.

Adapters are constant while they are served, so g = magnitude / ‖W + sAB‖ is stored in the adapter's
slot, and DoRA costs the same as LoRA. The rank is the first axis of a slot's matrices, so that an
adapter whose rank is below the bank's maximum is contiguous in memory.

- Rows of one token (decoding): the Mosaic kernels `bank_decode` and `bank_rows` support up to
  512 rows and read each adapter of the batch once. Otherwise XLA computes the products
  (`bank_xla`). Both compute only the adapters' products, which do not depend on base and may run
  concurrently with it. XLA fuses the composition with the operations that follow.
- Rows of several tokens (prompts): up to 256 tokens are rows of the same kernels. Otherwise a
  batched product, with one adapter per row. The Mosaic kernel
  `bank_expand` computes the second product and the composition in one pass.
- `bank_projection` also computes base, if it is not used elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.bank_slots import Rows, Slots, compose_rows, rows_of
from jax_dora.ops.bank_xla import low_rank_product
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.primitive import call_differentiable
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulator, static_precision
from jax_dora.ops.mosaic.bank import bank_decode, bank_expand, bank_rows
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member, plan

# The most tokens of prompts that are rows of the kernels for decoding. With 256 tokens these took
# 345 µs a layer, or 375 without `jax_dora.bank.DECODING_OPTIONS`, and XLA's products 384; with 512
# tokens 574, 632 and 620 (`h100/tried.jsonl`, "small prompts with a bank, tiles of 64 rows, one
# layer").
MOST_PROMPT_TOKENS = 256


# The name of the public function, for error messages.
OP = "bank_linear"


class BankSettings(NamedTuple):
    """The settings of the operators of a bank.

    Attributes:
      implementation, precision: see `bank_linear`.
      slots: the number of slots; only for rows of one token.
    """

    implementation: str | None
    precision: Any
    slots: int = 0


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
    """Returns a projection's result, with an adapter for each row of the batch.

    Args:
      base: [batch, time, out], x times the kernel.
      x: [batch, time, in].
      slots: the adapters.
      ids: i32[batch], each row's slot, from `checked_ids`; -1 for the base without an adapter.
      part: (first, count): use only slots `first` to `first + count`, for one layer of a stack
        whose `slots` hold all layers. ids count from `first`.
      step: `step_of` the ids, which all projections of a model share; computed here if None.
      bias: [out]; never scaled.
      precision: the precision of the products, as in `jax.lax.dot_general`.
      implementation: None, "mosaic" or "xla"; a named one runs or raises. "mosaic" uses a kernel
        for both products of rows of one token; for prompts, for the second product and the
        composition.

    Returns:
      [batch, time, out] in base's dtype. A row of id -1 is base + bias, bit for bit. A row of an
      invalid id or an empty slot is NaN.

    Raises:
      NotImplementedError: the named implementation does not support the call.
    """
    (y,) = bank_linears(
        x,
        [Projection(base, slots, part, bias)],
        ids,
        step=step,
        precision=precision,
        implementation=implementation,
    )
    return y


class Projection(NamedTuple):
    """One of several projections of the same x. The fields are `bank_linear`'s arguments."""

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
    """Returns `bank_linear` for several projections of the same x [batch, time, in].

    A kernel for rows of one token computes all projections with as many launches as for one.

    Args:
      x, ids, step, precision, implementation: see `bank_linear`.
      projections: projections with the same number of slots and the same maximum rank.
    """
    batch, time, _ = x.shape
    settings = BankSettings(implementation, static_precision(precision))
    members, rows = [], []
    for base, slots, part, _ in projections:
        first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
        settings = settings._replace(slots=count)
        members.append(Member(slots.lora_a, slots.lora_b, slots.rank, first))
        rows.append(rows_of(slots, ids, first, count, accumulator(base.dtype)))
    call = BatchOperands(
        x,
        ids,
        tuple(members),
        tuple(projection.base for projection in projections),
        tuple(rows),
        tuple(projection.bias for projection in projections),
    )
    if takes_tokens_as_rows(batch, time, implementation):
        return call_differentiable(PROMPTS, _define_prompts, settings, call)
    if time != 1:
        return [
            call_differentiable(EXPAND, expand, settings, operands)[0]
            for operands in _expansions(settings, call)
        ]
    tokens = TokenOperands(x[:, 0], call.members, ids, step)
    if _choice(settings, tokens) is None:
        products = _products(settings, tokens)
    else:
        products = call_differentiable(TOKENS, _products, settings, tokens)
    return _composed(call, products)


def takes_tokens_as_rows(batch: int, time: int, implementation: str | None) -> bool:
    """Returns whether the kernels for rows of one token may compute prompts [batch, time]."""
    return time > 1 and implementation is None and batch * time <= MOST_PROMPT_TOKENS


def step_of(
    ids: jax.Array,
    slots: int,
    projections: Iterable[tuple[int, int, int, Any]],
    implementation: str | None = None,
) -> jax.Array | None:
    """Returns the plan of a decoding step for the kernels, which all projections of a model share.

    It is None if no kernel supports a projection.

    Args:
      ids: i32[batch], from `bank_slots.checked_ids`.
      slots: the number of slots.
      projections: (in, out, maximum rank, dtype of x and of the adapters) of each projection.
      implementation: see `bank_linear`.
    """
    calls = (
        (ids.shape[0], fan_in, out, slots, rank, dtype, dtype)
        for fan_in, out, rank, dtype in projections
    )
    has_kernel = any(
        choose.choose(OP, implementation, *_candidates(call), optional=True) for call in calls
    )
    return plan(ids, slots) if has_kernel else None


class Expansion(NamedTuple):
    """The operands of the second product and the composition.

    Attributes:
      base: [batch, time, out].
      z: [batch, time, rank].
      lora_b: [slots, rank, out].
      slot, g, scale: see `Rows`.
      bias: [out], or None.
    """

    base: Any
    z: Any
    lora_b: Any
    slot: Any
    g: Any
    scale: Any
    bias: Any


def _run_expand(settings: BankSettings, shard: Shard, operands: Expansion) -> tuple[jax.Array]:
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
    choice = choose.choose(OP, settings.implementation, (bank_expand, call))
    if choice is None:
        (y,) = expand(settings, flat)
    else:
        y = choice.launch(*flat)
    return (y.reshape(base.shape),)


EXPAND = Op(
    "bank_expand", _run_expand, Expansion("t o", "t r", "s r o", "t", "t o", "t", "o"), ("t o",)
)


def expansion(
    settings: BankSettings,
    x: jax.Array,
    base: jax.Array,
    matrices: tuple[jax.Array, jax.Array],
    rows: Rows,
    bias: jax.Array | None,
) -> Expansion:
    """Returns the operands of `EXPAND`, with x A by a batched product; `matrices` are lora_a and
    lora_b of all slots."""
    lora_a, lora_b = matrices
    own_a = lora_a[rows.slot].astype(x.dtype)
    z = jnp.einsum("nti,nri->ntr", x, own_a, precision=settings.precision)
    return Expansion(base, z, lora_b.astype(x.dtype), *rows, bias)


def expand(settings: BankSettings, operands: Expansion) -> tuple[jax.Array]:
    """Returns the second product and the composition, by their definition."""
    base, z, lora_b, slot, g, scale, bias = operands
    lora = jnp.einsum("ntr,nro->nto", z, lora_b[slot], precision=settings.precision)
    return (compose_rows(base, lora, Rows(slot, g, scale), bias),)


class TokenOperands(NamedTuple):
    """The operands of the products for rows of one token.

    Attributes:
      x: [rows, in].
      members: the adapters of each projection of x.
      ids: i32[rows].
      step: `step_of` the ids, or None.
    """

    x: Any
    members: tuple[Member, ...]
    ids: Any
    step: Any


class BatchOperands(NamedTuple):
    """The operands of all projections of the same x.

    Attributes:
      x: [batch, time, in].
      ids: i32[batch].
      members: the adapters of each projection.
      bases: [batch, time, out] of each projection.
      rows: `bank_slots.rows_of` of each projection.
      biases: [out] or None, of each projection.
    """

    x: Any
    ids: Any
    members: tuple[Member, ...]
    bases: tuple[Any, ...]
    rows: tuple[Rows, ...]
    biases: tuple[Any, ...]


def _run_prompts(
    settings: BankSettings, shard: Shard, call: BatchOperands
) -> tuple[jax.Array, ...]:
    batch, time, in_features = call.x.shape
    row_ids = jnp.repeat(call.ids, time)
    x = call.x.reshape(batch * time, in_features)
    tokens = TokenOperands(x, call.members, row_ids, None)
    if _choice(settings, tokens) is None:
        return _define_prompts(settings, call)
    return _composed(call, _run_tokens(settings, shard, tokens))


# As for `TOKENS`, XLA computes and partitions it on a mesh of several devices.
PROMPTS = Op("bank_prompts", _run_prompts, (), ())


def _define_prompts(settings: BankSettings, call: BatchOperands) -> tuple[jax.Array, ...]:
    return tuple(expand(settings, operands)[0] for operands in _expansions(settings, call))


def _expansions(settings: BankSettings, call: BatchOperands) -> Iterator[Expansion]:
    """Yields the operands of `EXPAND` for each projection."""
    x, _, members, bases, rows, biases = call
    for member, base, own, bias in zip(members, bases, rows, biases, strict=True):
        yield expansion(settings, x, base, (member.lora_a, member.lora_b), own, bias)


def _composed(call: BatchOperands, products: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the projections, given the adapters' products of all tokens [tokens, out]."""
    _, _, _, bases, rows, biases = call
    return tuple(
        compose_rows(base, lora.reshape(base.shape), own, bias)
        for base, lora, own, bias in zip(bases, products, rows, biases, strict=True)
    )


def _candidates(call: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the candidate kernels for rows of one token, for `choose.choose`."""
    return [(bank_decode, call), (bank_rows, call)]


def _choice(settings: BankSettings, tokens: TokenOperands) -> choose.Choice | None:
    """Returns the kernel that was chosen for every projection, or None if they differ."""
    x, lora_a = tokens.x, tokens.members[0].lora_a
    outs = [member.lora_b.shape[2] for member in tokens.members]

    def call(out: int) -> tuple[Any, ...]:
        return (*x.shape, out, settings.slots, lora_a.shape[1], x.dtype, lora_a.dtype)

    choices = [choose.choose(OP, settings.implementation, *_candidates(call(out))) for out in outs]
    kernels = {choice and choice.kernel for choice in choices}
    if choices[0] is None or len(kernels) > 1:
        return None
    config = choices[0].kernel.config(*call(sum(outs)), members=len(outs))
    return choices[0]._replace(config=config)


def _run_tokens(
    settings: BankSettings, shard: Shard, tokens: TokenOperands
) -> tuple[jax.Array, ...]:
    choice = _choice(settings, tokens)
    if choice is None:
        return _products(settings, tokens)
    return choice.launch(*tokens, slots=settings.slots)


# The operator has no axis names, so on a mesh of several devices XLA computes and partitions it.
TOKENS = Op("bank_rows", _run_tokens, (), ())


def _products(settings: BankSettings, tokens: TokenOperands) -> tuple[jax.Array, ...]:
    """Returns x A B of each projection, by XLA."""
    x, members, ids, _ = tokens
    return tuple(
        low_rank_product(
            x, (member.lora_a, member.lora_b), ids, member.first, settings.slots, settings.precision
        )
        for member in members
    )
