"""Cuts W and A into runs for `few_rows_sums`, and counts the shared memory that it takes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops.mosaic import few_rows_tile
from jax_dora.ops.mosaic.few_rows_tile import ROWS
from jax_dora.ops.mosaic.hopper import RESERVED, padded_rank
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config, Tiling

# Columns of a tile of A.
A_COLS = 64
# Runs that a strip of A is cut into, at least, and tiles of a run, at most: they have to be done
# before those of W are.
A_RUNS = 8
A_TILES = 32
# Bytes of shared memory that sums which wait to be added up may take.
MOST_SUMS = 160 * 1024


def in_pairs(tiling: Tiling) -> bool:
    """Returns whether the two consumers of a thread block have one run each, of the same strip."""
    even = tiling.config.consumers == 2 and tiling.splits % 2 == 0
    return even and tiling.units <= tiling.blocks


def parts(tiling: Tiling) -> int:
    """Returns how many sums there are of a column: the consumers of a pair add theirs up."""
    return tiling.splits // 2 if in_pairs(tiling) else tiling.splits


def tilings(
    in_features: int, out: int, rank: int, rows: int, config: Config, sm_count: int
) -> tuple[Tiling, Tiling]:
    """Returns the tilings of W and of A."""
    room = max(MOST_SUMS // (rows * A_COLS * 4), 2)
    knobs = dataclasses.replace(config, tile_cols=A_COLS)
    runs = max(A_RUNS, pl.cdiv(in_features, TILE_ROWS * A_TILES))

    def of(cols: int, knobs: Config, blocks: int, most: int) -> Tiling:
        """Returns the first of these with at most `most` parts."""
        found = Tiling(in_features, cols, knobs, blocks * config.consumers)
        for splits in (2 * most, most):
            if parts(found) <= most:
                break
            found = dataclasses.replace(found, config=dataclasses.replace(knobs, splits=splits))
        return found

    of_a = dataclasses.replace(knobs, splits=runs)
    a = of(rank, of_a, sm_count, max(room // (3 * pl.cdiv(rank, A_COLS)), 1))
    taken, left = pl.cdiv(a.blocks, config.consumers), room - parts(a) * a.strips
    return of(out, config, max(sm_count - taken, 1), max(left, 1)), a


def shared_memory(rows: int, rank: int, dtype: Any, tiled: bool, config: Config) -> int:
    """Returns the bytes that a launch takes for W of `dtype`, in tiles with scales of fp32 or not,
    beside A of `rank`."""
    c, held = config, pl.cdiv(rows, ROWS) * ROWS
    slot = TILE_ROWS * few_rows_tile.TILE_BYTES + held * TILE_ROWS * 2 + 4 * c.tile_cols * tiled
    of_a = c.stages * TILE_ROWS * min(padded_rank(rank), A_COLS) * 2
    handed = 4 * held * c.tile_cols
    table = few_rows_tile.table_for(dtype, jnp.bfloat16)
    taken = c.consumers * (c.slots * slot + of_a) + handed
    return taken + (0 if table is None else table.nbytes) + RESERVED
