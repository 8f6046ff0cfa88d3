"""The fetching warps of `strip_kernel`, which refill buffers as soon as they are free."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper.limits import TILE_K


def fetch_slices(walk, task, inputs, buffers, consumer):
    """Fills a consumer's ring of slices of `left`, as one warp. The first consumer's warp also
    fetches the strip of `right`."""
    left_gmem, right_gmem, _, _, *vectors_gmem = inputs  # the vectors, before the scales
    c = walk.tiling.config

    def fetch_run(index, before):
        cols, _, first, tiles = walk.run(index)
        skipped, turns = walk.turns(consumer, before, tiles, c.consumers)

        @pl.when(consumer == 0)
        def _fetch_strip():
            plgpu.barrier_wait(buffers["right_free"])
            right, vectors = right_gmem, vectors_gmem[0] if task.vectors else None
            if task.grouped:
                group = walk.group(first)
                right = right.at[inputs[-1][group]]
                vectors = None if vectors is None else vectors.at[group]
            if vectors is not None:
                if vectors.shape[-1] != c.tile_cols:
                    vectors = vectors.at[:, cols]
                plgpu.copy_gmem_to_smem(vectors, buffers["vectors_smem"], buffers["vectors_ready"])

            def fetch_right(k, _):
                plgpu.copy_gmem_to_smem(
                    right.at[pl.ds(k * TILE_K, TILE_K), cols],
                    buffers["right_smem"].at[k],
                    buffers["right_ready"].at[k],
                )

            lax.fori_loop(0, task.right_slices, fetch_right, None)

        def fetch_tile(i, _):
            tile = skipped + i * c.consumers
            turn = lax.div(before + tile, c.consumers)
            rows = walk.rows(first + tile)

            def fetch_left(k, _):
                stage = consumer * c.stages + lax.rem(turn * task.left_slices + k, c.stages)
                plgpu.barrier_wait(buffers["left_free"].at[stage])
                plgpu.copy_gmem_to_smem(
                    left_gmem.at[rows, pl.ds(k * TILE_K, TILE_K)],
                    buffers["left_smem"].at[stage],
                    buffers["left_ready"].at[stage],
                )

            lax.fori_loop(0, task.left_slices, fetch_left, None)

        lax.fori_loop(0, turns, fetch_tile, None)
        return before + tiles

    lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))

    # Every buffer is released once more than it is filled: wait for the last release.
    @pl.when(consumer == 0)
    def _settle_strip():
        plgpu.barrier_wait(buffers["right_free"])

    for stage in range(c.stages):
        plgpu.barrier_wait(buffers["left_free"].at[consumer * c.stages + stage])


def fetch_tiles(walk, task, inputs, buffers, fetcher, fetchers):
    """Fills rings of tiles of the matrix, as one of `fetchers` warps: a consumer's ring, or all
    consumers' rings if there is a single fetcher."""
    matrix_gmem, c = inputs[2], walk.tiling.config

    def fetch_run(index, before):
        cols, _, first, tiles = walk.run(index)
        skipped, turns = walk.turns(fetcher, before, tiles, fetchers)

        def fetch_tile(i, _):
            tile = skipped + i * fetchers
            turn = lax.div(before + tile, c.consumers)
            slot = lax.rem(before + tile, c.consumers) * c.slots + lax.rem(turn, c.slots)
            rows = walk.rows(first + tile)
            plgpu.barrier_wait(buffers["tile_free"].at[slot])
            plgpu.copy_gmem_to_smem(
                matrix_gmem.at[rows, cols],
                buffers["tile_smem"].at[slot],
                buffers["tile_ready"].at[slot],
            )
            if task.scales is not None:
                plgpu.copy_gmem_to_smem(
                    inputs[-1].at[task.scales.at(first + tile, rows, cols)],
                    buffers["scales_smem"].at[slot],
                    buffers["tile_ready"].at[slot],
                )

        lax.fori_loop(0, turns, fetch_tile, None)
        return before + tiles

    lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
    rings = c.consumers // fetchers
    for slot in range(rings * c.slots):
        plgpu.barrier_wait(buffers["tile_free"].at[fetcher * rings * c.slots + slot])
