"""XLA's products of rows of one token with an adapter per row. The sizes choose one of three ways:

- "sums", for few rows per slot: products as multiplications and sums, into which XLA fuses the
  lookup of the slot, so that no adapter is copied.
- "dense": the products of all rows with all slots, in which each row selects its own slot. This
  reads each adapter once, and the tensor cores compute the extra products at little cost.
- "tiles", for many rows per slot: the rows are sorted by slot and divided into tiles of rows with
  the same slot, for a batched product.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.dtypes import accumulation_dtype

# lora_a and lora_b of `bank_slots.Slots`.
Matrices = tuple[jax.Array, jax.Array]

# The rows of a tile of sorted rows. The smallest limits the copies of adapters, one per tile; the
# largest limits the padding of each slot's last tile.
SMALLEST_TILE, LARGEST_TILE = 8, 64
# With more rows per slot, "tiles" reads adapters less often than "sums" does. "sums" reads one
# adapter per row; "tiles" copies one adapter per tile, and each copy is read, written and read
# again: rows > 3·(rows / 8 + slots).
TILES_ROWS_PER_SLOT = 5
# With more rows per slot, "dense" is assumed to be faster than "sums". At one row per slot "dense"
# took 1.11 times as long (an H200, 64 slots, the projections of Llama 3 8B's dimensions). The time
# of "dense" hardly grows with the rows; that of "sums" is proportional to them.
DENSE_ROWS_PER_SLOT = 1.5


def low_rank_product(
    x: jax.Array, matrices: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns x A[id] B[id] of x [rows, in], [rows, out], with the matrices of all slots, perhaps
    of several layers: the layer's slots are `first` to `first + count`, and ids i32[rows] count
    from `first`. The result of a row with an invalid id is arbitrary."""
    way = way_of(x.shape[0], count)
    if way == "dense":
        return _dense(x, matrices, ids, first, count, precision)
    ids = jnp.clip(ids, 0, count - 1)
    if way == "tiles":
        return _by_tiles(x, matrices, ids, first, count, precision)
    return _sums(x, matrices, first + ids)


def way_of(rows: int, slots: int) -> str:
    """Returns how XLA computes the products: "sums", "dense" or "tiles"."""
    if rows > TILES_ROWS_PER_SLOT * slots:
        return "tiles"
    return "dense" if rows > DENSE_ROWS_PER_SLOT * slots else "sums"


def _sums(x: jax.Array, matrices: Matrices, slots: jax.Array) -> jax.Array:
    """Returns [rows, out] for x [rows, in] and the slot of each row."""
    dtype = accumulation_dtype(x.dtype)
    lora_a, lora_b = (array[slots].astype(x.dtype).astype(dtype) for array in matrices)
    z = jnp.sum(lora_a * x.astype(dtype)[:, None], axis=2).astype(x.dtype).astype(dtype)
    return jnp.sum(z[:, :, None] * lora_b, axis=1).astype(x.dtype)


def _dense(
    x: jax.Array, matrices: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns [rows, out] for x [rows, in], by products with all `count` slots."""
    rank = matrices[0].shape[1]
    lora_a, lora_b = (
        lax.dynamic_slice_in_dim(array, first, count).reshape(count * rank, -1).astype(x.dtype)
        for array in matrices
    )
    z = lax.dot_general(x, lora_a, (((1,), (1,)), ((), ())), precision=precision)
    # Selected, not multiplied by 0: 0 times inf of another slot would be NaN.
    is_own = ids[:, None] == jnp.repeat(jnp.arange(count, dtype=jnp.int32), rank)[None]
    return jnp.matmul(jnp.where(is_own, z, jnp.zeros_like(z)), lora_b, precision=precision)


def _by_tiles(
    x: jax.Array, matrices: Matrices, ids: jax.Array, first: jax.Array, count: int, precision: Any
) -> jax.Array:
    """Returns [rows, out] for x [rows, in], by a batched product of tiles with one slot each."""
    rows = ids.shape[0]
    tile = SMALLEST_TILE
    while 2 * tile * count <= rows and tile < LARGEST_TILE:
        tile *= 2
    tiles = rows // tile + min(rows, count)  # enough for any distribution of the rows
    slot_rows = jnp.zeros(count, jnp.int32).at[ids].add(1)
    slot_tiles = (slot_rows + tile - 1) // tile
    tile_ends = jnp.cumsum(slot_tiles)
    order = jnp.argsort(ids, stable=True)
    row_starts = jnp.cumsum(slot_rows) - slot_rows
    sorted_ids = ids[order]
    position = jnp.arange(rows, dtype=jnp.int32) - row_starts[sorted_ids]
    position = position + tile * (tile_ends - slot_tiles)[sorted_ids]
    position = jnp.zeros(rows, jnp.int32).at[order].set(position)
    slot = jnp.searchsorted(tile_ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    slot = first + jnp.minimum(slot, count - 1)
    tiled = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[position].set(x)
    tiled = tiled.reshape(tiles, tile, -1)
    lora_a, lora_b = (array[slot].astype(x.dtype) for array in matrices)
    z = jnp.einsum("nti,nri->ntr", tiled, lora_a, precision=precision)
    y = jnp.einsum("ntr,nro->nto", z, lora_b, precision=precision)
    return y.reshape(tiles * tile, -1)[position]
