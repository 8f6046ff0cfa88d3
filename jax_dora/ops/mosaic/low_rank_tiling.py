"""Cuts a matrix into pieces of work for the kernels norm and expand_compose.

Both take tiles of `left @ right`, [rows, k] @ [k, out] with a short k (the rank), and meet each
with the tile of a large [rows, out] matrix:

- The matrix is cut into strips of `tile_cols` columns, and a strip into `splits` runs of whole
  tiles. A run is a thread block's unit of work. For its length the strip of `right`,
  [k, tile_cols], stays in shared memory; were it fetched for each tile, three times as much would
  come from the level-2 cache.
- Past the last row, column or rank the copy engine reads zeros and writes nothing.

`low_rank_kernel` walks over them.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_dora.ops.mosaic.hopper import RESERVED, SHARED_MEMORY, TILE_K, balanced, pad

# One m64 instruction; taller tiles would only need more registers.
TILE_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_cols: columns of a strip. 128 keeps the tensor cores fed from shared memory; 64 halves
        the resident strip of `right` where the rank is large, at twice the traffic of `left`.
      stages: slices of `left` in flight for each consumer.
      slots: tiles of the matrix in flight for each consumer; with two, one is fetched while the
        other is worked on and stored.
      consumers: warpgroups that multiply, one tile each. While one works on its accumulator, the
        others keep the tensor cores busy; each has rings of its own in shared memory. Two or three:
        one would have more registers than a thread can, and of the warpgroup that fetches a warp is
        each one's, and one the matrix's.
      splits: runs that a strip is cut into; None balances them over the multiprocessors.
    """

    tile_cols: int = 128
    stages: int = 4
    slots: int = 2
    consumers: int = 2
    splits: int | None = None


# Best first; a rank takes the first that shared memory has room for. Slices of `left` count most:
# with fewer than four in flight a consumer waits for them. A second slot gains little.
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
    """Static geometry of one launch over [rows, out], or over `groups` of them that lie one behind
    the other, each of whole tiles and with a `right` of its own."""

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
        """Returns the tiles of a run; the last of a strip may have fewer."""
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
    """The order in which one thread block takes its runs, and its consumers their tiles."""

    tiling: Tiling
    block: jax.Array

    @property
    def runs(self):
        return lax.div(self.tiling.units - self.block + self.tiling.blocks - 1, self.tiling.blocks)

    def run(self, index):
        """Returns the columns, the split, the first tile and the number of tiles of a run."""
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
        """Returns the group that a tile is of."""
        return lax.div(tile, self.tiling.row_tiles)

    def turns(self, taker, before, tiles, takers):
        """Returns which of a run's `tiles` is the first of `taker`, one of `takers` that take
        turns, and how many it has; `before` tiles of earlier runs are taken already."""
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
    """Returns the bytes that a launch takes; `extra_tiles` further tiles for each consumer, and
    `extra_bytes` in all."""
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
    """Returns the first of `configs` that fits into shared memory, or None; `taken` are the further
    arguments of `shared_memory`."""
    return next((c for c in configs if shared_memory(c, *taken) <= SHARED_MEMORY), None)


def pad_features(vectors: Sequence[jax.Array], tiling: Tiling) -> jax.Array:
    """Returns vectors [out] as f32[len(vectors), padded_out]."""
    stacked = jnp.stack([v.astype(jnp.float32) for v in vectors])
    return pad(stacked, len(vectors), tiling.padded_out)
