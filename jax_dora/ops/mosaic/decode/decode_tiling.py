"""The tilings of W and of A, if there is an adapter, for `decode_sums`; its shared memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops.mosaic.decode import decode_tile
from jax_dora.ops.mosaic.decode.decode_tile import ROWS
from jax_dora.ops.mosaic.hopper.limits import RESERVED, padded_rank
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config, Tiling
from jax_dora.ops.quantised import bits

# The columns of a tile of A.
A_COLS = 64
# The minimum number of runs of a strip of A, and the maximum number of tiles of a run. These keep
# the runs of A short, so that they end before those of W.
A_RUNS = 8
A_TILES = 32
# The bytes of shared memory that `decode_finish` may use for partial sums.
MOST_SUMS = 160 * 1024
# The number of partial sums that XLA may have to add, without an adapter.
MOST_PARTS = 16


def in_pairs(tiling: Tiling) -> bool:
    """Returns whether the two consumers of each thread block have one run each, of the same strip.

    They then add their sums before they are written.
    """
    even = tiling.config.consumers == 2 and tiling.splits % 2 == 0
    return even and tiling.units <= tiling.blocks


def parts(tiling: Tiling) -> int:
    """Returns the number of partial sums per element of the result."""
    return tiling.splits // 2 if in_pairs(tiling) else tiling.splits


def tilings(
    in_features: int, out: int, rank: int, rows: int, config: Config, sm_count: int
) -> tuple[Tiling, Tiling | None]:
    """Returns the tilings of W and of A; None instead of A's without an adapter, of rank 0.

    With an adapter, the partial sums, [rows, 64] per part and strip, must fit into `MOST_SUMS`. A's
    get at most a third of it.
    """

    def tiling(cols: int, config: Config, blocks: int, most_parts: int) -> Tiling:
        """Returns a tiling with at most `most_parts` parts, and the config's splits if possible."""
        result = Tiling(in_features, cols, config, blocks * config.consumers)
        for splits in (2 * most_parts, most_parts):
            if parts(result) <= most_parts:
                break
            result = dataclasses.replace(result, config=dataclasses.replace(config, splits=splits))
        return result

    if not rank:
        return tiling(out, config, sm_count, MOST_PARTS), None
    most_sums = max(MOST_SUMS // (rows * A_COLS * 4), 2)
    runs = max(A_RUNS, pl.cdiv(in_features, TILE_ROWS * A_TILES))
    a_config = dataclasses.replace(config, tile_cols=A_COLS, splits=runs)
    a = tiling(rank, a_config, sm_count, max(most_sums // (3 * pl.cdiv(rank, A_COLS)), 1))
    a_blocks, remaining = pl.cdiv(a.blocks, config.consumers), most_sums - parts(a) * a.strips
    return tiling(out, config, max(sm_count - a_blocks, 1), max(remaining, 1)), a


def shared_memory(rows: int, rank: int, dtype: Any, tiled: bool, config: Config) -> int:
    """Returns the bytes of shared memory of a launch.

    Args:
      rows, rank: the rows of x, and A's rank; 0 without an adapter.
      dtype: W's dtype, as it is stored.
      tiled: whether W has fp32 scales of tiles.
      config: the config.
    """
    c, padded = config, pl.cdiv(rows, ROWS) * ROWS
    w_bytes = TILE_ROWS * c.tile_cols * bits(dtype) // 8
    slot = w_bytes + padded * TILE_ROWS * 2 + 4 * c.tile_cols * tiled
    a_ring = c.stages * TILE_ROWS * min(padded_rank(rank), A_COLS) * 2
    exchange = 4 * padded * c.tile_cols
    table = decode_tile.table_for(dtype, jnp.bfloat16)
    table_bytes = 0 if table is None else table.nbytes
    return c.consumers * (c.slots * slot + a_ring) + exchange + table_bytes + RESERVED
