"""The kernel that iterates over tiles of a low-rank product, for norms and compositions.

Each consumer is a warpgroup. The consumers process the tiles of a run in turn: while one of them
processes its accumulators, the others keep the tensor cores busy. Each has its own ring of slices
of `left` and its own ring of tiles of the matrix. A warp fetches for a single ring, so that waiting
for one ring does not delay another one. If there are not enough warps, one warp fetches all tiles
of the matrix, in the order in which they are processed.

Every ring has two barriers for each buffer. `ready`: TMA has filled the buffer. `free`: the
consumer has released it; every buffer is released once before it is filled for the first time. The
fetching warps run the functions of `strip_fetch`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper.limits import (
    FETCH_REGISTERS,
    TILE_K,
    consume_registers,
    tiled,
)
from jax_dora.ops.mosaic.projection.strip_fetch import fetch_slices, fetch_tiles
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Tiling, Walk

REDUCTION_SCRATCH = 1_024
WARPS = 4


class Tile(NamedTuple):
    """The arguments of an epilogue.

    Attributes:
      acc: the tile of `left @ right`, f32[TILE_ROWS, tile_cols].
      smem: the tile of the matrix, a Ref [TILE_ROWS, tile_cols], which may be overwritten.
      vectors_smem: a Ref f32[vectors, tile_cols], or None.
      scales_smem: the numbers of this tile, a Ref [length], or None; see `Scales`.
      scale: f32[].
      rows, cols: the rows and columns of the tile in the matrix.
    """

    acc: jax.Array
    smem: Any
    vectors_smem: Any
    scales_smem: Any
    scale: jax.Array
    rows: Any
    cols: Any


class Scales(NamedTuple):
    """An additional input with separate numbers for every tile.

    Attributes:
      length: the number of numbers for a tile.
      dtype: the dtype of the input.
      at: `(tile, rows, cols)` returns the index of a tile's numbers in the input.
    """

    length: int
    dtype: Any
    at: Callable[[Any, Any, Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Task:
    """The functions that the kernel runs on the tiles, and their inputs.

    Attributes:
      products: for each slice of `left` along k, the slices of `right` that it multiplies.
      epilogue: `(carry, tile, out_gmem, **scratch) -> carry`, called after each tile's product.
      start: returns a consumer's carry at the beginning of a run.
      finish: `(carry, split, cols, out_gmem, **scratch)`, called after a consumer's last tile of a
        run, by one consumer at a time: sums across warps use scratch that all warpgroups share.
      vectors: the number of vectors f32[columns] that the epilogue reads. Vectors of the length of
        one strip apply to every strip.
      scales: the input with numbers for every tile, which follows the vectors; or None.
      stores: the epilogue stores from the tile's buffer, which is not free yet when it returns.
      grouped: each group of rows has its own scale and vectors, scale[groups] and
        vectors[groups, vectors, padded_out], and one of several `right` [n, k, out], whose number
        is in the last input, i32[groups].
    """

    products: Sequence[Sequence[int]]
    epilogue: Callable[..., Any]
    start: Callable[[], Any] = lambda: 0
    finish: Callable[..., None] | None = None
    vectors: int = 0
    scales: Scales | None = None
    stores: bool = False
    grouped: bool = False

    @property
    def left_slices(self) -> int:
        return len(self.products)

    @property
    def right_slices(self) -> int:
        return 1 + max(k for partners in self.products for k in partners)


def strip_kernel(
    tiling: Tiling,
    task: Task,
    operand_dtype: jax.typing.DTypeLike,
    tile_dtype: jax.typing.DTypeLike,
    *,
    out_type: Sequence[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    kernel_name: str,
) -> Callable[..., Any]:
    """Returns a function of (left, right, matrix, scale[1], *vectors[vectors, padded_out], *scales,
    *which[groups]).

    `scratch` is more shared memory by name, which the functions of `task` get as keyword arguments.
    """
    c = tiling.config
    left_ring, tile_ring = c.consumers * c.stages, c.consumers * c.slots
    buffers = {
        "left_smem": tiled((left_ring, TILE_ROWS, TILE_K), operand_dtype),
        "left_ready": plgpu.Barrier(num_barriers=left_ring),
        "left_free": plgpu.Barrier(num_barriers=left_ring),
        "right_smem": tiled((task.right_slices, TILE_K, c.tile_cols), operand_dtype),
        "right_ready": plgpu.Barrier(num_barriers=task.right_slices),
        "right_free": plgpu.Barrier(num_arrivals=c.consumers),
        "tile_smem": tiled((tile_ring, TILE_ROWS, c.tile_cols), tile_dtype, tiling.out),
        "tile_ready": plgpu.Barrier(
            num_arrivals=1 if task.scales is None else 2, num_barriers=tile_ring
        ),
        "tile_free": plgpu.Barrier(num_barriers=tile_ring),
    }
    if task.vectors:
        buffers["vectors_smem"] = plgpu.SMEM((task.vectors, c.tile_cols), jnp.float32)
        buffers["vectors_ready"] = plgpu.Barrier()
    if task.scales is not None:
        buffers["scales_smem"] = plgpu.SMEM((tile_ring, task.scales.length), task.scales.dtype)
    if task.finish is not None:
        buffers["finish_turn"] = plgpu.Barrier(num_barriers=c.consumers)

    def kernel(*gmem, buffers, scratch):
        inputs, out_gmem = gmem[: len(gmem) - len(out_type)], gmem[len(gmem) - len(out_type) :]
        walk = Walk(tiling, lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == c.consumers)
        def _fetch_all():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                fetchers = c.consumers if 2 * c.consumers <= WARPS else 1

                @pl.when(warp < c.consumers)
                def _fetch_left():
                    fetch_slices(walk, task, inputs, buffers, warp)

                @pl.when((warp >= c.consumers) & (warp < c.consumers + fetchers))
                def _fetch_matrix():
                    fetch_tiles(walk, task, inputs, buffers, warp - c.consumers, fetchers)

        @pl.when(warpgroup < c.consumers)
        def _consume_all():
            plgpu.set_max_registers(consume_registers(c.consumers), action="increase")
            _consume(walk, task, inputs, out_gmem, buffers, scratch, warpgroup)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={"buffers": buffers, "scratch": scratch},
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH),
        kernel_name=kernel_name,
    )


def _consume(walk, task, inputs, out_gmem, buffers, scratch, consumer):
    """Computes the products of a consumer's tiles, and runs the task's functions on them."""
    c = walk.tiling.config
    whole_scale = inputs[3][0]
    # Late enough that the stores are done, and early enough that the next tile arrives in time.
    hand_back_at = min(task.left_slices // 3, c.stages - 1)

    def stage_of(turn, k):
        return consumer * c.stages + lax.rem(turn * task.left_slices + k, c.stages)

    def slot_of(turn):
        return consumer * c.slots + lax.rem(turn, c.slots)

    def hand_back_stored(turn):
        """Releases the slot of the tile before `turn`, after its stores have read the slot."""
        if task.stores:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(buffers["tile_free"].at[slot_of(turn + c.slots - 1)])

    def multiply(acc_ref, *, turn, first_of_run):
        unseen = set(range(task.right_slices))
        for k, partners in enumerate(task.products):
            fresh = [p for p in partners if p in unseen]
            unseen.difference_update(fresh)
            if fresh:

                @pl.when(first_of_run)
                def _see_right(fresh=fresh):
                    for p in fresh:
                        plgpu.barrier_wait(buffers["right_ready"].at[p])

            plgpu.barrier_wait(buffers["left_ready"].at[stage_of(turn, k)])
            for p in partners:
                plgpu.wgmma(
                    acc_ref, buffers["left_smem"].at[stage_of(turn, k)], buffers["right_smem"].at[p]
                )
            if k == hand_back_at:
                hand_back_stored(turn)
            if k > 0:
                # Only the products of this slice are under way, so the slice before is free.
                plgpu.wgmma_wait(len(partners))
                plgpu.barrier_arrive(buffers["left_free"].at[stage_of(turn, k - 1)])
        return acc_ref[...]

    def consume_run(index, before):
        cols, split, first, tiles = walk.run(index)
        skipped, turns = walk.turns(consumer, before, tiles, c.consumers)
        scale = inputs[3][walk.group(first)] if task.grouped else whole_scale
        if task.vectors:
            plgpu.barrier_wait(buffers["vectors_ready"])

        @pl.when(turns == 0)
        def _see_right():
            for k in range(task.right_slices):
                plgpu.barrier_wait(buffers["right_ready"].at[k])

        def consume_tile(i, carry):
            tile = skipped + i * c.consumers
            turn = lax.div(before + tile, c.consumers)
            acc = pl.run_scoped(
                lambda acc_ref: multiply(acc_ref, turn=turn, first_of_run=i == 0),
                plgpu.WGMMAAccumulatorRef((TILE_ROWS, c.tile_cols), jnp.float32),
            )
            plgpu.barrier_arrive(buffers["left_free"].at[stage_of(turn, task.left_slices - 1)])
            slot = slot_of(turn)
            plgpu.barrier_wait(buffers["tile_ready"].at[slot])
            seen = Tile(
                acc,
                buffers["tile_smem"].at[slot],
                buffers["vectors_smem"] if task.vectors else None,
                None if task.scales is None else buffers["scales_smem"].at[slot],
                scale,
                walk.rows(first + tile),
                cols,
            )
            carry = task.epilogue(carry, seen, out_gmem, **scratch)
            if not task.stores:
                # This fence keeps TMA from overwriting the tile before these ordinary reads.
                plgpu.commit_smem()
                plgpu.barrier_arrive(buffers["tile_free"].at[slot])
            return carry

        carry = lax.fori_loop(0, turns, consume_tile, task.start())
        plgpu.barrier_arrive(buffers["right_free"])
        if task.finish is not None:
            turn, next_turn = consumer, lax.rem(consumer + 1, c.consumers)
            plgpu.barrier_wait(buffers["finish_turn"].at[turn])
            task.finish(carry, split, cols, out_gmem, **scratch)
            plgpu.barrier_arrive(buffers["finish_turn"].at[next_turn])
        return before + tiles

    if task.finish is not None:

        @pl.when(consumer == 0)
        def _give_first_turn():
            plgpu.barrier_arrive(buffers["finish_turn"].at[0])

    plgpu.barrier_arrive(buffers["right_free"])
    for stage in range(c.stages):
        plgpu.barrier_arrive(buffers["left_free"].at[consumer * c.stages + stage])
    # A slot that stores read from is released during the next tile.
    for turn in range(c.slots - 1 if task.stores else c.slots):
        plgpu.barrier_arrive(buffers["tile_free"].at[slot_of(turn)])

    tiles = lax.fori_loop(0, walk.runs, consume_run, jnp.int32(0))

    hand_back_stored(walk.turns(consumer, 0, tiles, c.consumers)[1])
    plgpu.wait_smem_to_gmem(0)
    if task.finish is not None:

        @pl.when(consumer == 0)
        def _take_last_turn():
            plgpu.barrier_wait(buffers["finish_turn"].at[0])
