"""The tiling of `product`: its configuration, and which calls the kernel supports."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.hopper.limits import TILE_K

CONSUMERS = 2
# A consumer stores its results in chunks: the rows of one wgmma, and a swizzled row of 16-bit
# numbers.
CHUNK_ROWS, CHUNK_COLS = 64, 64
CHUNK_BUFFERS = 2
# The smallest number of features that was measured with many rows.
MIN_FEATURES = 768


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      tile_rows, tile_cols: the tile of the result that a thread block computes. The accumulators of
        128 × 256 fill the registers of two consumers; this tile needs the least traffic from shared
        memory and the L2 cache per FLOP.
      split_rows: whether the two consumers divide the tile by rows, or by columns. By rows, a
        consumer issues the widest wgmma, which reads the least from shared memory.
      stages: the number of pipeline stages, one slice of both operands each.
      band: the width, in tiles, of a band of tiles that are computed at the same time, so that the
        operands they share are in the L2 cache.
      band_in_cols: whether the width is counted in columns of tiles, or in rows.
    """

    tile_rows: int = 128
    tile_cols: int = 256
    split_rows: bool = True
    stages: int = 4
    band: int = 8
    band_in_cols: bool = False

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """Returns the rows and columns of a tile that one consumer computes."""
        if self.split_rows:
            return self.tile_rows // CONSUMERS, self.tile_cols
        return self.tile_rows, self.tile_cols // CONSUMERS


class Tiles(NamedTuple):
    """The tiles of a result, and the thread blocks that compute them in turn.

    Attributes:
      config: their sizes and their order.
      rows, cols: how many there are.
      blocks: the number of thread blocks.
    """

    config: Config
    rows: int
    cols: int
    blocks: int

    @classmethod
    def of(cls, config: Config, rows: int, cols: int, sm_count: int) -> "Tiles":
        """Returns the tiles of a result [rows, cols]."""
        counts = pl.cdiv(rows, config.tile_rows), pl.cdiv(cols, config.tile_cols)
        return cls(config, *counts, min(sm_count, counts[0] * counts[1]))

    def in_pairs(self) -> "Tiles":
        """Returns the tiles with two for each thread block, if every tile has its own block and a
        Hopper GPU takes no more rounds."""
        count, sms = self.rows * self.cols, choose.HOPPER_SM_COUNT
        pairs = pl.cdiv(count, 2)
        is_as_fast = 2 * pl.cdiv(pairs, sms) <= pl.cdiv(count, sms)
        return self._replace(blocks=pairs) if self.blocks == count and is_as_fast else self

    def of_block(self, block: jax.Array) -> jax.Array:
        """Returns how many tiles a thread block computes."""
        return lax.div(self.rows * self.cols - block + self.blocks - 1, self.blocks)

    def corner(self, block: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first row and column of the tile that a thread block computes as `index`."""
        c, number = self.config, block + index * self.blocks
        row, col = plgpu.planar_snake(number, (self.rows, self.cols), int(c.band_in_cols), c.band)
        return row * c.tile_rows, col * c.tile_cols


def refuses(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in], W [in, out] and adapters of `dtype` are not supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x and the kernel have dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if rows == 0:
        return "there are no rows"
    for name, size in (("in", in_features), ("out", out)):
        if size % TILE_K:
            return f"{name} = {size} is not a multiple of {TILE_K}"
        if size == 0:
            return f"{name} is 0"
    return None


def wins(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`, and from
    768 features on `benchmarks sizes`)."""
    large = rows >= 1024 and in_features >= 4096 and out >= 1024 and rows * out >= 2**22
    return large or (rows >= 4096 and min(in_features, out) >= MIN_FEATURES)


def config(rows: int, contracted: int, cols: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the fastest config for a result [rows, cols] (H200, 9446849, `benchmarks tune`)."""
    if rows >= 1024 and contracted >= 2048 and 1449 <= cols <= 2896 and rows * cols >= 2**21:
        return Config(tile_rows=128, tile_cols=128, stages=6)
    usual, narrower = Config(), Config(tile_cols=192)
    is_faster = _time(rows, cols, narrower) < 0.95 * _time(rows, cols, usual)
    return narrower if is_faster else usual


def _time(rows: int, cols: int, config: Config) -> int:
    """Returns an estimate of the kernel's time on a Hopper, in arbitrary units.

    A tile's time is proportional to its columns plus a constant, which was fitted on an H200 to
    12608 × 768 by 768 and 3072.
    """
    tiles = pl.cdiv(rows, config.tile_rows) * pl.cdiv(cols, config.tile_cols)
    return pl.cdiv(tiles, choose.HOPPER_SM_COUNT) * (config.tile_cols + 48)
