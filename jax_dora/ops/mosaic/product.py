"""A matrix product in two parts, one accumulator: the frame of project, project_back and
bank_project.

    result = g∘(left₁ right₁ + left₂ right₂) [+ bias]

All of bf16 or all of fp16, the result likewise. The loop over the contracted axis runs through the
first pair of operands, then through the second, into one fp32 accumulator; nothing is rounded
before the last step.

FLOPs: 2 · rows · (k₁ + k₂) · cols set the floor; bytes: each operand and result once, 2 bytes each.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, TILE_K, consume_registers
from jax_dora.ops.mosaic.product_tiling import (
    CHUNK_COLS,
    CHUNK_ROWS,
    CHUNK_SLOTS,
    CONSUMERS,
    Config,
)


class Groups(NamedTuple):
    """Rows in groups, of which each has vectors and a second right operand of its own.

    Attributes:
      time: rows of a group, a multiple of tile_rows.
      which: i32[groups + 1], which of the second right operands is each group's, and at the end
        which of the first ones is everybody's.
    """

    time: int
    which: jax.Array


def two_part_product(
    lefts: tuple[jax.Array, jax.Array],
    rights: tuple[jax.Array, jax.Array],
    vectors: list[jax.Array],
    *,
    outputs: int = 1,
    transposed: bool = False,
    groups: Groups | None = None,
    config: Config,
    sm_count: int,
) -> list[jax.Array]:
    """Returns g∘(Σ left @ right) + bias, and the bare sum if there are two outputs.

    Args:
      lefts: [rows, k] each.
      rights: [k, cols] each, or [cols, k] if transposed; of groups [n, k, cols] each.
      vectors: g and bias, f32[cols]; none for the bare sum, or g alone. Of groups [groups, cols].
    """
    c, dtype = config, lefts[0].dtype
    rows = lefts[0].shape[0]
    cols = rights[0].shape[-2 if transposed else -1]
    if cols == CHUNK_COLS:
        # The copy engine drops an axis of one chunk, and with it the end of the columns: a chunk
        # that lies past it would be written into other rows.
        c = dataclasses.replace(c, tile_cols=CHUNK_COLS, split_rows=True)
    steps = [pl.cdiv(left.shape[1], TILE_K) for left in lefts]
    row_tiles, col_tiles = pl.cdiv(rows, c.tile_rows), pl.cdiv(cols, c.tile_cols)
    tiles = row_tiles * col_tiles
    blocks = min(sm_count, tiles)
    consumer_rows, consumer_cols = c.consumer_tile
    chunks = outputs * consumer_rows * consumer_cols // (CHUNK_ROWS * CHUNK_COLS)
    wholes, ends = _parted(lefts, (row_tiles - 1) * c.tile_rows)
    arguments = [*wholes, *ends, *rights]
    if vectors:
        stacked = jnp.stack([v.astype(jnp.float32) for v in vectors], axis=-2)
        arguments.append(hopper.pad(stacked, *stacked.shape[:-1], col_tiles * c.tile_cols))
        features = {
            "smem": plgpu.SMEM((len(vectors), c.tile_cols), jnp.float32),
            "ready": plgpu.Barrier(),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS),
        }
    else:
        features = {}
    if groups is not None:
        arguments.append(groups.which)

    def body(*refs, left_smem, right_smem, ready, free, chunk_smem, features):
        lefts_gmem, ends_gmem = refs[:2], refs[2 : 2 + len(ends)]
        others_gmem, out_gmem = refs[2 + len(ends) : -outputs], refs[-outputs:]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        my_tiles = lax.div(tiles - block + blocks - 1, blocks)

        def corner(index):
            row, col = plgpu.planar_snake(
                block + index * blocks, (row_tiles, col_tiles), int(c.band_in_cols), c.band
            )
            return row * c.tile_rows, col * c.tile_cols

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            of_tile = _of_tile(others_gmem, groups)

            def fetch_tile(index, _):
                row, col = corner(index)
                tile_rights_gmem, tile_vectors_gmem = of_tile(row)
                at_rows, at_cols = pl.ds(row, c.tile_rows), pl.ds(col, c.tile_cols)
                before = index * sum(steps)
                for part, (right_gmem, count) in enumerate(
                    zip(tile_rights_gmem, steps, strict=True)
                ):

                    def fetch_slice(k, _, part=part, right_gmem=right_gmem, before=before):
                        slot = lax.rem(before + k, c.stages)
                        at_k = pl.ds(k * TILE_K, TILE_K)
                        plgpu.barrier_wait(free.at[slot])

                        def fetch_left(left_gmem, at_rows):
                            plgpu.copy_gmem_to_smem(
                                left_gmem.at[at_rows, at_k], left_smem.at[slot], ready.at[slot]
                            )

                        if ends:
                            past = row - (row_tiles - 1) * c.tile_rows

                            @pl.when(past == 0)
                            def _fetch_end():
                                fetch_left(ends_gmem[part], pl.ds(past, c.tile_rows))

                            @pl.when(past < 0)
                            def _fetch_whole():
                                fetch_left(lefts_gmem[part], at_rows)

                        else:
                            fetch_left(lefts_gmem[part], at_rows)
                        at_right = (at_cols, at_k) if transposed else (at_k, at_cols)
                        plgpu.copy_gmem_to_smem(
                            right_gmem.at[at_right], right_smem.at[slot], ready.at[slot]
                        )

                    lax.fori_loop(0, count, fetch_slice, None)
                    before = before + count
                if vectors:
                    # Last: they are free only when the tile before has been stored, and its slices
                    # long before.
                    plgpu.barrier_wait(features["free"])
                    plgpu.copy_gmem_to_smem(
                        tile_vectors_gmem[0].at[:, at_cols], features["smem"], features["ready"]
                    )

            lax.fori_loop(0, my_tiles, fetch_tile, None)
            # Every buffer was handed back once more than it was filled.
            for slot in range(c.stages):
                plgpu.barrier_wait(free.at[slot])
            if vectors:
                plgpu.barrier_wait(features["free"])

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            for slot in range(c.stages):
                plgpu.barrier_arrive(free.at[slot])
            if vectors:
                plgpu.barrier_arrive(features["free"])
            my_row = warpgroup * consumer_rows if c.split_rows else 0
            my_col = 0 if c.split_rows else warpgroup * consumer_cols
            my_rows = pl.ds(my_row, consumer_rows)
            my_cols = pl.ds(my_col, consumer_cols)

            def consume_tile(index, _):
                row, col = corner(index)

                def multiply(acc_ref):
                    def step(k, acc_ref):
                        slot = lax.rem(index * sum(steps) + k, c.stages)
                        plgpu.barrier_wait(ready.at[slot])
                        left = left_smem.at[slot, my_rows]
                        if transposed:
                            right = right_smem.at[slot, my_cols].transpose((1, 0))
                        else:
                            right = right_smem.at[slot, :, my_cols]
                        plgpu.wgmma(acc_ref, left, right)
                        return acc_ref

                    def step_and_free(k, acc_ref):
                        step(k, acc_ref)
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(free.at[lax.rem(index * sum(steps) + k - 1, c.stages)])
                        return acc_ref

                    step(0, acc_ref)
                    lax.fori_loop(1, sum(steps), step_and_free, acc_ref)
                    return acc_ref[...]

                acc = pl.run_scoped(
                    multiply, plgpu.WGMMAAccumulatorRef(c.consumer_tile, jnp.float32)
                )
                plgpu.barrier_arrive(free.at[lax.rem((index + 1) * sum(steps) - 1, c.stages)])
                if vectors:
                    plgpu.barrier_wait(features["ready"])
                stores = 0
                if chunks % CHUNK_SLOTS:
                    # The tile before has ended with the slot that this one begins with.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for r in range(0, consumer_rows, CHUNK_ROWS):
                    for j in range(0, consumer_cols, CHUNK_COLS):
                        chunk = inner = acc[r : r + CHUNK_ROWS, j : j + CHUNK_COLS]
                        for i in range(len(vectors)):
                            vector = lax.broadcast_in_dim(
                                features["smem"][i, pl.ds(my_col + j, CHUNK_COLS)],
                                chunk.shape,
                                (1,),
                            )
                            chunk = chunk + vector if i else chunk * vector
                        at = (
                            pl.ds(row + my_row + r, CHUNK_ROWS),
                            pl.ds(col + my_col + j, CHUNK_COLS),
                        )
                        for out, value in zip(out_gmem, (chunk, inner), strict=False):
                            slot_smem = chunk_smem.at[
                                warpgroup * CHUNK_SLOTS + stores % CHUNK_SLOTS
                            ]
                            stores += 1
                            plgpu.wait_smem_to_gmem(CHUNK_SLOTS - 1, wait_read_only=True)
                            slot_smem[...] = value.astype(dtype)
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(slot_smem, out.at[at])
                if vectors:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(features["free"])

            lax.fori_loop(0, my_tiles, consume_tile, None)
            plgpu.wait_smem_to_gmem(0)

    name = "dora_project_back" if transposed else "dora_project"
    right_tile = (c.tile_cols, TILE_K) if transposed else (TILE_K, c.tile_cols)
    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, cols), dtype)] * outputs,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "left_smem": hopper.tiled((c.stages, c.tile_rows, TILE_K), dtype),
            "right_smem": hopper.tiled((c.stages, *right_tile), dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            # In rows, not in tiles of 8, so that the last ones may be fewer.
            "chunk_smem": hopper.swizzled((CONSUMERS * CHUNK_SLOTS, CHUNK_ROWS, CHUNK_COLS), dtype),
            "features": features,
        },
        kernel_name=name if groups is None else "dora_bank_project",
    )(*arguments)
    # Where a scan both stacks a result and reads it, XLA would launch the kernel twice.
    return [lax.optimization_barrier(result) for result in results]


def _parted(
    lefts: tuple[jax.Array, jax.Array], start: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the left operands as the copy engine takes them: rows up to `start`, where the last
    tile starts, and those from there on with rows of zeros; or whole, and no further ones, where
    the engine takes them so."""
    rows = lefts[0].shape[0]
    if rows % hopper.ROW_ALIGNMENT == 0:
        return [*lefts], []
    count = pl.cdiv(rows - start, hopper.ROW_ALIGNMENT) * hopper.ROW_ALIGNMENT
    ends = [hopper.pad(left[start:], count, left.shape[1]) for left in lefts]
    # XLA hands the first rows over without a copy.
    return ([left[:start] for left in lefts], ends) if start else (ends, [])


def _of_tile(gmem, groups):
    """Returns a function of a tile's first row that returns the right operands of the tile, and in
    a list its vectors, if there are any."""
    if groups is None:
        return lambda row: (gmem[:2], gmem[2:])
    first_gmem, second_gmem, *vectors_gmem, which_gmem = gmem
    shared_gmem = first_gmem.at[which_gmem[groups.which.size - 1]]

    def of_tile(row):
        group = lax.div(row, jnp.int32(groups.time))
        own_gmem = second_gmem.at[which_gmem[group]]
        return (shared_gmem, own_gmem), [one.at[group] for one in vectors_gmem]

    return of_tile
