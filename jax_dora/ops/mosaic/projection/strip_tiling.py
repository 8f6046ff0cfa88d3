"""Divides the work of kernels for norms, compositions and few rows.

Most of these compute tiles of `left @ right`, [rows, k] @ [k, out] with a short k (the rank), and
combine each with a tile of a large [rows, out] matrix:

- The matrix is cut into strips of `tile_cols` columns, and a strip into `splits` runs of whole
  tiles. A run is a thread block's unit of work. During a run, the strip of `right`, [k, tile_cols],
  stays in shared memory or registers. Fetching it for each tile would triple the reads from the
  level-2 cache.
- Past the last row, column or rank, TMA reads zeros and writes nothing.

`strip_kernel` iterates over the tiles for norms and compositions.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_dora.ops.mosaic.hopper.limits import RESERVED, SHARED_MEMORY, TILE_K, balanced, pad

# The rows of one m64 instruction. Taller tiles would only need more registers.
TILE_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch options.

    Attributes:
      tile_cols: the columns of a strip. 128 columns keep the tensor cores busy. 64 columns halve
        the strip of `right` in shared memory for a large rank, and double the reads of `left`.
      stages: the slices of `left` in flight for each consumer; in stationary_norm, the tiles of
        `left` in flight for all consumers.
      slots: the tiles of the matrix in flight, for each consumer as above. With two slots, one tile
        is fetched while the other one is processed and stored.
      consumers: the warpgroups that multiply. While one of them processes its accumulators, the
        others keep the tensor cores busy. Two or three: a single consumer could not use all
        registers, and the fetching warpgroup needs a warp for each consumer and one for the matrix.
      splits: the runs of a strip; None balances the runs over the multiprocessors.
    """

    tile_cols: int = 128
    stages: int = 4
    slots: int = 2
    consumers: int = 2
    splits: int | None = None


# The best first. A rank uses the first config that fits into shared memory. Slices of `left` matter
# most: with fewer than four in flight, a consumer waits for them. A second slot gains little.
CONFIGS = (
    Config(tile_cols=128, stages=4, slots=2),
    Config(tile_cols=128, stages=4, slots=1),
    Config(tile_cols=128, stages=3, slots=1),
    Config(tile_cols=64, stages=4, slots=2),
    Config(tile_cols=64, stages=4, slots=1),
    Config(tile_cols=64, stages=2, slots=1),
)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static geometry of a launch over a matrix [rows, out], or over `groups` such matrices of
    whole tiles that follow each other, each with its own `right`."""

    rows: int
    out: int
    config: Config
    sm_count: int
    groups: int = 1

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def strips(self) -> int:
        return pl.cdiv(self.out, self.config.tile_cols)

    @property
    def padded_out(self) -> int:
        return self.strips * self.config.tile_cols

    @property
    def run(self) -> int:
        """Returns the number of tiles of a run. The last run of a strip may have fewer."""
        splits = self.config.splits or balanced(
            self.row_tiles,
            self.groups * self.strips,
            self.sm_count,
            overhead=1,
            most=4 * self.sm_count,
        )
        return pl.cdiv(self.row_tiles, splits)

    @property
    def splits(self) -> int:
        return pl.cdiv(self.row_tiles, self.run)

    @property
    def units(self) -> int:
        return self.groups * self.strips * self.splits

    @property
    def blocks(self) -> int:
        return min(self.sm_count, self.units)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which a thread block processes its runs, and its consumers their tiles."""

    tiling: Tiling
    block: jax.Array

    @property
    def runs(self):
        return lax.div(self.tiling.units - self.block + self.tiling.blocks - 1, self.tiling.blocks)

    def run(self, index):
        """Returns (columns, number within the strip, first tile, number of tiles) of a run."""
        unit, tiling = self.block + index * self.tiling.blocks, self.tiling
        group = 0
        if tiling.groups > 1:
            of_group = tiling.strips * tiling.splits
            group, unit = lax.div(unit, of_group), lax.rem(unit, of_group)
        split = lax.rem(unit, tiling.splits)
        first = split * tiling.run
        tiles = jnp.minimum(tiling.run, tiling.row_tiles - first)
        if tiling.groups > 1:
            first = group * tiling.row_tiles + first
        width = tiling.config.tile_cols
        return pl.ds(lax.div(unit, tiling.splits) * width, width), split, first, tiles

    def group(self, tile):
        """Returns the group that a tile belongs to."""
        return lax.div(tile, self.tiling.row_tiles)

    def turns(self, taker, before, tiles, takers):
        """Returns (first tile, number of tiles) of a run for one of several warpgroups in turn.

        Args:
          taker: the number of the warpgroup.
          before: the number of tiles in the block's earlier runs.
          tiles: the number of tiles of the run.
          takers: the number of warpgroups.
        """
        skipped = lax.rem(taker - lax.rem(before, takers) + takers, takers)
        return skipped, lax.div(tiles - skipped + takers - 1, takers)

    def rows(self, tile):
        return pl.ds(tile * TILE_ROWS, TILE_ROWS)


def shared_memory(
    config: Config,
    right_slices: int,
    tile_itemsize: int,
    extra_tiles: int = 0,
    extra_bytes: int = 0,
) -> int:
    """Returns the bytes of shared memory that a launch needs, including `extra_tiles` more tiles
    for each consumer and `extra_bytes` in total."""
    c = config
    tile = TILE_ROWS * c.tile_cols * tile_itemsize
    return (
        right_slices * TILE_K * c.tile_cols * 2
        + c.consumers * c.stages * TILE_ROWS * TILE_K * 2
        + c.consumers * (c.slots + extra_tiles) * tile
        + extra_bytes
        + RESERVED
    )


def first_with_room(configs: Iterable[Config], *taken: int) -> Config | None:
    """Returns the first of `configs` that fits into shared memory, or None. `taken` are the other
    arguments of `shared_memory`."""
    return next((c for c in configs if shared_memory(c, *taken) <= SHARED_MEMORY), None)


def pad_features(vectors: Sequence[jax.Array], tiling: Tiling) -> jax.Array:
    """Returns vectors [out] as f32[len(vectors), padded_out]."""
    stacked = jnp.stack([v.astype(jnp.float32) for v in vectors])
    return pad(stacked, len(vectors), tiling.padded_out)
