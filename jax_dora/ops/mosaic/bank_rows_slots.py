"""How both kernels of `bank_rows` go through the slots that rows have, by the plan of a step."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows import SLOT_BITS, TILE_ROWS, Sizes


def facts_types(sizes: Sizes, *, scaled: bool = False):
    """Returns the shared memory for the plan and the ranks of the layer's slots, and their scales
    perhaps."""
    copies = len(_pieces(sizes.entries)) + sizes.tiles
    copies += (1 + scaled) * len(_pieces(sizes.slots))
    more = {"scale": plgpu.SMEM((sizes.slots,), jnp.float32)} if scaled else {}
    return more | {
        "step": plgpu.SMEM((sizes.entries,), jnp.int32),
        "ids": plgpu.SMEM((sizes.tiles, TILE_ROWS), jnp.int32),
        "rank": plgpu.SMEM((sizes.slots,), jnp.int32),
        "ready": plgpu.Barrier(num_arrivals=copies),
    }


def for_one(member, count: int, function: Callable[[int], None]) -> None:
    """Calls a function of the thread block's member, one of `count`, as a number."""
    if count == 1:
        return function(0)
    for number in range(count):
        pl.when(member == number)(functools.partial(function, number))
    return None


def load_facts(step_gmem, of_slots, member, first, facts, sizes: Sizes) -> None:
    """Fetches the plan, and of the slots of a member's layer what `of_slots` has by the names of
    `facts`, for each member."""

    def copy(source, target):
        plgpu.copy_gmem_to_smem(source, target, facts["ready"])

    for start, size in _pieces(sizes.entries):
        copy(step_gmem.at[pl.ds(start, size)], facts["step"].at[pl.ds(start, size)])
    for tile in range(sizes.tiles):
        rows = pl.ds(sizes.entries + tile * TILE_ROWS, TILE_ROWS)
        copy(step_gmem.at[rows], facts["ids"].at[tile])
    for name, of_members in of_slots.items():

        def copy_slots(number, name=name, of_members=of_members):
            for start, size in _pieces(sizes.slots):
                source = of_members[number].at[pl.ds(first + start, size)]
                copy(source, facts[name].at[pl.ds(start, size)])

        for_one(member, len(of_members), copy_slots)


def _pieces(size: int) -> list[tuple[int, int]]:
    """Returns (start, size) of the parts in which the copy engine takes so many elements."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def fetch_slots(facts, free, stages, boxes, copy, copy_first=None) -> None:
    """Fills stages with the slots in use, one after the other, as consumers hand stages back.

    Args:
      copy: of (slot, stage, box), fetches the first `box` ranks of a slot.
      copy_first: of (slot, stage), fetches what a slot has beside its ranks.
    """

    def fetch(index, _):
        slot = _slot_of(facts["step"][1 + index])
        stage = lax.rem(index, stages)
        plgpu.barrier_wait(free.at[stage])
        if copy_first is not None:
            copy_first(slot, stage)
        # The least box that holds the rank.
        rank = facts["rank"][slot]
        for below, box in zip([-1, *boxes], boxes, strict=False):
            pl.when((rank > below) & (rank <= box))(lambda box=box: copy(slot, stage, box))

    lax.fori_loop(0, facts["step"][0], fetch, None)
    # Every stage was handed back once more than it was filled.
    lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_wait(free.at[i]), None)


def own_ids(facts, tile):
    """Returns the ids of a tile's rows, laid out as a column of its results."""
    return plgpu.load(facts["ids"].at[tile], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def if_met(entry, tile, ids, old, new):
    """Returns `old` [rows, cols] with the rows of an entry's slot replaced by those of `new(slot)`;
    `old` where the tile has none."""

    def met():
        slot = _slot_of(entry)
        own = lax.broadcast_in_dim(ids == slot, old.shape, (0,))
        return jnp.where(own, new(slot), old)

    mark = lax.bitwise_and(lax.shift_right_logical(entry, SLOT_BITS + tile), jnp.int32(1))
    return lax.cond(mark == 1, met, lambda: old)


def _slot_of(entry):
    """Returns the slot of a plan's entry."""
    return lax.bitwise_and(entry, jnp.int32(2**SLOT_BITS - 1))
