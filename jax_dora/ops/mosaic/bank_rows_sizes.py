"""Sizes, launch knobs and the plan of a step, which the kernels of `bank_rows` share."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops.choose import HOPPER_SM_COUNT
from jax_dora.ops.mosaic.hopper import RESERVED, ROW_ALIGNMENT, SHARED_MEMORY, TILE_K, pad

# Of one instruction.
TILE_ROWS = 64
# That fetch.
WARPS = 4
# Up to so many rows thread blocks of few stages, which find room beside those of the base's
# product, are faster (an H100, the projections of Llama 3 8B's dimensions, 64 slots).
SMALL_BLOCKS_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      slices: tiles of `in` that a thread block of the first product adds up. More of them are
        fewer partial sums, and fewer thread blocks.
      shrink_stages, expand_stages: tiles of A and of B in flight in a thread block: a latency's
        worth of bytes. With fewer, two thread blocks have room on a multiprocessor.
    """

    slices: int = 1
    shrink_stages: int = 8
    expand_stages: int = 8


class Sizes(NamedTuple):
    """The sizes of a call that its kernels share: rows, in, slots of the layer, and ranks that have
    room."""

    rows: int
    in_features: int
    slots: int
    rank: int

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def in_use(self) -> int:
        """Returns how many slots rows can have at most."""
        return min(self.rows, self.slots)

    @property
    def entries(self) -> int:
        """Returns the length of a plan's head."""
        return pl.cdiv(1 + self.in_use, TILE_ROWS) * TILE_ROWS

    @property
    def boxes(self) -> list[int]:
        """Returns the numbers of ranks that a copy may have, of which the least that suffices is
        taken."""
        return [box for box in (16, 32, 64) if box < self.rank] + [self.rank]


def config_of(sizes: Sizes, out: int, members: int = 1) -> Config | None:
    """Returns knobs with two stages or more in each kernel, and as many tiles of `in` to a thread
    block as leave no more blocks than multiprocessors, or fewer where they have no room; None where
    one has none either. `out` is the sum of all members'."""
    of_rows, row = sizes.tiles * TILE_ROWS, 2 * TILE_K

    def stages(blocks: int, tile: int, beside: int) -> int:
        most = 16 if blocks <= HOPPER_SM_COUNT else 8
        most = min(WARPS if sizes.rows <= SMALL_BLOCKS_ROWS else most, max(sizes.in_use, 2))
        found = min(most, (SHARED_MEMORY - RESERVED - beside) // tile)
        # Of which each warp has as many.
        return found if found < WARPS else found // WARPS * WARPS

    depth = padded(sizes.rank)
    beside = of_rows * (2 * depth + row)
    expand = stages(out // TILE_K, depth * row, beside)
    tiles = members * sizes.in_features // TILE_K
    for slices in range(pl.cdiv(tiles, HOPPER_SM_COUNT), 0, -1):
        blocks = pl.cdiv(tiles, slices)
        beside = of_rows * (slices * row + 4 * sizes.rank)
        shrink = stages(blocks, slices * depth * row, beside)
        if min(shrink, expand) >= 2:
            return Config(slices, shrink, expand)
    return None


def padded(rank: int) -> int:
    """Returns the ranks that the second product has: tensor cores read 64 at a time."""
    return pl.cdiv(rank, TILE_K) * TILE_K


def plan(ids: jax.Array, slots: int) -> jax.Array:
    """Returns what the kernels of a step have to know of its rows, from i32 ids [rows]: i32 of the
    number of slots in use, of these slots, and of each row the number of its own among them.

    It is the same for all projections and layers. A row of the base has -1, one of NaN -2.
    """
    sizes = Sizes(ids.shape[0], 0, slots, 0)
    ids = jnp.pad(ids, (0, sizes.tiles * TILE_ROWS - sizes.rows), constant_values=-1)
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)
    # Comparisons of all pairs of rows are sums: each is one kernel, where scans and scatters are
    # several.
    is_first = ~((ids[None] == ids[:, None]) & (row[None] < row[:, None])).any(1)
    is_first = is_first & (ids >= 0) & (ids < slots)
    number = jnp.sum(is_first[None] & (ids[None] < ids[:, None]), 1, dtype=jnp.int32)
    entry = jnp.arange(sizes.entries, dtype=jnp.int32)[:, None]
    named = jnp.where(is_first[None] & (number[None] + 1 == entry), ids[None], 0)
    head = jnp.sum(
        jnp.where(entry == 0, is_first[None].astype(jnp.int32), named), 1, dtype=jnp.int32
    )
    return jnp.concatenate([head, jnp.where(ids < 0, -1, jnp.where(ids < slots, number, -2))])


class Member(NamedTuple):
    """One of the projections of the same x: the adapters in slots as `bank_slots.Slots`, perhaps of
    several layers, and the first slot i32[] that is meant."""

    lora_a: jax.Array
    lora_b: jax.Array
    rank: jax.Array
    first: jax.Array


class Call(NamedTuple):
    """A launch's operands as its kernels take them: x of padded rows, members whose `first` is
    i32[1], the plan of the step, and the sizes without the padding."""

    x: jax.Array
    members: list[Member]
    plan: jax.Array
    sizes: Sizes


def call_of(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None,
    slots: int | None,
) -> Call:
    """Returns a launch's operands; arguments are those of `bank_rows.launch`."""
    (rows, in_features), rank = x.shape, members[0].lora_a.shape[1]
    slots = slots or members[0].rank.shape[0]
    held = pl.cdiv(rows, ROW_ALIGNMENT) * ROW_ALIGNMENT
    return Call(
        pad(x, held, in_features),
        [one._replace(first=one.first.astype(jnp.int32).reshape(1)) for one in members],
        plan(ids, slots) if step is None else step,
        Sizes(rows, in_features, slots, rank),
    )
