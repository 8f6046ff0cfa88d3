"""The operands, sizes, config and plan of the kernels of `bank_rows` and `bank_few_rows`."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops.choose import HOPPER_SM_COUNT
from jax_dora.ops.mosaic.hopper import RESERVED, ROW_ALIGNMENT, SHARED_MEMORY, TILE_K, pad

# The rows of one wgmma.
TILE_ROWS = 64
# The warps that fetch.
WARPS = 4
# Up to this number of rows, thread blocks with few stages are faster, because they fit on a
# multiprocessor together with those of the base's product (an H100, the projections of Llama 3 8B's
# dimensions, 64 slots).
SMALL_BLOCKS_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      slices: the number of tiles of `in` that a thread block of the first kernel sums. With more
        slices there are fewer partial sums and fewer thread blocks.
      shrink_stages, expand_stages: the number of pipeline stages, one tile of A or B each, enough
        to hide the memory's latency. With fewer stages two thread blocks fit on a multiprocessor.
    """

    slices: int = 1
    shrink_stages: int = 8
    expand_stages: int = 8


class Sizes(NamedTuple):
    """The sizes of a call, the same for all its projections.

    Attributes:
      rows, in_features: x's shape.
      slots: the number of the layer's slots.
      rank: the bank's maximum rank.
    """

    rows: int
    in_features: int
    slots: int
    rank: int

    @property
    def tiles(self) -> int:
        """Returns the number of tiles of rows."""
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def in_use(self) -> int:
        """Returns the maximum number of slots in use."""
        return min(self.rows, self.slots)

    @property
    def entries(self) -> int:
        """Returns the length of a plan's head."""
        return pl.cdiv(1 + self.in_use, TILE_ROWS) * TILE_ROWS

    @property
    def boxes(self) -> list[int]:
        """Returns the possible ranks of a TMA box; a copy uses the smallest that is sufficient."""
        return [box for box in (16, 32, 64) if box < self.rank] + [self.rank]


def fastest_config(sizes: Sizes, out: int, members: int = 1) -> Config | None:
    """Returns a config with at least two stages in both kernels, or None if none fits.

    It has the most slices that are useful, namely until the thread blocks of the first kernel fit
    on the multiprocessors at the same time, and that fit into shared memory.

    Args:
      sizes: the sizes.
      out: the sum of the output features of all members.
      members: the number of members.
    """
    padded_rows, row_bytes = sizes.tiles * TILE_ROWS, 2 * TILE_K

    def stages(blocks: int, stage_bytes: int, other_bytes: int) -> int:
        most = 16 if blocks <= HOPPER_SM_COUNT else 8
        most = min(WARPS if sizes.rows <= SMALL_BLOCKS_ROWS else most, max(sizes.in_use, 2))
        count = min(most, (SHARED_MEMORY - RESERVED - other_bytes) // stage_bytes)
        # The same number for each warp.
        return count if count < WARPS else count // WARPS * WARPS

    depth = padded(sizes.rank)
    expand = stages(out // TILE_K, depth * row_bytes, padded_rows * (2 * depth + row_bytes))
    tiles = members * sizes.in_features // TILE_K
    for slices in range(pl.cdiv(tiles, HOPPER_SM_COUNT), 0, -1):
        blocks = pl.cdiv(tiles, slices)
        other_bytes = padded_rows * (slices * row_bytes + 4 * sizes.rank)
        shrink = stages(blocks, slices * depth * row_bytes, other_bytes)
        if min(shrink, expand) >= 2:
            return Config(slices, shrink, expand)
    return None


def padded(rank: int) -> int:
    """Returns the rank that the second kernel multiplies: tensor cores read 64 at a time."""
    return pl.cdiv(rank, TILE_K) * TILE_K


def plan(ids: jax.Array, slots: int) -> jax.Array:
    """Returns a step's plan for the kernels, which is the same for all projections and layers.

    It is an i32 vector:

    - the head, `Sizes.entries` long: the number of slots in use, and these slots;
    - for each row, the index of its slot among the slots in use; -1 for a row of the base, -2 for
      an invalid id, whose result is NaN.

    Args:
      ids: i32[rows].
      slots: the number of slots.
    """
    sizes = Sizes(ids.shape[0], 0, slots, 0)
    ids = jnp.pad(ids, (0, sizes.tiles * TILE_ROWS - sizes.rows), constant_values=-1)
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    # All pairs of rows are compared and summed, because XLA compiles each sum to one kernel, but a
    # scan or scatter to several.
    is_first = ~((ids[None] == ids[:, None]) & (row[None] < row[:, None])).any(1)
    is_first = is_first & (ids >= 0) & (ids < slots)
    index = jnp.sum(is_first[None] & (ids[None] < ids[:, None]), 1, dtype=jnp.int32)
    entry = jnp.arange(sizes.entries, dtype=jnp.int32)[:, None]
    in_use = jnp.where(is_first[None] & (index[None] + 1 == entry), ids[None], 0)
    head = jnp.sum(
        jnp.where(entry == 0, is_first[None].astype(jnp.int32), in_use), 1, dtype=jnp.int32
    )
    return jnp.concatenate([head, jnp.where(ids < 0, -1, jnp.where(ids < slots, index, -2))])


class Member(NamedTuple):
    """The adapters of one of the projections of the same x.

    Attributes:
      lora_a, lora_b, rank: see `bank_slots.Slots`; perhaps of several layers.
      first: i32[], the layer's first slot; i32[1] in a `Call`.
    """

    lora_a: jax.Array
    lora_b: jax.Array
    rank: jax.Array
    first: jax.Array


class Call(NamedTuple):
    """The operands of the kernels.

    Attributes:
      x: [padded rows, in].
      members: the members, with `first` i32[1].
      plan: the step's plan.
      sizes: the sizes, without padding.
    """

    x: jax.Array
    members: list[Member]
    plan: jax.Array
    sizes: Sizes


def prepare(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None,
    slots: int | None,
) -> Call:
    """Returns the operands of the kernels, from the arguments of `bank_rows.launch`."""
    (rows, in_features), rank = x.shape, members[0].lora_a.shape[1]
    slots = slots or members[0].rank.shape[0]
    padded_rows = pl.cdiv(rows, ROW_ALIGNMENT) * ROW_ALIGNMENT
    return Call(
        pad(x, padded_rows, in_features),
        [m._replace(first=m.first.astype(jnp.int32).reshape(1)) for m in members],
        plan(ids, slots) if step is None else step,
        Sizes(rows, in_features, slots, rank),
    )
