"""Many adapters in one batch: y = g[id]∘(base + s[id]·x A[id] B[id]) + bias, row by row.

An adapter that is served does not move, so that g = magnitude / ‖W + sAB‖ is a constant of its slot
and DoRA costs what LoRA does. Ranks lie along the first axis of a slot's matrices, so that the real
ranks of a slot are one piece of memory, whatever the rank that the bank has room for.

From 32 to 256 rows of one token (decoding) are taken by kernels, `mosaic.bank_rows`, which read the
adapters that rows have once each. Elsewhere XLA has four ways, of which a call's sizes choose one:

- one token a row: products written as sums, into which XLA fuses the lookup of the slot, so that no
  adapter is copied;
- several tokens a row (prompts): a batched product, the adapter looked up once for each row; with a
  kernel, `mosaic.bank_expand`, the second product is taken in one pass with what follows it;
- more rows than slots, of one token each: products with all slots at once, of which a row keeps
  those of its own: each adapter is read once, and the tensor cores have the time;
- many rows for each slot, of one token each: rows sorted by slot, and a batched product over
  tiles of rows that share one.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import choose, primitive
from jax_dora.ops import mesh as meshes
from jax_dora.ops.compose import accumulator
from jax_dora.ops.mosaic import bank_expand, bank_rows
from jax_dora.ops.shard import Op, Shard

# Tiles of sorted rows: no smaller, since each looks its adapter up, and no larger, since each slot
# fills up its last one.
LEAST_TILE, LARGEST_TILE = 8, 64
# With more rows than this for every slot, an adapter that is copied for a tile of rows is read less
# often than one that is read where it lies for each row: rows > 3·(rows / 8 + slots), a copy being
# read, written and read again.
ROWS_OF_A_SLOT = 5
# With more rows than this for every slot, products with all slots are taken to be faster than
# looking up each row's. At one row a slot they took 1.11 times as long (H200, `h200/bank.jsonl`: 64
# slots, the projections of Llama 3 8B's dimensions); their cost hardly grows with the rows, that of
# looking up does in proportion.
DENSE_ROWS_OF_A_SLOT = 1.5


class Slots(NamedTuple):
    """The adapters of one projection, in slots.

    Attributes:
      lora_a: [slots, rank, in], zero beyond the rank that an adapter has.
      lora_b: [slots, rank, out], likewise.
      g: f32[slots, out], magnitude over norm; 1 for LoRA; NaN in a slot without an adapter. None
        where all adapters are LoRA.
      scale: f32[slots].
      rank: i32[slots], of each adapter; 0 where it leaves the projection alone.
    """

    lora_a: Any
    lora_b: Any
    g: Any
    scale: Any
    rank: Any


def checked_ids(ids: jax.Array, slots: int) -> jax.Array:
    """Returns i32 ids in which `slots` stands for each that is below -1 or has no slot.

    Compared in their own dtype: a cast could make another adapter's of a wrong one.
    """
    info = jnp.iinfo(ids.dtype)
    valid = jnp.ones(ids.shape, bool)
    if info.max >= slots:
        valid = valid & (ids < jnp.asarray(slots, ids.dtype))
    if info.min < -1:
        valid = valid & (ids >= jnp.asarray(-1, ids.dtype))
    return jnp.where(valid, ids.astype(jnp.int32), slots)


class Rows(NamedTuple):
    """What each row of a batch takes of its slot; of row -1 the numbers that change nothing.

    Attributes:
      slot: i32[batch].
      g: f32[batch, out].
      scale: f32[batch]; NaN where there is no such slot.
    """

    slot: jax.Array
    g: jax.Array
    scale: jax.Array


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
    first, count = part or (jnp.int32(0), slots.lora_a.shape[0])
    if x.shape[1] == 1:
        tokens = Tokens(base[:, 0], x[:, 0], *slots, ids, first, step, bias)
        static = StaticOfTokens(implementation, _hashable(precision), count)
        if _choice(static, tokens) is None:
            return _looked_up(static, tokens)[:, None]
        return meshes.differentiable(_multiply)(static, meshes.vary_alike(tokens))[:, None]
    rows = _rows(slots, ids, first, count, accumulator(base.dtype))
    lora_a = slots.lora_a[rows.slot].astype(x.dtype)
    z = jnp.einsum("nti,nri->ntr", x, lora_a, precision=precision)
    lora_b = slots.lora_b.astype(x.dtype)
    operands = meshes.vary_alike(Expansion(base, z, lora_b, *rows, bias))
    return meshes.differentiable(_expand)(Static(implementation, _hashable(precision)), operands)


def step_of(ids: jax.Array, slots: int) -> jax.Array | None:
    """Returns what kernels have to know of a step's rows, from ids as `checked_ids` returns them;
    None where there is no kernel for so many."""
    return bank_rows.plan(ids, slots) if ids.shape[0] <= bank_rows.MOST_ROWS else None


def _rows(slots: Slots, ids: jax.Array, first: jax.Array, count: int, dtype: Any) -> Rows:
    safe = first + jnp.clip(ids, 0, count - 1)
    of_lora = jnp.ones((*ids.shape, slots.lora_b.shape[-1]), dtype)
    g = of_lora if slots.g is None else slots.g[safe].astype(dtype)
    scale = jnp.where(ids < count, slots.scale[safe], jnp.nan).astype(dtype)
    return Rows(safe, jnp.where((ids < 0)[:, None], 1, g), jnp.where(ids < 0, 0, scale))


def _composed(base: jax.Array, lora: jax.Array, rows: Rows, bias: jax.Array | None) -> jax.Array:
    """Returns g∘(base + s·lora) + bias; base + bias, bit for bit, where g is 1 and s is 0."""
    g, scale = rows.g[:, None], rows.scale[:, None, None]
    wide = base.astype(g.dtype)
    # A sum with zero turns -0 into 0, and what is not finite into NaN.
    y = jnp.where((g == 1) & (scale == 0), wide, g * (wide + scale * lora.astype(g.dtype)))
    if bias is not None:
        y = y + bias.astype(g.dtype)[None, None]
    return y.astype(base.dtype)


class Static(NamedTuple):
    """What is static in a call, as its caller gave it."""

    implementation: str | None
    precision: Any


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _expand(static: Static, operands: Expansion) -> jax.Array:
    return primitive.call(EXPAND, static, operands)[0]


@_expand.defjvp
def _expand_jvp(static: Static, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_define, static), primals, tangents)


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
    choice = choose.choose("bank_linear", static.implementation, (bank_expand, call))
    if choice is None:
        y = _define(static, flat)
    else:
        y = bank_expand.launch(*flat, **choice.knobs)
    return (y.reshape(base.shape),)


EXPAND = Op("bank_expand", _run, Expansion("t o", "t r", "s r o", "t", "t o", "t", "o"), ("t o",))


def _define(static: Static, operands: Expansion) -> jax.Array:
    base, z, lora_b, slot, g, scale, bias = operands
    lora = jnp.einsum("ntr,nro->nto", z, lora_b[slot], precision=static.precision)
    return _composed(base, lora, Rows(slot, g, scale), bias)


class StaticOfTokens(NamedTuple):
    """What is static in a call of rows that have one token each; so many `slots` are meant."""

    implementation: str | None
    precision: Any
    slots: int


class Tokens(NamedTuple):
    """The operands of rows that have one token each: base [rows, out], x [rows, in], `Slots`, ids
    i32[rows], the first slot that is meant, `step_of` the ids or None, bias [out] or None."""

    base: Any
    x: Any
    lora_a: Any
    lora_b: Any
    g: Any
    scale: Any
    rank: Any
    ids: Any
    first: Any
    step: Any
    bias: Any

    @property
    def slots(self) -> Slots:
        return Slots(*self[2:7])


def _choice(static: StaticOfTokens, tokens: Tokens) -> choose.Choice | None:
    x, lora_a = tokens.x, tokens.lora_a
    call = (*x.shape, tokens.base.shape[-1], static.slots, lora_a.shape[1], x.dtype, lora_a.dtype)
    return choose.choose("bank_linear", static.implementation, (bank_rows, call))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply(static: StaticOfTokens, tokens: Tokens) -> jax.Array:
    return primitive.call(MULTIPLY, static, tokens)[0]


@_multiply.defjvp
def _multiply_jvp(static: StaticOfTokens, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(_looked_up, static), primals, tangents)


def _run_tokens(static: StaticOfTokens, shard: Shard, tokens: Tokens) -> tuple[jax.Array]:
    choice = _choice(static, tokens)
    if choice is None:
        return (_looked_up(static, tokens),)
    return (bank_rows.launch(*tokens, slots=static.slots, **choice.knobs),)


# Without names: on a mesh of several devices XLA shares the work, as it knows which of them have
# which features and rows.
MULTIPLY = Op("bank_rows", _run_tokens, (), ())


def _looked_up(static: StaticOfTokens, tokens: Tokens) -> jax.Array:
    """Returns the result [rows, out] in the way that XLA takes."""
    x, slots, ids, first = tokens.x, tokens.slots, tokens.ids, tokens.first
    count, precision = static.slots, static.precision
    rows = _rows(slots, ids, first, count, accumulator(tokens.base.dtype))
    way = way_of(x.shape[0], count)
    if way == "tiles":
        lora = _by_tiles(x, slots, rows.slot - first, first, count, precision)
    elif way == "dense":
        lora = _dense(x, slots, ids, first, count, precision)
    else:
        lora = _sums(x, slots, rows.slot)
    return _composed(tokens.base[:, None], lora[:, None], rows, tokens.bias)[:, 0]


def way_of(rows: int, slots: int) -> str:
    """Returns how XLA multiplies so many rows of one token each: "sums", "dense" or "tiles"."""
    if rows > ROWS_OF_A_SLOT * slots:
        return "tiles"
    return "dense" if rows > DENSE_ROWS_OF_A_SLOT * slots else "sums"


def _hashable(precision: Any) -> Any:
    return lax.Precision(precision) if isinstance(precision, str) else precision


def _products(x: jax.Array, slots: Slots, ids: jax.Array, precision: Any) -> jax.Array:
    """Returns [n, rows, out] of x [n, rows, in], whose rows share a slot."""
    lora_a, lora_b = (array[ids].astype(x.dtype) for array in (slots.lora_a, slots.lora_b))
    z = jnp.einsum("nti,nri->ntr", x, lora_a, precision=precision)
    return jnp.einsum("ntr,nro->nto", z, lora_b, precision=precision)


def _sums(x: jax.Array, slots: Slots, ids: jax.Array) -> jax.Array:
    """Returns [rows, out] of x [rows, in]."""
    dtype = accumulator(x.dtype)
    lora_a, lora_b = (
        array[ids].astype(x.dtype).astype(dtype) for array in (slots.lora_a, slots.lora_b)
    )
    z = jnp.sum(lora_a * x.astype(dtype)[:, None], axis=2).astype(x.dtype).astype(dtype)
    return jnp.sum(z[:, :, None] * lora_b, axis=1).astype(x.dtype)


def _dense(
    x: jax.Array, slots: Slots, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns [rows, out] of x [rows, in] by products with `count` slots from `first` on."""
    rank = slots.lora_a.shape[1]
    lora_a, lora_b = (
        lax.dynamic_slice_in_dim(one, first, count).reshape(count * rank, -1).astype(x.dtype)
        for one in (slots.lora_a, slots.lora_b)
    )
    z = lax.dot_general(x, lora_a, (((1,), (1,)), ((), ())), precision=precision)
    # Chosen, not multiplied: what is not finite stays with its own row.
    own = ids[:, None] == jnp.repeat(jnp.arange(count, dtype=jnp.int32), rank)[None]
    return jnp.matmul(jnp.where(own, z, jnp.zeros_like(z)), lora_b, precision=precision)


def _by_tiles(
    x: jax.Array, slots: Slots, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns [rows, out] of x [rows, in], sorted by slot into tiles that have one slot each."""
    rows = ids.shape[0]
    tile = LEAST_TILE
    while 2 * tile * count <= rows and tile < LARGEST_TILE:
        tile *= 2
    tiles = rows // tile + min(rows, count)
    sizes = jnp.zeros(count, jnp.int32).at[ids].add(1)
    of_slot = (sizes + tile - 1) // tile
    ends = jnp.cumsum(of_slot)
    order = jnp.argsort(ids, stable=True)
    starts = jnp.cumsum(sizes) - sizes
    sorted_ids = ids[order]
    place = jnp.arange(rows, dtype=jnp.int32) - starts[sorted_ids]
    place = place + tile * (ends - of_slot)[sorted_ids]
    row_of = jnp.zeros(rows, jnp.int32).at[order].set(place)
    slot_of = jnp.searchsorted(ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    slot_of = jnp.minimum(slot_of, count - 1)
    tiled = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[row_of].set(x)
    y = _products(tiled.reshape(tiles, tile, -1), slots, first + slot_of, precision)
    return y.reshape(tiles * tile, -1)[row_of]
