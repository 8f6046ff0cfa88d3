"""How both kernels of `bank_rows` go through the slots that rows have, by the plan of a step.

The warps of one warpgroup fetch, each slots of its own, so that four are begun at a time. What they
read of the plan lies in global memory: a warp alone may read no other.
"""

import functools
import math
from collections.abc import Callable
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
from jax_dora.ops.mosaic.bank_rows import SLOT_BITS, TILE_ROWS, WARPS, Sizes


def facts_types(sizes: Sizes, of_slots: dict[str, jax.typing.DTypeLike]):
    """Returns the shared memory for the plan, and for numbers of the layer's slots by their
    names."""
    copies = len(_pieces(sizes.entries)) + sizes.tiles + len(of_slots) * len(_pieces(sizes.slots))
    return {name: plgpu.SMEM((sizes.slots,), dtype) for name, dtype in of_slots.items()} | {
        "step": plgpu.SMEM((sizes.entries,), jnp.int32),
        "numbers": plgpu.SMEM((sizes.tiles, TILE_ROWS), jnp.int32),
        "ready": plgpu.Barrier(num_arrivals=copies),
    }


def for_one(member, count: int, function: Callable[[int], None]) -> None:
    """Calls a function of the thread block's member, one of `count`, as a number."""
    if count == 1:
        return function(0)
    for number in range(count):
        pl.when(member == number)(functools.partial(function, number))
    return None


def load_facts(step_gmem, of_slots, first, facts, sizes: Sizes) -> None:
    """Fetches the plan, and of the slots from the first on what `of_slots` has by the names of
    `facts`."""

    def copy(source, start, target, size):
        for begin, length in _pieces(size):
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(start + begin, length)],
                target.at[pl.ds(begin, length)],
                facts["ready"],
            )

    copy(step_gmem, 0, facts["step"], sizes.entries)
    for tile in range(sizes.tiles):
        start = sizes.entries + tile * TILE_ROWS
        copy(step_gmem, start, facts["numbers"].at[tile], TILE_ROWS)
    for name, source in of_slots.items():
        copy(source, first, facts[name], sizes.slots)


def _pieces(size: int) -> list[tuple[int, int]]:
    """Returns (start, size) of the parts in which the copy engine takes so many elements."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def fetch_slots(warp, step_gmem, rank_gmem, first, free, stages, sizes: Sizes, copy) -> None:
    """Fills, as one of `WARPS`, stages with the slots in use, one after the other, as consumers
    hand stages back. A stage is always filled by the same warp.

    Args:
      first: the first slot of the layer.
      copy: of (index, slot, stage, box), fetches the first `box` ranks of a slot, and what it has
        beside them, for an entry of the plan.
    """
    warps = math.gcd(stages, WARPS)

    def fetch(turn, _):
        index = turn * warps + warp
        slot, stage = first + _slot_of(step_gmem[1 + index]), lax.rem(index, jnp.int32(stages))
        # The least box that holds the rank.
        rank = rank_gmem[slot]
        plgpu.barrier_wait(free.at[stage])
        for below, box in zip([-1, *sizes.boxes], sizes.boxes, strict=False):
            pl.when((rank > below) & (rank <= box))(lambda box=box: copy(index, slot, stage, box))

    @pl.when(warp < warps)
    def _fetch():
        turns = lax.div(step_gmem[0] + (warps - 1) - warp, jnp.int32(warps))
        lax.fori_loop(0, turns, fetch, None)
        # Every stage was handed back once more than it was filled.
        for stage in range(0, stages, warps):
            plgpu.barrier_wait(free.at[stage + warp])


def own_numbers(facts, tile):
    """Returns the numbers of the entries of a tile's rows, laid out as a column of its results."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(facts["numbers"].at[tile], layout=layout, optimized=False)


def if_met(facts, index, tile, numbers, old, new):
    """Returns `old` [rows, cols] with the rows of an entry replaced by those of `new(slot)`; `old`
    where the tile has none."""
    entry = facts["step"][1 + index]

    def met():
        own = lax.broadcast_in_dim(numbers == index, old.shape, (0,))
        return jnp.where(own, new(_slot_of(entry)), old)

    mark = lax.bitwise_and(lax.shift_right_logical(entry, SLOT_BITS + tile), jnp.int32(1))
    return lax.cond(mark == 1, met, lambda: old)


def looked_up(table_smem, numbers) -> jax.Array:
    """Returns f32[rows, cols], laid out as a tile of results: of each row the entry of a table
    [entries, cols] that `own_numbers` names, and anything where it names none."""
    numbers = jnp.maximum(numbers, 0)
    if choose.interpreted():
        return table_smem[...][numbers]
    of_rows, of_results = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
    cols = table_smem.shape[1]
    found = plgpu.ShapeDtypeStruct((TILE_ROWS, cols), jnp.dtype("float32"), layout=of_results)

    @plgpu.inline_mgpu(arg_types=(of_rows, plgpu.RefType()), return_type=found)
    def look_up(_, numbers, table_smem):
        # Lane 4g + t has of eight columns 2t and 2t + 1.
        own = arith.muli(arith.andi(ptx.lane(), ptx.i32(3)), ptx.i32(8))
        begin = arith.addi(ptx.address(table_smem), own)
        numbers = [vector.extract(one, [], [0]) for one in numbers.registers.flat]
        rows = [arith.addi(begin, arith.muli(one, ptx.i32(4 * cols))) for one in numbers]
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = np.empty((cols // 8, len(rows)), object)
        for group, row in np.ndindex(registers.shape):
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {32 * group}];"
            both = ptx.several(f32, 2, [rows[row]], text, "=f,=f,r", effects=True)
            registers[group, row] = vector.from_elements(pair, both)
        layout = of_results.to_mgpu()
        registers = registers.reshape(layout.registers_shape((TILE_ROWS, cols)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    call: Callable[..., Any] = look_up
    return call(numbers, table_smem)


def _slot_of(entry):
    """Returns the slot of a plan's entry."""
    return lax.bitwise_and(entry, jnp.int32(2**SLOT_BITS - 1))
