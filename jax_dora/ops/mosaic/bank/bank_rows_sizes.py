"""The operands, sizes, config and plan of the kernels of `bank_rows` and `bank_decode`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_dora.ops.bank_slots import RANKS
from jax_dora.ops.dispatch.choose import HOPPER_SM_COUNT
from jax_dora.ops.mosaic.hopper.limits import ROW_ALIGNMENT, TILE_K, pad

# The rows of one wgmma.
TILE_ROWS = 64
# The warps that fetch.
WARPS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      slices: the number of tiles of `in` that a thread block of the first kernel sums. With more
        slices there are fewer partial sums and fewer thread blocks.
      shrink_stages, expand_stages: the number of pipeline stages, multiples of `WARPS`. A stage of
        the first kernel has `slices` tiles of A, one of the second kernel a tile of B.
    """

    slices: int
    shrink_stages: int
    expand_stages: int


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
        """Returns the maximum number of slots in use in a tile."""
        return min(self.rows, TILE_ROWS, self.slots)

    @property
    def entries(self) -> int:
        """Returns the length of the head of a tile's plan."""
        return pl.cdiv(1 + self.in_use, TILE_ROWS) * TILE_ROWS

    @property
    def depth(self) -> int:
        """Returns the rank that tensor cores multiply: they read 64 at a time."""
        return pl.cdiv(self.rank, TILE_K) * TILE_K

    def ranks(self, rank: Any) -> Any:
        """Returns the part of a slot that TMA copies, `depth` ranks from an adapter's first one on.

        An adapter is at the end of its slot, where TMA reads zeros past the end.
        """
        return pl.ds(self.rank - lax.div(rank + (RANKS - 1), RANKS) * RANKS, self.depth)


def fastest_config(sizes: Sizes, members: int = 1) -> Config:
    """Returns the config for some sizes and a number of members.

    It was the fastest for the projections of Llama 3 8B's dimensions and 64 slots on an H100. With
    few tiles of rows, small thread blocks of the first kernel are best, which fit on a
    multiprocessor beside those of the base's product. With many tiles, it has the most slices, up
    to 3, until its thread blocks fit on the multiprocessors at the same time.
    """
    if sizes.tiles <= 2:
        slices, shrink_stages = 1, 8 * TILE_K // sizes.depth
    else:
        blocks = sizes.tiles * members * sizes.in_features // TILE_K
        # At ranks above 64, the stages of three slices are too large.
        most = 3 if sizes.depth == TILE_K else 2
        slices, shrink_stages = min(pl.cdiv(blocks, HOPPER_SM_COUNT), most), 4
    # With several tiles, there are enough thread blocks of the second kernel to hide the memory's
    # latency with fewer stages.
    return Config(slices, shrink_stages, 8 if sizes.tiles == 1 else 4)


def plan(ids: jax.Array, slots: int) -> jax.Array:
    """Returns a step's plan for the kernels, which is the same for all projections and layers.

    It is i32[tiles, length], for each tile of `TILE_ROWS` rows:

    - the head, `Sizes.entries` long: the number of slots in use, and these slots;
    - for each row, the index of its slot among the slots in use; -1 for a row of the base, -2 for
      an invalid id, whose result is NaN.

    Args:
      ids: i32[rows].
      slots: the number of slots.
    """
    sizes = Sizes(ids.shape[0], 0, slots, 0)
    ids = jnp.pad(ids, (0, sizes.tiles * TILE_ROWS - sizes.rows), constant_values=-1)
    row = jnp.arange(TILE_ROWS, dtype=jnp.int32)
    entry = jnp.arange(sizes.entries, dtype=jnp.int32)[:, None]

    def plan_tile(ids: jax.Array) -> jax.Array:
        # All pairs of rows are compared and summed, because XLA compiles each sum to one kernel,
        # but a scan or scatter to several.
        is_first = ~((ids[None] == ids[:, None]) & (row[None] < row[:, None])).any(1)
        is_first = is_first & (ids >= 0) & (ids < slots)
        index = jnp.sum(is_first[None] & (ids[None] < ids[:, None]), 1, dtype=jnp.int32)
        in_use = jnp.where(is_first[None] & (index[None] + 1 == entry), ids[None], 0)
        head = jnp.sum(
            jnp.where(entry == 0, is_first[None].astype(jnp.int32), in_use), 1, dtype=jnp.int32
        )
        return jnp.concatenate([head, jnp.where(ids < 0, -1, jnp.where(ids < slots, index, -2))])

    return jax.vmap(plan_tile)(ids.reshape(sizes.tiles, TILE_ROWS))


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
