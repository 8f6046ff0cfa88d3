"""Cuts the result of `product` into tiles: launch knobs, and which calls they suit."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops import choose
from jax_dora.ops.mosaic.hopper import TILE_K

CONSUMERS = 2
# What a consumer stores at a time: one instruction's rows, one swizzled row of 16-bit numbers.
CHUNK_ROWS, CHUNK_COLS = 64, 64
CHUNK_SLOTS = 2
# The least features at which many rows were measured.
NARROW = 768


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_rows, tile_cols: of the result, for a thread block. 128 × 256 fills the registers of two
        consumers with accumulators, and asks the least of shared memory and of the level-2 cache
        for each product.
      split_rows: the two consumers divide the tile's rows, or else its columns. By rows, a consumer
        issues the widest instruction, which reads the least from shared memory.
      stages: slices of the operands in flight.
      band: tiles that are worked on at one time form a band this many tiles wide, so that what they
        read is in the level-2 cache.
      band_in_cols: bands are of columns, or else of rows.
    """

    tile_rows: int = 128
    tile_cols: int = 256
    split_rows: bool = True
    stages: int = 4
    band: int = 8
    band_in_cols: bool = False

    @property
    def consumer_tile(self) -> tuple[int, int]:
        if self.split_rows:
            return self.tile_rows // CONSUMERS, self.tile_cols
        return self.tile_rows, self.tile_cols // CONSUMERS


def refuses(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in], W [in, out] and an adapter of `dtype` are not taken, or None."""
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
    wide = rows >= 1024 and in_features >= 4096 and out >= 1024 and rows * out >= 2**22
    return wide or (rows >= 4096 and min(in_features, out) >= NARROW)


def config(rows: int, contracted: int, cols: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for a result [rows, cols] (H200, 9446849, `benchmarks tune`)."""
    if rows >= 1024 and contracted >= 2048 and 1449 <= cols <= 2896 and rows * cols >= 2**21:
        return Config(tile_rows=128, tile_cols=128, stages=6)
    usual, narrower = Config(), Config(tile_cols=192)
    is_faster = _time(rows, cols, narrower) < 0.95 * _time(rows, cols, usual)
    return narrower if is_faster else usual


def _time(rows: int, cols: int, config: Config) -> int:
    """Returns in which time, of any unit, a Hopper's multiprocessors are through with their tiles:
    each takes as long as its columns and some more (H200: 12608 × 768 by 768 and 3072)."""
    tiles = pl.cdiv(rows, config.tile_rows) * pl.cdiv(cols, config.tile_cols)
    return pl.cdiv(tiles, choose.HOPPER_SM_COUNT) * (config.tile_cols + 48)
