"""How the elementwise kernels walk over [rows, out]: compose, its backward and SwiGLU's.

A thread block owns one block of output features, so that g stays in its registers (and so does the
sum over rows in the backward pass), and walks down the rows:

- [rows, out] is viewed as [rows, out/lane, lane], where lane is the largest power of two up to 256
  that divides out: the copy engine takes no box with a side over 256.
- A block of output features is `FEATURES` wide, [FEATURES/lane, lane]; each of the 128 threads
  holds 8 neighbouring features, 16 bytes of bf16: full-width shared-memory accesses, no bank
  conflicts, and no exchange between threads.
- A tile is `tile_rows` rows of that block. Tiles go around among the thread blocks that share a
  block of features, so that what is read at one time lies close together.
- Past the last row or feature the copy engine reads zeros and writes nothing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper import ALIGNMENT

FEATURES = 1024
MAX_LANE = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_bytes: of one operand's tile. 8 KiB: two operands and four stages keep some 64 KiB in
        flight per thread block, twice what the latency of memory asks for.
      stages: tiles being fetched while one is worked on.
      blocks_per_sm: resident thread blocks, to overlap one's arithmetic with another's waiting.
    """

    tile_bytes: int = 8192
    stages: int = 4
    blocks_per_sm: int = 2


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static geometry of one launch; see the module's docstring."""

    rows: int
    out: int
    lane: int
    tile_rows: int
    column_blocks: int
    row_blocks: int
    steps: int

    @property
    def view(self) -> tuple[int, int, int]:
        """Returns the shape that [rows, out] is viewed as."""
        return self.rows, self.out // self.lane, self.lane

    @property
    def feature_block(self) -> tuple[int, int]:
        """Returns the block of features of one thread block, in the view's last two axes."""
        return FEATURES // self.lane, self.lane


def tile(rows: int, out: int, dtype, config: Config, sm_count: int) -> Tiling:
    """Returns the tiling of [rows, out] over `sm_count` multiprocessors."""
    tile_rows = max(1, config.tile_bytes // (FEATURES * jnp.dtype(dtype).itemsize))
    column_blocks = -(-out // FEATURES)
    row_tiles = -(-rows // tile_rows)
    row_blocks = min(row_tiles, max(1, sm_count * config.blocks_per_sm // column_blocks))
    steps = -(-row_tiles // row_blocks)
    return Tiling(rows, out, lane(out), tile_rows, column_blocks, row_blocks, steps)


def lane(out: int) -> int:
    """Returns the largest power of two up to 256 that divides `out`."""
    return math.gcd(out, MAX_LANE)


def refuses(rows: int, out: int, dtype) -> str | None:
    """Returns why the elementwise kernels cannot take [rows, out] of `dtype`, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(dtype)} is none of bfloat16, float16, float32"
    if rows == 0:
        return "there are no rows"
    if out == 0 or out % ALIGNMENT:
        return f"out = {out} is not a multiple of {ALIGNMENT} (rows of 16 bytes)"
    return None


def add_compensated(
    sums: tuple[jax.Array, jax.Array], term: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (total, what rounding has added to it so far) with `term` added; Kahan, CACM 8
    (1965)."""
    total, excess = sums
    term = term - excess
    new = total + term
    return new, (new - total) - term
