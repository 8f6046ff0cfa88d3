"""Many adapters in one batch: for each row, y = g[id]∘(base + s[id]·x A[id] B[id]) + bias.

Adapters are constant while they are served, so g = magnitude / ‖W + sAB‖ is stored in the adapter's
slot, and DoRA costs the same as LoRA. The rank is the first axis of a slot's matrices, so that an
adapter whose rank is below the bank's maximum is contiguous in memory.

- Rows of one token (decoding): the Mosaic kernels `bank_decode` and `bank_rows`, and Triton's
  `triton_bank_rows`, support up to 512 rows and read each adapter of the batch once. Otherwise
  XLA computes the products (`bank_xla`). Both compute only the adapters' products, which do not
  depend on base and may run concurrently with it. XLA fuses the composition with the operations
  that follow.
- Rows of several tokens (prompts): up to 256 tokens are rows of the same kernels. Otherwise a
  batched product, with one adapter per row, or `triton_bank_shrink` if Triton is named. The kernels
  `bank_expand` and `triton_bank_expand` compute the second product and the composition in one pass.
- `bank_projection` also computes base, if it is not used elsewhere.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.bank_slots import Batch, Rows, SlotProjection, Slots
from jax_dora.ops.bank_xla import low_rank_product
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.primitive import call_differentiable
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import accumulation_dtype, static_precision
from jax_dora.ops.mosaic.bank import bank_decode, bank_expand, bank_rows
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member
from jax_dora.ops.triton import triton_bank_expand, triton_bank_rows, triton_bank_shrink

# With 256 tokens the kernels took 345 µs a layer, or 375 without `jax_dora.bank.DECODING_OPTIONS`,
# and XLA's products 384; with 512 tokens 574, 632 and 620 (`h100/tried.jsonl`, "small prompts with
# a bank, tiles of 64 rows, one layer").
MOST_PROMPT_TOKENS = 256
"""The most tokens of prompts in one call that are rows of the kernels for decoding, for which
`jax_dora.bank.DECODING_OPTIONS` pays."""


# The name of the public function, for error messages.
OP = "bank_linear"


class BankSettings(NamedTuple):
    """The settings of a bank's operators: `bank_linears`', and the number of slots of a layer for
    rows of one token."""

    implementation: str | None
    precision: Any
    slots: int = 0


def bank_linears(
    x: jax.Array,
    projections: Sequence[SlotProjection],
    ids: jax.Array,
    *,
    step: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Sequence[jax.Array]:
    """Returns the results of projections of the same x [batch, time, in], [batch, time, out] in
    base's dtype, with an adapter for each row of the batch. For rows of one token that takes as
    many launches as one projection.

    The projections have equal numbers of slots and ranks; ids i32[batch] are from `checked_ids`,
    and `step` is `step_of` them, computed here if None. "mosaic" uses a kernel for both products of
    rows of one token; for prompts, for the second product and the composition.

    A row of id -1 is base + bias, bit for bit. A row of an invalid id or an empty slot is NaN.
    Raises NotImplementedError if the named implementation does not support the call.
    """
    batch, time, _ = x.shape
    settings = BankSettings(implementation, static_precision(precision), projections[0].layer_slots)
    found = tuple(
        projection.of_rows(ids, accumulation_dtype(projection.base.dtype))
        for projection in projections
    )
    if takes_tokens_as_rows(batch, time, implementation):
        return call_differentiable(PROMPTS, _define_prompts, settings, Batch(x, ids, found))
    if time != 1:
        return [
            call_differentiable(EXPAND, expand, settings, shrunk(settings, x, projection))[0]
            for projection in found
        ]
    tokens = Batch(x[:, 0], ids, tuple(projection.of_tokens() for projection in found), step)
    if _choice(settings, tokens) is None:
        products = _products(settings, tokens)
    else:
        products = call_differentiable(TOKENS, _products, settings, tokens)
    return [projection.composed(lora) for projection, lora in zip(found, products, strict=True)]


def takes_tokens_as_rows(batch: int, time: int, implementation: str | None) -> bool:
    """Returns whether the kernels for rows of one token may compute prompts [batch, time]."""
    return time > 1 and implementation is None and batch * time <= MOST_PROMPT_TOKENS


def step_of(
    ids: jax.Array,
    slots: int,
    projections: Iterable[tuple[int, int, int, Any]],
    implementation: str | None = None,
) -> jax.Array | None:
    """Returns the plan of a decoding step with ids i32[batch] for the kernels, which all
    projections of a model share: (in, out, maximum rank, dtype of x and of the adapters) each. It
    is None if no kernel supports one."""
    calls = (
        (ids.shape[0], fan_in, out, slots, rank, dtype, dtype)
        for fan_in, out, rank, dtype in projections
    )
    choices = (
        choose.choose(OP, implementation, *_candidates(call), optional=True) for call in calls
    )
    kernel = next((choice.kernel for choice in choices if choice), None)
    return None if kernel is None else kernel.plan(ids, slots)


def _run_expand(
    settings: BankSettings, shard: Shard, projection: SlotProjection
) -> tuple[jax.Array]:
    base, z, rows = projection.base, projection.z, projection.rows
    groups, out, rank = rows.slot.size, base.shape[-1], z.shape[-1]
    time = base.size // max(groups * out, 1)
    flat = projection._replace(
        base=base.reshape(groups, time, out),
        z=z.reshape(groups, time, rank),
        rows=Rows(
            rows.slot.reshape(groups), rows.g.reshape(groups, out), rows.scale.reshape(groups)
        ),
    )
    call = (groups, time, rank, out, base.dtype)
    candidates = (bank_expand, call), (triton_bank_expand, call)
    choice = choose.choose(OP, settings.implementation, *candidates)
    if choice is None:
        (y,) = expand(settings, flat)
    else:
        y = choice.launch(flat.base, flat.z, flat.slots.lora_b, *flat.rows, flat.bias)
    return (y.reshape(base.shape),)


EXPAND = Op(
    "bank_expand",
    _run_expand,
    SlotProjection(
        Slots(None, "s r o", None, None, None),
        base="t o",
        bias="o",
        rows=Rows("t", "t o", "t"),
        z="t r",
    ),
    ("t o",),
)


class Shrink(NamedTuple):
    """The operands of `SHRINK`: x [batch, time, in], lora_a [slots, rank, in], and the slot
    i32[batch] of each row."""

    x: Any
    lora_a: Any
    slot: Any


def _run_shrink(settings: BankSettings, shard: Shard, operands: Shrink) -> tuple[jax.Array]:
    x, lora_a, slot = operands
    groups, (rank, in_features) = slot.size, lora_a.shape[1:]
    time = x.size // max(groups * in_features, 1)
    call = (groups, time, in_features, rank, x.dtype)
    choice = choose.choose(OP, settings.implementation, (triton_bank_shrink, call))
    if choice is None:
        return (shard.sum(_shrink(settings, operands)[0]),)
    z = choice.launch(
        x.reshape(groups, time, in_features), lora_a.astype(x.dtype), slot.reshape(groups)
    )
    return (shard.sum(z.reshape(*x.shape[:-1], rank).astype(x.dtype)),)


SHRINK = Op("bank_shrink", _run_shrink, Shrink("t i", "s r i", "t"), ("t r",), contracted="i")


def _shrink(settings: BankSettings, operands: Shrink) -> tuple[jax.Array]:
    """Returns the first product, by its definition."""
    own_a = operands.lora_a[operands.slot].astype(operands.x.dtype)
    return (jnp.einsum("nti,nri->ntr", operands.x, own_a, precision=settings.precision),)


def shrunk(settings: BankSettings, x: jax.Array, projection: SlotProjection) -> SlotProjection:
    """Returns the operands of `EXPAND`, with z = x A."""
    slots, rows = projection.slots, projection.rows
    operands = Shrink(x, slots.lora_a, rows.slot)
    if settings.implementation == "triton":
        (z,) = call_differentiable(SHRINK, _shrink, settings, operands)
    else:
        (z,) = _shrink(settings, operands)
    slots = Slots(None, slots.lora_b.astype(x.dtype), None, None, None)
    return SlotProjection(slots, base=projection.base, bias=projection.bias, rows=rows, z=z)


def expand(settings: BankSettings, projection: SlotProjection) -> tuple[jax.Array]:
    """Returns the second product and the composition, by their definition."""
    lora_b = projection.slots.lora_b[projection.rows.slot]
    lora = jnp.einsum("ntr,nro->nto", projection.z, lora_b, precision=settings.precision)
    return (projection.composed(lora),)


def _run_prompts(settings: BankSettings, shard: Shard, batch: Batch) -> tuple[jax.Array, ...]:
    rows, time, in_features = batch.x.shape
    tokens = Batch(
        batch.x.reshape(rows * time, in_features),
        jnp.repeat(batch.ids, time),
        tuple(projection.of_tokens() for projection in batch.projections),
    )
    if _choice(settings, tokens) is None:
        return _define_prompts(settings, batch)
    products = _run_tokens(settings, shard, tokens)
    return tuple(
        projection.composed(lora)
        for projection, lora in zip(batch.projections, products, strict=True)
    )


# As for `TOKENS`, XLA computes and partitions it on a mesh of several devices.
PROMPTS = Op("bank_prompts", _run_prompts, (), ())


def _define_prompts(settings: BankSettings, batch: Batch) -> tuple[jax.Array, ...]:
    return tuple(
        expand(settings, shrunk(settings, batch.x, projection))[0]
        for projection in batch.projections
    )


def _candidates(call: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the candidate kernels for rows of one token, for `choose.choose`."""
    return [(kernel, call) for kernel in (bank_decode, bank_rows, triton_bank_rows)]


def _choice(settings: BankSettings, tokens: Batch) -> choose.Choice | None:
    """Returns the kernel that was chosen for every projection, or None if they differ."""
    x, slots = tokens.x, [projection.slots for projection in tokens.projections]
    lora_a, outs = slots[0].lora_a, [adapters.lora_b.shape[2] for adapters in slots]

    def call(out: int) -> tuple[Any, ...]:
        return (*x.shape, out, settings.slots, lora_a.shape[1], x.dtype, lora_a.dtype)

    choices = [choose.choose(OP, settings.implementation, *_candidates(call(out))) for out in outs]
    kernels = {choice and choice.kernel for choice in choices}
    if choices[0] is None or len(kernels) > 1:
        return None
    if choices[0].capability is not None:
        return choices[0]
    config = choices[0].kernel.config(*call(sum(outs)), members=len(outs))
    return choices[0]._replace(config=config)


def _run_tokens(settings: BankSettings, shard: Shard, tokens: Batch) -> tuple[jax.Array, ...]:
    choice = _choice(settings, tokens)
    if choice is None:
        return _products(settings, tokens)
    members = tuple(
        Member(slots.lora_a, slots.lora_b, slots.rank, first)
        for slots, _, _, _, first, *_ in tokens.projections
    )
    return choice.launch(tokens.x, members, tokens.ids, tokens.step, slots=settings.slots)


# The operator has no axis names, so on a mesh of several devices XLA computes and partitions it.
TOKENS = Op("bank_rows", _run_tokens, (), ())


def _products(settings: BankSettings, tokens: Batch) -> tuple[jax.Array, ...]:
    """Returns x A B of each projection, by XLA."""
    slots, precision = settings.slots, settings.precision
    return tuple(
        low_rank_product(
            tokens.x,
            (projection.slots.lora_a, projection.slots.lora_b),
            tokens.ids,
            projection.first,
            slots,
            precision,
        )
        for projection in tokens.projections
    )
