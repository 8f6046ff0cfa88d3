"""The walk through the slots that rows have, by the plan of a step, which both kernels of
`bank_rows` share.

The warps of one warpgroup fetch, each slots of its own, so that four are begun at a time. What they
read of the plan lies in global memory: a warp alone may read no other.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_dora.ops import choose
from jax_dora.ops.mosaic import ptx
from jax_dora.ops.mosaic.bank_rows_sizes import TILE_ROWS, WARPS, Sizes
from jax_dora.ops.mosaic.hopper import tiled


def for_one(member, count: int, function: Callable[[int], None]) -> None:
    """Calls a function of the thread block's member, one of `count`, as a number."""
    if count == 1:
        return function(0)
    for number in range(count):
        pl.when(member == number)(functools.partial(function, number))
    return None


def of_one(member, numbers: Sequence[Any]) -> Any:
    """Returns the thread block's member's of numbers that each member has one of."""
    found = numbers[0]
    for number, one in enumerate(numbers[1:], 1):
        found = jnp.where(member == number, one, found)
    return found


def for_box(rank, sizes: Sizes, copy: Callable[[int], None]) -> None:
    """Calls a function of the least box that holds a rank."""
    for below, box in zip([-1, *sizes.boxes], sizes.boxes, strict=False):
        pl.when((rank > below) & (rank <= box))(functools.partial(copy, box))


def strip_of(strip, counts: Sequence[int]) -> tuple[Any, Any]:
    """Returns to which member a strip of all members' belongs, which have so many, and which of its
    own it is."""
    ends = list(itertools.accumulate(counts))
    member, begin = jnp.int32(0), jnp.int32(0)
    for number, end in enumerate(ends[:-1], 1):
        member = jnp.where(strip >= end, number, member)
        begin = jnp.where(strip >= end, end, begin)
    return member, strip - begin


def fetch_slots(warp, plan_gmem, rank_gmem, first, free, stages, sizes: Sizes, copy) -> None:
    """Fills, as one of `WARPS`, stages with the slots in use, one after the other, as consumers
    hand stages back. A stage is always filled by the same warp.

    Args:
      first: the first slot of the layer.
      copy: of (slot, stage, box), fetches the first `box` ranks of a slot.
    """
    warps = math.gcd(stages, WARPS)

    def fetch(turn, _):
        index = turn * warps + warp
        slot, stage = first + plan_gmem[1 + index], lax.rem(index, jnp.int32(stages))
        rank = rank_gmem[slot]
        plgpu.barrier_wait(free.at[stage])
        for_box(rank, sizes, lambda box: copy(slot, stage, box))

    @pl.when(warp < warps)
    def _fetch():
        turns = lax.div(plan_gmem[0] + (warps - 1) - warp, jnp.int32(warps))
        lax.fori_loop(0, turns, fetch, None)
        # Every stage was handed back once more than it was filled.
        for stage in range(0, stages, warps):
            plgpu.barrier_wait(free.at[stage + warp])


def own_numbers(plan_gmem, tile, sizes: Sizes):
    """Returns the numbers of the slots of a tile's rows, laid out as a column of its results."""
    numbers = plan_gmem.at[pl.ds(sizes.entries + tile * TILE_ROWS, TILE_ROWS)]
    return plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def clear(stages_smem, tile, tiles: int) -> None:
    """Fills stages with zeros, the warpgroups of so many tiles in turns: what a copy leaves is
    multiplied by zeros, and has to be finite."""
    count, *shape = stages_smem.shape

    def clear_one(turn, _):
        stages_smem[turn * tiles + tile] = jnp.zeros(shape, stages_smem.dtype)

    lax.fori_loop(0, lax.div(count + (tiles - 1) - tile, jnp.int32(tiles)), clear_one, None)
    plgpu.commit_smem()


def products(count, numbers, left, right, ready, free, cols: int) -> jax.Array:
    """Returns f32[rows, cols], of each row of a tile the product with what its own slot has; zeros
    where it has none.

    Tensor cores add up the products with all slots, for each of which the other rows are zeros.

    Args:
      count: of the slots in use.
      numbers: `own_numbers` of the tile.
      left: its parts [rows, 64] of 16 bits, and where the interpreter may change each.
      right: of a stage, the parts [64, cols] in shared memory.
    """
    stages = ready.shape[0]

    def multiply(acc_ref):
        def meet(index, acc_ref):
            stage = lax.rem(index, stages)
            plgpu.barrier_wait(ready.at[stage])
            # Tensor cores may still read the registers that are to be filled anew.
            plgpu.wgmma_wait(0)

            @pl.when(index > 0)
            def _hand_back():
                plgpu.barrier_arrive(free.at[lax.rem(index - 1, stages)])

            keep = jnp.where(numbers == index, jnp.int32(-1), jnp.int32(0))
            for (one, place), other in zip(left, right(stage), strict=True):
                plgpu.wgmma(acc_ref, kept(one, keep, place), other)
            return acc_ref

        lax.fori_loop(0, count, meet, acc_ref)
        return acc_ref[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE_ROWS, cols), jnp.float32))

    @pl.when(count > 0)
    def _hand_back():
        plgpu.barrier_arrive(free.at[lax.rem(count - 1, stages)])

    return sums


def spare(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns the shared memory that `kept` has to have beside tiles of a shape."""
    return {"spare": tiled(shape, dtype)} if choose.interpreted() else {}


def kept(tile, keep, place) -> Any:
    """Returns a tile of 16 bits with zeros in the rows whose i32 `keep` is 0 and not -1: in
    registers, or from the interpreter, whose tensor cores read no registers, in `place`."""
    if choose.interpreted():
        place[...] = jnp.where(keep[:, None] != 0, tile, 0)
        plgpu.commit_smem()
        return place
    of_tile = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=of_tile)

    @plgpu.inline_mgpu(arg_types=(of_tile, of_tile.reduce(1)), return_type=result)
    def keep_rows(_, tile, keep):
        # Not before the wait, though nothing else is.
        masks = ptx.pinned([vector.extract(one, [], [0]) for one in keep.registers.flat])
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty_like(tile.registers)
        for at, pair in enumerate(tile.registers.flat):
            # Of two rows in turns, two columns each.
            bits = vector.extract(vector.bitcast(word, pair), [], [0])
            bits = arith.andi(bits, masks[at % len(masks)])
            registers.flat[at] = vector.bitcast(pair.type, vector.broadcast(word, bits))
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    call: Callable[..., Any] = keep_rows
    return call(tile, keep)
