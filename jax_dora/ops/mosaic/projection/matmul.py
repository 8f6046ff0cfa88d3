"""The sum of two matrix products in one accumulator: the kernel of `project`, `project_back` and
`bank_project`. `shrink` has only the first product.

    result = g∘(left₁ right₁ + left₂ right₂) [+ bias]

    left₁  [rows, k₁]   right₁  [k₁, cols]   left₂  [rows, k₂]   right₂  [k₂, cols]
    g      f32[cols]    bias    f32[cols]    result  [rows, cols]

The matrices and the result are all bf16 or all fp16. The loop over the contracted axis goes through
the first product, then the second, and accumulates in fp32. Only the result is rounded.

FLOPs: 2 · rows · (k₁ + k₂) · cols; the floor is FLOPs / peak rate.
Bytes: 2 per element of each operand and result.

The last warpgroup of a thread block fetches slices of the operands into a ring of `stages` buffers;
the other warpgroups, the consumers, multiply them and store the result in chunks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.hopper import limits, ring
from jax_dora.ops.mosaic.hopper.limits import FETCH_REGISTERS, TILE_K, consume_registers
from jax_dora.ops.mosaic.projection.matmul_tiling import (
    CHUNK_BUFFERS,
    CHUNK_COLS,
    CHUNK_ROWS,
    CONSUMERS,
    Config,
    Tiles,
)
from jax_dora.ops.quantised import bits


class Groups(NamedTuple):
    """Groups of rows that each have their own right₂, g and bias.

    Attributes:
      time: the number of rows in a group, a multiple of tile_rows.
      indices: i32[groups + 1], the index of right₂ for each group; the last element is the index
        of right₁ for all groups.
    """

    time: int
    indices: jax.Array


def sum_of_products(
    lefts: tuple[jax.Array, ...],
    rights: tuple[jax.Array, ...],
    vectors: list[jax.Array],
    *,
    name: str,
    outputs: int = 1,
    transposed: bool = False,
    groups: Groups | None = None,
    config: Config,
    sm_count: int,
) -> list[jax.Array]:
    """Returns [g∘sum + bias] with sum = left₁ right₁ + left₂ right₂; or [g∘sum + bias, sum].

    Args:
      lefts: left₁ and perhaps left₂, [rows, k].
      rights: right₁ and perhaps right₂, [k, cols], or [cols, k] if `transposed`; with groups
        [n, k, cols].
      vectors: [], [g] or [g, bias], f32[cols]; with groups f32[groups, cols].
      name: the name that programs show.
      outputs: 1, or 2 to return the sum too.
      transposed: whether the right operands are transposed.
      groups: the groups of rows, or None.
      config, sm_count: see `choose.Choice`.
    """
    c, dtype = config, lefts[0].dtype
    rows = lefts[0].shape[0]
    cols = rights[0].shape[-2 if transposed else -1]
    if cols == CHUNK_COLS:
        # TMA drops a column axis of a single chunk, and with it the check of the column's bounds: a
        # chunk beyond the last column would be written into other rows.
        c = dataclasses.replace(c, tile_cols=CHUNK_COLS, split_rows=True)
    steps = [pl.cdiv(left.shape[1], TILE_K) for left in lefts]
    tiles = Tiles.of(c, rows, cols, sm_count)
    consumer_rows, consumer_cols = c.consumer_tile
    chunks = outputs * consumer_rows * consumer_cols // (CHUNK_ROWS * CHUNK_COLS)
    bodies, tails = _split_tail(lefts, (tiles.rows - 1) * c.tile_rows)
    arguments = [*bodies, *tails, *rights]
    if vectors:
        stacked = jnp.stack([v.astype(jnp.float32) for v in vectors], axis=-2)
        arguments.append(limits.pad(stacked, *stacked.shape[:-1], tiles.cols * c.tile_cols))
        feature_vectors = {
            "smem": plgpu.SMEM((len(vectors), c.tile_cols), jnp.float32),
            "ready": plgpu.Barrier(),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS),
        }
    else:
        feature_vectors = {}
    if groups is not None:
        arguments.append(groups.indices)

    def body(*refs, left_smem, right_smem, ready, free, chunk_smem, feature_vectors):
        lefts_gmem = refs[: len(bodies)]  # [rows, k₁] and perhaps [rows, k₂]
        tails_gmem = refs[len(bodies) : len(bodies) + len(tails)]
        # others_gmem: right₁ [k₁, cols], and perhaps right₂ [k₂, cols], vectors [1 or 2, cols] and
        # the groups' indices. out_gmem: [rows, cols] each.
        others_gmem = refs[len(bodies) + len(tails) : -outputs]
        out_gmem = refs[-outputs:]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        my_tiles = tiles.of_block(block)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            tile_operands = _tile_operands(others_gmem, len(rights), groups)

            def fetch_tile(index, _):
                row, col = tiles.corner(block, index)
                tile_rights_gmem, tile_vectors_gmem = tile_operands(row)
                at_rows, at_cols = pl.ds(row, c.tile_rows), pl.ds(col, c.tile_cols)
                before = index * sum(steps)
                for part, (right_gmem, count) in enumerate(
                    zip(tile_rights_gmem, steps, strict=True)
                ):

                    def fetch_slice(k, _, part=part, right_gmem=right_gmem, before=before):
                        stage = lax.rem(before + k, c.stages)
                        at_k = pl.ds(k * TILE_K, TILE_K)
                        plgpu.barrier_wait(free.at[stage])

                        def fetch_left(left_gmem, at_rows):
                            plgpu.copy_gmem_to_smem(
                                left_gmem.at[at_rows, at_k], left_smem.at[stage], ready.at[stage]
                            )

                        if tails:
                            tail_row = row - (tiles.rows - 1) * c.tile_rows

                            @pl.when(tail_row == 0)
                            def _fetch_from_tail():
                                fetch_left(tails_gmem[part], pl.ds(tail_row, c.tile_rows))

                            @pl.when(tail_row < 0)
                            def _fetch_from_left():
                                fetch_left(lefts_gmem[part], at_rows)

                        else:
                            fetch_left(lefts_gmem[part], at_rows)
                        at_right = (at_cols, at_k) if transposed else (at_k, at_cols)
                        plgpu.copy_gmem_to_smem(
                            right_gmem.at[at_right], right_smem.at[stage], ready.at[stage]
                        )

                    lax.fori_loop(0, count, fetch_slice, None)
                    before = before + count
                if vectors:
                    # Fetched last: their buffer is free only after the previous tile has been
                    # stored, while the buffers of its slices are free long before.
                    plgpu.barrier_wait(feature_vectors["free"])
                    plgpu.copy_gmem_to_smem(
                        tile_vectors_gmem[0].at[:, at_cols],
                        feature_vectors["smem"],
                        feature_vectors["ready"],
                    )

            lax.fori_loop(0, my_tiles, fetch_tile, None)
            ring.drain(free)
            if vectors:
                plgpu.barrier_wait(feature_vectors["free"])

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            ring.release(free)
            if vectors:
                plgpu.barrier_arrive(feature_vectors["free"])
            my_row = warpgroup * consumer_rows if c.split_rows else 0
            my_col = 0 if c.split_rows else warpgroup * consumer_cols
            my_rows = pl.ds(my_row, consumer_rows)
            my_cols = pl.ds(my_col, consumer_cols)

            def consume_tile(index, _):
                row, col = tiles.corner(block, index)

                def multiply(acc_ref, stage, _):
                    plgpu.barrier_wait(ready.at[stage])
                    left = left_smem.at[stage, my_rows]
                    if transposed:
                        right = right_smem.at[stage, my_cols].transpose((1, 0))
                    else:
                        right = right_smem.at[stage, :, my_cols]
                    plgpu.wgmma(acc_ref, left, right)

                def number(k):
                    return index * sum(steps) + k

                acc = ring.accumulate(sum(steps), multiply, c.consumer_tile, free, number)
                plgpu.barrier_arrive(free.at[lax.rem((index + 1) * sum(steps) - 1, c.stages)])
                if vectors:
                    plgpu.barrier_wait(feature_vectors["ready"])
                stores = 0
                if chunks % CHUNK_BUFFERS:
                    # The previous tile's last chunk used the buffer of this tile's first chunk.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for r in range(0, consumer_rows, CHUNK_ROWS):
                    for j in range(0, consumer_cols, CHUNK_COLS):
                        chunk = inner = acc[r : r + CHUNK_ROWS, j : j + CHUNK_COLS]
                        for i in range(len(vectors)):
                            vector = plgpu.load(
                                feature_vectors["smem"].at[i, pl.ds(my_col + j, CHUNK_COLS)],
                                layout=plgpu.Layout.WGMMA.reduce(0),
                            )
                            vector = lax.broadcast_in_dim(vector, chunk.shape, (1,))
                            chunk = chunk + vector if i else chunk * vector
                        at = (
                            pl.ds(row + my_row + r, CHUNK_ROWS),
                            pl.ds(col + my_col + j, CHUNK_COLS),
                        )
                        for out, value in zip(out_gmem, (chunk, inner), strict=False):
                            buffer_smem = chunk_smem.at[
                                warpgroup * CHUNK_BUFFERS + stores % CHUNK_BUFFERS
                            ]
                            stores += 1
                            plgpu.wait_smem_to_gmem(CHUNK_BUFFERS - 1, wait_read_only=True)
                            store_chunk(value.astype(dtype), buffer_smem)
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(buffer_smem, out.at[at])
                if vectors:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(feature_vectors["free"])

            lax.fori_loop(0, my_tiles, consume_tile, None)
            plgpu.wait_smem_to_gmem(0)

    right_tile = (c.tile_cols, TILE_K) if transposed else (TILE_K, c.tile_cols)
    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, cols), dtype)] * outputs,
        grid=(tiles.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "left_smem": limits.tiled((c.stages, c.tile_rows, TILE_K), dtype),
            "right_smem": limits.tiled((c.stages, *right_tile), dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            # Not in tiles of 8 rows, because the result's last chunk may have any number of rows.
            "chunk_smem": limits.swizzled(
                (CONSUMERS * CHUNK_BUFFERS, CHUNK_ROWS, CHUNK_COLS), dtype
            ),
            "feature_vectors": feature_vectors,
        },
        compiler_params=limits.STATED_LAYOUTS,
        kernel_name=name,
    )(*arguments)
    # Without this barrier XLA launches the kernel twice if a scan both stacks and reads a result.
    return [lax.optimization_barrier(result) for result in results]


def store_chunk(chunk: jax.Array, buffer_smem: Any) -> None:
    """Writes a chunk of the result to its buffer. With stated layouts an assignment would first
    read the buffer, into registers that nobody needs."""
    if choose.interpreted():
        buffer_smem[...] = chunk
        return
    swizzle = chunk.shape[-1] * bits(chunk.dtype) // 8
    buffer: Any = limits.swizzled(chunk.shape, chunk.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(buffer.transforms)))
    def write(_, chunk, buffer_smem):
        chunk.store_untiled(buffer_smem, swizzle=swizzle, optimized=False)

    call: Callable[..., Any] = write
    call(chunk, buffer_smem)


def _split_tail(
    lefts: tuple[jax.Array, ...], start: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns (bodies, tails): the left operands, with numbers of rows that TMA supports.

    If the last tile's rows need padding, `tails` are these rows, from `start` on, padded with
    zeros, and `bodies` are the rows before. Otherwise, or with a single tile, `tails` is empty.
    """
    rows = lefts[0].shape[0]
    if rows % limits.ROW_ALIGNMENT == 0:
        return [*lefts], []
    count = pl.cdiv(rows - start, limits.ROW_ALIGNMENT) * limits.ROW_ALIGNMENT
    tails = [limits.pad(left[start:], count, left.shape[1]) for left in lefts]
    # XLA passes a slice of leading rows to the kernel without a copy.
    return ([left[:start] for left in lefts], tails) if start else (tails, [])


def _tile_operands(gmem, parts, groups):
    """Returns a function that maps a tile's first row to its right operands and [its vectors]."""
    if groups is None:
        return lambda row: (gmem[:parts], gmem[parts:])
    right1_gmem, right2_gmem, *vectors_gmem, indices_gmem = gmem
    shared_gmem = right1_gmem.at[indices_gmem[groups.indices.size - 1]]

    def tile_operands(row):
        group = lax.div(row, jnp.int32(groups.time))
        own_gmem = right2_gmem.at[indices_gmem[group]]
        return (shared_gmem, own_gmem), [ref.at[group] for ref in vectors_gmem]

    return tile_operands
