"""How expand_compose and norm cut a matrix into pieces of work: shared by both.

Both take tiles of `left @ right`, [rows, k] @ [k, out] with a short k (the rank), and meet each
with the tile of a large [rows, out] matrix:

- The matrix is cut into strips of `tile_cols` columns, and a strip into `splits` runs of whole
  tiles. A run is a thread block's unit of work. For its length the strip of `right`,
  [k, tile_cols], stays in shared memory; were it fetched for each tile, three times as much would
  come from the level-2 cache.
- Past the last row, column or rank the copy engine reads zeros and writes nothing.

`sweep.py` holds the kernel that walks over them.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of 16 bytes are what the copy engine can address.
ALIGNMENT = 8
# Tensor cores read shared memory in blocks of 8 rows, which the copy engine can make of whole ones.
ROW_ALIGNMENT = 8
# One m64 instruction; taller tiles would only need more registers.
TILE_ROWS = 64
# Warpgroups that may multiply. More than one, or their registers would be more than a thread can
# have; and less than the warps of the one that fetches, one for each and one for the matrix.
CONSUMERS = (2, 3)
# A slice along the rank is a 128-byte row, the widest swizzle.
TILE_K = 64
SHARED_MEMORY = 232_448
# What vectors, barriers and sums over warps may take of it.
RESERVED = 3_072


@dataclasses.dataclass(frozen=True)
class StripConfig:
    """Launch knobs.

    Attributes:
      tile_cols: columns of a strip. 128 keeps the tensor cores fed from shared memory; 64 halves
        the resident strip of `right` where the rank is large, at twice the traffic of `left`.
      stages: slices of `left` in flight for each consumer.
      slots: tiles of the matrix in flight for each consumer; with two, one is fetched while the
        other is worked on and stored.
      consumers: warpgroups that multiply, two or three, one tile each. While one works on its
        accumulator, the others keep the tensor cores busy; each has rings of its own in shared
        memory.
      splits: runs that a strip is cut into; None balances them over the multiprocessors.
    """

    tile_cols: int = 128
    stages: int = 4
    slots: int = 2
    consumers: int = 2
    splits: int | None = None


def slices(rank: int) -> int:
    return pl.cdiv(rank, TILE_K)


def padded_rank(rank: int) -> int:
    """The rank that the copy engine can address: of whole slices, or of one short one."""
    step = ALIGNMENT if rank < TILE_K else TILE_K
    return pl.cdiv(rank, step) * step


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Static geometry of one launch over [rows, out]."""

    rows: int
    out: int
    config: StripConfig
    sm_count: int

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
        """Tiles of a run; the last of a strip may have fewer."""
        splits = self.config.splits or balanced(
            self.row_tiles, self.strips, self.sm_count, overhead=1, most=4 * self.sm_count
        )
        return pl.cdiv(self.row_tiles, splits)

    @property
    def splits(self) -> int:
        return pl.cdiv(self.row_tiles, self.run)

    @property
    def units(self) -> int:
        return self.strips * self.splits

    @property
    def blocks(self) -> int:
        return min(self.sm_count, self.units)


def balanced(length: int, pieces: int, sm_count: int, *, overhead: int, most: int) -> int:
    """Into how many parts, at `most`, to cut each of `pieces` of `length` steps so that the device
    is done first; a part costs `overhead` steps more than it has."""

    def time(parts: int) -> int:
        return pl.cdiv(pieces * parts, sm_count) * (pl.cdiv(length, parts) + overhead)

    return min(range(1, min(length, most) + 1), key=time)


def shared_memory(
    config: StripConfig, right_slices: int, tile_itemsize: int, extra_tiles: int = 0
) -> int:
    """Bytes that a launch takes; `extra_tiles` further tiles for each consumer."""
    c = config
    tile = TILE_ROWS * c.tile_cols * tile_itemsize
    return (
        right_slices * TILE_K * c.tile_cols * 2
        + c.consumers * c.stages * TILE_ROWS * TILE_K * 2
        + c.consumers * (c.slots + extra_tiles) * tile
        + RESERVED
    )


def fits(config: StripConfig, right_slices: int, tile_itemsize: int, extra_tiles: int = 0) -> bool:
    """Whether shared memory and the thread block have room for a launch."""
    taken = shared_memory(config, right_slices, tile_itemsize, extra_tiles)
    return taken <= SHARED_MEMORY and config.consumers in CONSUMERS


def tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, gmem_cols: int | None = None):
    """Shared memory for [..., rows, cols], laid out for the copy engine and the tensor cores.

    `gmem_cols` is the width of the matrix that is copied to or from; no block may straddle its end.
    """
    itemsize = jnp.dtype(dtype).itemsize
    cols = math.gcd(shape[-1], gmem_cols or shape[-1])
    swizzle = plgpu.find_swizzle(8 * itemsize * cols)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    # A swizzle of 16 bytes is none.
    swizzles = () if swizzle == 16 else (plgpu.SwizzleTransform(swizzle),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzles))


def pad(array: jax.Array, *shape: int) -> jax.Array:
    """`array` with zeros up to `shape`; itself where it has that shape already."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)])


def pad_features(vectors: Sequence[jax.Array], sweep: Sweep) -> jax.Array:
    """Vectors [out] as f32[len(vectors), padded_out]."""
    stacked = jnp.stack([v.astype(jnp.float32) for v in vectors])
    return pad(stacked, len(vectors), sweep.padded_out)
