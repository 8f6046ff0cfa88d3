"""The same products as `bank_rows`, for up to 8 rows and a maximum rank of up to 64.

There are two kernels, each for all projections of the same x. A thread block of the first,
`bank_decode_shrink`, multiplies all rows by the A of one slot, over a part of `in`. A thread
block of the second, `bank_decode_expand`, has a strip of columns of the result: it adds the
partial sums in a fixed order and loops over the slots in use. Each slot is multiplied by all rows,
and each row selects the product with its own slot. The result of a row does not depend on the other
rows.

Thread blocks are small, so that they fit on a multiprocessor together with those of the base's
product.

Bytes: A and B of the slots in use, once, and y; the floor is bytes / copy rate. x and the partial
sums stay in the L2 cache.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jax_dora.ops.mosaic.bank import bank_decode_expand, bank_decode_shrink, bank_rows
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member, prepare
from jax_dora.ops.mosaic.bank.bank_rows_sizes import plan as plan
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import TILE_K

MOST_ROWS = 8
MOST_RANK = 64
# The number of tiles of `in` of a thread block of the first kernel; more if that would result in
# more than `MOST_SPLITS` parts.
TILES, MOST_SPLITS = 8, 32


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      splits: the number of parts of `in`. With more parts the first kernel has more thread blocks,
        and each thread block of the second kernel adds more partial sums.
      shrink_stages: the number of pipeline stages of the first kernel, one tile of A each.
    """

    splits: int
    shrink_stages: int = 4


def refuses(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> str | None:
    """Returns why a call is not supported, or None; see `bank_rows.refuses`."""
    if rows > MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if rank > MOST_RANK:
        return f"the bank's maximum rank {rank} is more than {MOST_RANK}"
    return bank_rows.refuses(rows, in_features, out, slots, rank, dtype, bank)


def wins(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> bool:
    """Returns whether the kernels were faster than all three ways of `bank_xla` (`benchmarks bank`:
    the projections of a layer of Llama 3 8B's dimensions, 64 slots)."""
    return min(in_features, out) >= 1024


def config(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: DTypeLike,
    bank: DTypeLike,
    members: int = 1,
) -> Config:
    """Returns the config for a supported call."""
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
    """Returns y [rows, out] for each member; the arguments are those of `bank_rows.launch`."""
    call = prepare(x, members, ids, step, slots)
    parts = bank_decode_shrink.launch(*call, config)
    results = bank_decode_expand.launch(parts, *call[1:])
    return tuple(y[: x.shape[0]] for y in results)
