"""Rows of one token each, every one with the adapter of its slot:
y[n] = g[slot]∘(base[n] + s[slot]·(x[n] A[slot]) B[slot]) + bias.

    base  [rows, out]   bf16 or fp16      x     [rows, in]      base's dtype, 1 to 256 rows
    A     [slots, r, in]   base's dtype   B     [slots, r, out]  likewise; r ranks have room
    g     f32[slots, out]  (optional)     s     f32[slots]       rank  i32[slots]
    y     [rows, out]                     bias  [out] (optional)

Two kernels, `bank_rows_shrink` and `bank_rows_expand`, for all projections of the same x at once,
its members; between them XLA adds up the parts of x A, in a fixed order. Each thread block has a
strip of 64 columns of A or B and goes through the slots that rows have, each once, by the real rank
(in steps of 16, 32, 64): tensor cores multiply 64 rows an instruction, those of other slots being
zeros, and add up. Nothing is sorted or copied, and what a row gets does not depend on its company.

Bytes: A, B and g of the slots in use, once, base and y; the floor is bytes / copy rate. FLOPs:
2 · 64⌈rows / 64⌉ · r · (in + out) for every slot in use.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_dora.ops.choose import HOPPER_SM_COUNT
from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.hopper import RESERVED, SHARED_MEMORY, TILE_K
from jax_dora.ops.mosaic.launch import launcher

# Of one instruction.
TILE_ROWS = 64
MOST_ROWS = 256
MOST_RANK = 128
# That fetch.
WARPS = 4


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
    """The sizes of a call: rows, in, out of all members, slots of the layer, ranks that have room,
    and how many members there are."""

    rows: int
    in_features: int
    out: int
    slots: int
    rank: int
    members: int = 1

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


def refuses(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: jax.typing.DTypeLike,
    held: jax.typing.DTypeLike,
) -> str | None:
    """Returns why x [rows, in] of `dtype` and a bank of `slots` with room for `rank` ranks, its
    matrices of dtype `held`, are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if held != dtype:
        return f"x has dtype {jnp.dtype(dtype)}, and the bank {jnp.dtype(held)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    for name, size in (("in", in_features), ("out", out)):
        if size == 0 or size % TILE_K:
            return f"{name} = {size} is not a multiple of {TILE_K}"
    if rank % hopper.ALIGNMENT or not 0 < rank <= MOST_RANK:
        return f"the bank has room for rank {rank}, no multiple of 8 up to {MOST_RANK}"
    if _config(Sizes(rows, in_features, out, slots, rank)) is None:
        return f"shared memory has no room for {rows} rows of {slots} slots of rank {rank}"
    return None


def wins(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: jax.typing.DTypeLike,
    held: jax.typing.DTypeLike,
) -> bool:
    """Returns whether the kernels were faster than every way of XLA's (`benchmarks bank`: the
    projections of a layer of Llama 3 8B's dimensions, 64 slots)."""
    return rows > 8 and min(in_features, out) >= 1024


def config(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: jax.typing.DTypeLike,
    held: jax.typing.DTypeLike,
    members: int = 1,
) -> Config:
    """Returns the launch knobs for a call that is not refused, or for one of several members, none
    of which is; then `out` is the sum of theirs."""
    found = _config(Sizes(rows, in_features, out, slots, rank, members))
    assert found is not None
    return found


def _config(sizes: Sizes) -> Config | None:
    """Returns knobs with two stages or more in each kernel, and as many tiles of `in` to a thread
    block as leave no more blocks than multiprocessors, or fewer where they have no room; None where
    one has none either."""
    of_rows, row = sizes.tiles * TILE_ROWS, 2 * TILE_K

    def stages(blocks: int, tile: int, beside: int) -> int:
        most = min(16 if blocks <= HOPPER_SM_COUNT else 8, max(sizes.in_use, 2))
        found = min(most, (SHARED_MEMORY - RESERVED - beside) // tile)
        # Of which each warp has as many.
        return found if found < WARPS else found // WARPS * WARPS

    depth = padded(sizes.rank)
    beside = of_rows * (2 * depth + row) + 2 * row * (sizes.in_use + 1)
    expand = stages(sizes.out // TILE_K, depth * row, beside)
    tiles = sizes.members * sizes.in_features // TILE_K
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
    sizes = Sizes(ids.shape[0], 0, 0, slots, 0)
    ids = jnp.pad(ids, (0, sizes.tiles * TILE_ROWS - sizes.rows), constant_values=-1)
    slot = jnp.arange(slots, dtype=jnp.int32)
    used = (ids[None] == slot[:, None]).any(1)
    ends = jnp.cumsum(used, dtype=jnp.int32)
    head = jnp.zeros(sizes.entries, jnp.int32).at[0].set(ends[-1])
    head = head.at[jnp.where(used, ends, sizes.entries)].set(slot, mode="drop")
    number = jnp.where(ids < slots, ends[jnp.clip(ids, 0, slots - 1)] - 1, -2)
    return jnp.concatenate([head, jnp.where(ids < 0, -1, number)])


class Member(NamedTuple):
    """One of the projections of the same x: base [rows, out], the adapters in slots as
    `bank_slots.Slots`, perhaps of several layers, the first slot i32[] that is meant, bias [out]
    or None."""

    base: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    g: jax.Array | None
    scale: jax.Array
    rank: jax.Array
    first: jax.Array
    bias: jax.Array | None


@launcher("slots")
def launch(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None = None,
    *,
    slots: int | None = None,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, ...]:
    """Returns y [rows, out] of each member.

    Args:
      members: with room for as many ranks; all have g or none has, and so with the bias.
      ids: i32[rows], from 0 to slots - 1, -1 for the base alone, `slots` for a row of NaN.
      step: `plan` of the ids.
      slots: of the layer; by default all that members have.
    """
    from jax_dora.ops.mosaic import bank_rows_expand, bank_rows_shrink

    (rows, in_features), rank = x.shape, members[0].lora_a.shape[1]
    slots = slots or members[0].rank.shape[0]
    out = sum(one.base.shape[1] for one in members)
    sizes = Sizes(rows, in_features, out, slots, rank)
    held = pl.cdiv(rows, hopper.ROW_ALIGNMENT) * hopper.ROW_ALIGNMENT
    step = plan(ids, slots) if step is None else step
    first = [one.first.astype(jnp.int32).reshape(1) for one in members]
    ranks = [one.rank for one in members]
    parts = bank_rows_shrink.launch(
        hopper.pad(x, held, in_features),
        [one.lora_a for one in members],
        ranks,
        step,
        first,
        sizes,
        config,
    )
    safe = jnp.pad(jnp.clip(ids, 0, slots - 1), (0, held - rows))
    of_rows = [(one.scale[one.first + safe], one.rank[one.first + safe]) for one in members]
    scale, ranks_of_rows = (jnp.stack(some)[..., None] for some in zip(*of_rows, strict=True))
    z = scale * jnp.sum(parts, axis=0)
    z = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 2) < ranks_of_rows, z, 0)
    z = jnp.pad(z, ((0, 0), (0, 0), (0, padded(rank) - rank)))
    g = [one.g.astype(jnp.float32) for one in members if one.g is not None]
    bias = [one.bias.astype(jnp.float32) for one in members if one.bias is not None]
    results = bank_rows_expand.launch(
        [hopper.pad(one.base, held, one.base.shape[1]) for one in members],
        z.astype(x.dtype),
        [one.lora_b for one in members],
        g or None,
        ranks,
        step,
        first,
        bias or None,
        sizes,
        config,
    )
    return tuple(y[:rows] for y in results)
