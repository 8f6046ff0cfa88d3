"""The loop over the slots in use, which the kernels of `bank_rows` and `bank_decode` share.

Each of a warpgroup's four warps fetches different slots, so that four copies are started at a time.
They read the plan from global memory, because Mosaic allows a single warp to read only that.
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

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.bank.bank_rows_sizes import TILE_ROWS, WARPS, Sizes
from jax_dora.ops.mosaic.hopper import ptx
from jax_dora.ops.mosaic.hopper.limits import tiled


def for_member(member, count: int, function: Callable[[int], None]) -> None:
    """Calls `function` with the static value of `member`, the thread block's one of `count`."""
    if count == 1:
        return function(0)
    for index in range(count):
        pl.when(member == index)(functools.partial(function, index))
    return None


def select_member(member, values: Sequence[Any]) -> Any:
    """Returns values[member], where `member` is traced."""
    selected = values[0]
    for index, value in enumerate(values[1:], 1):
        selected = jnp.where(member == index, value, selected)
    return selected


def locate_strip(strip, counts: Sequence[int]) -> tuple[Any, Any]:
    """Returns (member, index) of a strip: the member that it belongs to, and its index among the
    member's strips. `counts` are the numbers of strips of all members."""
    ends = list(itertools.accumulate(counts))
    member, begin = jnp.int32(0), jnp.int32(0)
    for index, end in enumerate(ends[:-1], 1):
        member = jnp.where(strip >= end, index, member)
        begin = jnp.where(strip >= end, end, begin)
    return member, strip - begin


def fetch_slots(warp, tile, plan_gmem, rank_gmem, first, free, sizes: Sizes, copy) -> None:
    """Fetches the slots in use in order, each into a stage, as soon as the consumers free it.

    It is called by each of the `WARPS` warps. A stage is always filled by the same warp.

    Args:
      warp, tile: the warp, and the tile of rows.
      plan_gmem, rank_gmem: the plan, and the ranks of the slots.
      first: the layer's first slot.
      free: the barriers of the stages.
      sizes: the sizes.
      copy: `copy(slot, rank, stage)` starts the copy of a slot.
    """
    stages = free.shape[0]
    warps = math.gcd(stages, WARPS)

    def fetch(turn, loaded):
        index = turn * warps + warp
        slot, rank = loaded
        stage = lax.rem(index, jnp.int32(stages))
        # Loaded ahead, so that the next copy does not wait for it.
        following = first + plan_gmem[tile, jnp.minimum(1 + index + warps, sizes.entries - 1)]
        plgpu.barrier_wait(free.at[stage])
        copy(slot, rank, stage)
        return following, rank_gmem[following]

    @pl.when(warp < warps)
    def _fetch():
        # The loads of the number of slots and of the first slot do not wait for each other.
        count, slot = plan_gmem[tile, 0], first + plan_gmem[tile, 1 + warp]
        turns = lax.div(count + (warps - 1) - warp, jnp.int32(warps))
        lax.fori_loop(0, turns, fetch, (slot, rank_gmem[slot]))
        # The consumers free every stage once more than it is filled. All arrivals at a barrier must
        # be waited for before the kernel ends.
        for stage in range(0, stages, warps):
            plgpu.barrier_wait(free.at[stage + warp])


def load_slot_indices(plan_gmem, tile, sizes: Sizes):
    """Returns the index of the slot of each row of a tile, in the layout of a result's column."""
    indices_gmem = plan_gmem.at[tile, pl.ds(sizes.entries, TILE_ROWS)]
    return plgpu.load(indices_gmem, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def products(count, slot_indices, left, right, ready, free, cols: int) -> jax.Array:
    """Returns f32[rows, cols], the product of each row of a tile with its own slot's matrix.

    The tensor cores accumulate the products with all slots in use; for each slot, rows of other
    slots are replaced by zeros. A row without a slot is zero.

    Args:
      count: the number of slots in use.
      slot_indices: `load_slot_indices` of the tile.
      left: pairs of a part [rows, 64] of 16 bits, in registers, and a buffer for `mask_rows`.
      right: a function of a stage that returns its parts [64, cols] in shared memory.
      ready, free: the barriers of the stages.
      cols: the number of columns.
    """
    stages = ready.shape[0]
    lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)

    def multiply(acc_ref):
        def multiply_slot(index, acc_ref):
            stage = lax.rem(index, stages)
            plgpu.barrier_wait(ready.at[stage])
            # The tensor cores may still be reading the registers that `mask_rows` overwrites.
            plgpu.wgmma_wait(0)

            @pl.when(index > 0)
            def _free_previous():
                plgpu.barrier_arrive(free.at[lax.rem(index - 1, stages)])

            mask = jnp.where(slot_indices == index, jnp.int32(-1), jnp.int32(0))
            for (part, buffer_smem), right_smem in zip(left, right(stage), strict=True):
                plgpu.wgmma(acc_ref, mask_rows(part, mask, buffer_smem), right_smem)
            return acc_ref

        lax.fori_loop(0, count, multiply_slot, acc_ref)
        return acc_ref[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE_ROWS, cols), jnp.float32))

    @pl.when(count > 0)
    def _free_last():
        plgpu.barrier_arrive(free.at[lax.rem(count - 1, stages)])

    return sums


def mask_buffer(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns the scratch buffer that `mask_rows` needs in the interpreter; {} on a GPU."""
    return {"mask_buffer": tiled(shape, dtype)} if choose.interpreted() else {}


def mask_rows(tile, mask, buffer_smem) -> Any:
    """Returns a tile of 16-bit numbers with zeros in the rows whose mask is 0.

    Args:
      tile: the tile, in registers.
      mask: i32 for each row, -1 or 0.
      buffer_smem: where the interpreter writes the result, because its wgmma cannot read registers.
    """
    if choose.interpreted():
        buffer_smem[...] = jnp.where(mask[:, None] != 0, tile, 0)
        plgpu.commit_smem()
        return buffer_smem
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)
    def apply(_, tile, mask):
        # Pinned, so that the compiler does not move this before the wait for the tensor cores.
        masks = ptx.pinned([vector.extract(value, [], [0]) for value in mask.registers.flat])
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty_like(tile.registers)
        for index, pair in enumerate(tile.registers.flat):
            # A register has two columns of one row; consecutive registers alternate between rows.
            bits = vector.extract(vector.bitcast(word, pair), [], [0])
            bits = arith.andi(bits, masks[index % len(masks)])
            registers.flat[index] = vector.bitcast(pair.type, vector.broadcast(word, bits))
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    call: Callable[..., Any] = apply
    return call(tile, mask)
