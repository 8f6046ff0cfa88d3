"""Each row's product with the A of its slot, in parts: the first kernel of `bank_rows`.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in]     parts  f32[in / 64 / slices, rows, r]

A thread block has `slices` tiles of 64 of `in`, keeps those of x, and goes through the slots in
use. What is beyond the rank of a row's slot is not defined.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows import SLOT_BITS, TILE_ROWS, Config, Sizes
from jax_dora.ops.mosaic.hopper import TILE_K, tiled


def launch(
    x: jax.Array,
    lora_a: jax.Array,
    rank: jax.Array,
    step: jax.Array,
    first: jax.Array,
    sizes: Sizes,
    config: Config,
) -> jax.Array:
    """Returns the parts, of whole tiles of rows."""
    c, tiles, dtype = config, sizes.tiles, x.dtype
    stages = c.shrink_stages
    chunks = pl.cdiv(sizes.in_features // TILE_K, c.slices)

    def kernel(x_gmem, a_gmem, rank_gmem, step_gmem, first_gmem, parts_gmem, **smem):
        facts, x_smem, a_smem, out_smem = (smem[k] for k in ("facts", "x", "a", "out"))
        ready, free = smem["ready"], smem["free"]
        chunk, warpgroup = lax.axis_index("chunk"), lax.axis_index("warpgroup")

        def columns(slice_):
            return pl.ds((chunk * c.slices + slice_) * TILE_K, TILE_K)

        @pl.when(warpgroup == tiles)
        def _fetch():
            first = first_gmem[0]
            load_facts(step_gmem, rank_gmem, first, facts, sizes)
            for tile in range(tiles):
                for slice_ in range(c.slices):
                    plgpu.copy_gmem_to_smem(
                        # A start that varies: past the last row the copy engine reads zeros.
                        x_gmem.at[pl.ds(chunk * 0 + tile * TILE_ROWS, TILE_ROWS), columns(slice_)],
                        x_smem.at[tile * c.slices + slice_],
                        smem["x_ready"],
                    )
            plgpu.barrier_wait(facts["ready"])

            def fetch(index, _):
                slot = slot_of(facts["step"][1 + index])
                stage = lax.rem(index, stages)
                plgpu.barrier_wait(free.at[stage])

                def copy(box):
                    for slice_ in range(c.slices):
                        plgpu.copy_gmem_to_smem(
                            a_gmem.at[first + slot, pl.ds(0, box), columns(slice_)],
                            a_smem.at[stage * c.slices + slice_, pl.ds(0, box)],
                            ready.at[stage],
                        )

                by_rank(facts["rank"][slot], sizes.boxes, copy)

            lax.fori_loop(0, facts["step"][0], fetch, None)
            # Every stage was handed back once more than it was filled.
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_wait(free.at[i]), None)

        @pl.when(warpgroup < tiles)
        def _consume():
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)
            plgpu.barrier_wait(facts["ready"])
            ids = own_ids(facts, warpgroup)
            plgpu.barrier_wait(smem["x_ready"])

            def meet(index, sums):
                entry, stage = facts["step"][1 + index], lax.rem(index, stages)
                plgpu.barrier_wait(ready.at[stage])

                def multiply(acc_ref):
                    for slice_ in range(c.slices):
                        a_tile = a_smem.at[stage * c.slices + slice_]
                        plgpu.wgmma(
                            acc_ref,
                            x_smem.at[warpgroup * c.slices + slice_],
                            a_tile.transpose((1, 0)),
                        )
                    return acc_ref[...]

                def product():
                    return pl.run_scoped(multiply, accumulator)

                sums = if_met(entry, warpgroup, ids, sums, product)
                plgpu.barrier_arrive(free.at[stage])
                return sums

            shape = (TILE_ROWS, sizes.rank)
            accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(0, facts["step"][0], meet, start)
            out_smem[warpgroup] = sums
            plgpu.commit_smem()
            rows = pl.ds(warpgroup * TILE_ROWS, TILE_ROWS)
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], parts_gmem.at[chunk, rows])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((chunks, tiles * TILE_ROWS, sizes.rank), jnp.float32),
        grid=(chunks,),
        grid_names=("chunk",),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        scratch_types={
            "facts": facts_types(sizes),
            "x": tiled((tiles * c.slices, TILE_ROWS, TILE_K), dtype),
            "x_ready": plgpu.Barrier(num_arrivals=tiles * c.slices),
            "a": tiled((stages * c.slices, sizes.rank, TILE_K), dtype),
            "out": tiled((tiles, TILE_ROWS, sizes.rank), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=c.slices, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        },
        kernel_name="dora_bank_rows_shrink",
    )(x, lora_a, rank, step, first)


def facts_types(sizes: Sizes):
    """Returns the shared memory for the plan and the ranks of the layer's slots."""
    copies = len(_pieces(sizes.entries)) + sizes.tiles + len(_pieces(sizes.slots))
    return {
        "step": plgpu.SMEM((sizes.entries,), jnp.int32),
        "ids": plgpu.SMEM((sizes.tiles, TILE_ROWS), jnp.int32),
        "rank": plgpu.SMEM((sizes.slots,), jnp.int32),
        "ready": plgpu.Barrier(num_arrivals=copies),
    }


def load_facts(step_gmem, rank_gmem, first, facts, sizes: Sizes) -> None:
    """Fetches the plan and the ranks of the layer's slots."""

    def copy(source, target):
        plgpu.copy_gmem_to_smem(source, target, facts["ready"])

    for start, size in _pieces(sizes.entries):
        copy(step_gmem.at[pl.ds(start, size)], facts["step"].at[pl.ds(start, size)])
    for tile in range(sizes.tiles):
        rows = pl.ds(sizes.entries + tile * TILE_ROWS, TILE_ROWS)
        copy(step_gmem.at[rows], facts["ids"].at[tile])
    for start, size in _pieces(sizes.slots):
        copy(rank_gmem.at[pl.ds(first + start, size)], facts["rank"].at[pl.ds(start, size)])


def _pieces(size: int) -> list[tuple[int, int]]:
    """Returns (start, size) of the parts in which the copy engine takes so many elements."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def slot_of(entry):
    """Returns the slot of a plan's entry."""
    return lax.bitwise_and(entry, jnp.int32(2**SLOT_BITS - 1))


def by_rank(rank, boxes, copy) -> None:
    """Calls `copy` with the least of `boxes` that holds a rank."""
    for below, box in zip([-1, *boxes], boxes, strict=False):
        pl.when((rank > below) & (rank <= box))(lambda box=box: copy(box))


def own_ids(facts, tile):
    """Returns the ids of a tile's rows, laid out as a column of its results."""
    return plgpu.load(facts["ids"].at[tile], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def if_met(entry, tile, ids, old, new):
    """Returns `old` [rows, cols] with the rows of an entry's slot replaced by those of `new()`;
    `old` where the tile has none."""

    def met():
        own = lax.broadcast_in_dim(ids == slot_of(entry), old.shape, (0,))
        return jnp.where(own, new(), old)

    mark = lax.bitwise_and(lax.shift_right_logical(entry, SLOT_BITS + tile), jnp.int32(1))
    return lax.cond(mark == 1, met, lambda: old)
