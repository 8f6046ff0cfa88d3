"""Few rows of one token each, every one with the adapter of its slot: what `bank_rows` computes, of
up to 16 rows and adapters of up to 64 ranks.

Two kernels, for all projections of the same x at once. A thread block of the first,
`bank_few_rows_shrink`, multiplies all rows by the A of one slot in a part of `in`. One of the
second, `bank_few_rows_expand`, has a strip of the result: it adds up the parts, in a fixed order,
and goes through the slots in use. Of the products of all rows with a slot each row takes those of
its own, so that what it gets does not depend on its company.

Bytes: A and B of the slots in use, once, and y; x and the parts are in the level-2 cache. Thread
blocks are small, so that they find room beside those of the base's product.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jax_dora.ops.mosaic import bank_few_rows_expand, bank_few_rows_shrink, bank_rows
from jax_dora.ops.mosaic.bank_rows_sizes import Member, call_of
from jax_dora.ops.mosaic.hopper import TILE_K
from jax_dora.ops.mosaic.launch import launcher

MOST_ROWS = 16
MOST_RANK = 64
# Tiles of `in` that a thread block of the first kernel has, or more where these would be more parts
# than the second adds up.
TILES, MOST_SPLITS = 8, 32


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      splits: parts that `in` is cut into. More of them are more thread blocks of the first kernel,
        and more that each of the second adds up.
      shrink_stages, expand_stages: tiles of A and of B in flight in a thread block; of B a multiple
        of 4.
    """

    splits: int
    shrink_stages: int = 4
    expand_stages: int = 8


def refuses(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, held: DTypeLike
) -> str | None:
    """Returns why `bank_rows.refuses` a call, or why there are too many rows or ranks, or None."""
    if rows > MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if rank > MOST_RANK:
        return f"the bank has room for rank {rank}, not at most {MOST_RANK}"
    return bank_rows.refuses(rows, in_features, out, slots, rank, dtype, held)


def wins(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, held: DTypeLike
) -> bool:
    """Returns whether the kernels were faster than every way of XLA's (`benchmarks bank`: the
    projections of a layer of Llama 3 8B's dimensions, 64 slots)."""
    return min(in_features, out) >= 1024


def config(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: DTypeLike,
    held: DTypeLike,
    members: int = 1,
) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    return Config(min(pl.cdiv(in_features, TILE_K * TILES), MOST_SPLITS))


@launcher("slots")
def launch(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None = None,
    *,
    slots: int | None = None,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, ...]:
    """Returns y [rows, out] of each member; arguments are those of `bank_rows.launch`."""
    call = call_of(x, members, ids, step, slots)
    parts = bank_few_rows_shrink.launch(*call, config)
    results = bank_few_rows_expand.launch(parts, *call[1:], config)
    return tuple(y[: x.shape[0]] for y in results)
