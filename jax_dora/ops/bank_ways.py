"""Rows of one token each with adapters of their own, in the ways that XLA has; sizes choose one:

- "sums": products written as sums, into which XLA fuses the lookup of the slot, so that no adapter
  is copied;
- "dense", with more rows than slots: products with all slots at once, of which a row keeps those
  of its own: each adapter is read once, and the tensor cores have the time;
- "tiles", with many rows for each slot: rows sorted by slot, and a batched product over tiles of
  rows that share one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.compose import accumulator

# lora_a and lora_b, as `bank_slots.Slots` has them.
Matrices = tuple[jax.Array, jax.Array]

# Tiles of sorted rows: no smaller, since each looks its adapter up, and no larger, since each slot
# fills up its last one.
LEAST_TILE, LARGEST_TILE = 8, 64
# With more rows than this for every slot, an adapter that is copied for a tile of rows is read less
# often than one that is read where it lies for each row: rows > 3·(rows / 8 + slots), a copy being
# read, written and read again.
ROWS_OF_A_SLOT = 5
# With more rows than this for every slot, products with all slots are taken to be faster than
# looking up each row's. At one row a slot they took 1.11 times as long (an H200, 64 slots, the
# projections of Llama 3 8B's dimensions); their cost hardly grows with the rows, that of looking up
# does in proportion.
DENSE_ROWS_OF_A_SLOT = 1.5


def low_rank_product(
    x: jax.Array, held: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns x[n] A[slot] B[slot], [rows, out], of x [rows, in].

    Args:
      held: lora_a and lora_b of slots, of several layers perhaps, of which this has `count` from
        `first` on.
      ids: i32[rows], counted from `first`; a row that has none may get any slot's.
    """
    way = way_of(x.shape[0], count)
    if way == "dense":
        return _dense(x, held, ids, first, count, precision)
    safe = jnp.clip(ids, 0, count - 1)
    if way == "tiles":
        return _by_tiles(x, held, safe, first, count, precision)
    return _sums(x, held, first + safe)


def way_of(rows: int, slots: int) -> str:
    """Returns how XLA multiplies so many rows of one token each: "sums", "dense" or "tiles"."""
    if rows > ROWS_OF_A_SLOT * slots:
        return "tiles"
    return "dense" if rows > DENSE_ROWS_OF_A_SLOT * slots else "sums"


def _products(x: jax.Array, held: Matrices, ids: jax.Array, precision: Any) -> jax.Array:
    """Returns [n, rows, out] of x [n, rows, in], whose rows share a slot."""
    lora_a, lora_b = (array[ids].astype(x.dtype) for array in held)
    z = jnp.einsum("nti,nri->ntr", x, lora_a, precision=precision)
    return jnp.einsum("ntr,nro->nto", z, lora_b, precision=precision)


def _sums(x: jax.Array, held: Matrices, ids: jax.Array) -> jax.Array:
    """Returns [rows, out] of x [rows, in]."""
    dtype = accumulator(x.dtype)
    lora_a, lora_b = (array[ids].astype(x.dtype).astype(dtype) for array in held)
    z = jnp.sum(lora_a * x.astype(dtype)[:, None], axis=2).astype(x.dtype).astype(dtype)
    return jnp.sum(z[:, :, None] * lora_b, axis=1).astype(x.dtype)


def _dense(
    x: jax.Array, held: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns [rows, out] of x [rows, in] by products with `count` slots from `first` on."""
    rank = held[0].shape[1]
    lora_a, lora_b = (
        lax.dynamic_slice_in_dim(one, first, count).reshape(count * rank, -1).astype(x.dtype)
        for one in held
    )
    z = lax.dot_general(x, lora_a, (((1,), (1,)), ((), ())), precision=precision)
    # Chosen, not multiplied: what is not finite stays with its own row.
    own = ids[:, None] == jnp.repeat(jnp.arange(count, dtype=jnp.int32), rank)[None]
    return jnp.matmul(jnp.where(own, z, jnp.zeros_like(z)), lora_b, precision=precision)


def _by_tiles(
    x: jax.Array, held: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
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
    position = jnp.arange(rows, dtype=jnp.int32) - starts[sorted_ids]
    position = position + tile * (ends - of_slot)[sorted_ids]
    row_of = jnp.zeros(rows, jnp.int32).at[order].set(position)
    slot_of = jnp.searchsorted(ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    slot_of = jnp.minimum(slot_of, count - 1)
    tiled = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[row_of].set(x)
    y = _products(tiled.reshape(tiles, tile, -1), held, first + slot_of, precision)
    return y.reshape(tiles * tile, -1)[row_of]
