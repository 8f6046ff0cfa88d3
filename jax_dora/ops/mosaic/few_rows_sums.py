"""Sums of x W and of x A over runs of their inner axis: the first kernel of `few_rows`.

    x  [rows, in]    W  [in, out]    σ  [in / t, out] or None    A  [in, r], x's dtype
    parts  f32[splits, rows, out], Σ parts = x (σ∘v(W))
    z      f32[splits, rows, 64·n], Σ z = x A, and from column r on numbers that mean nothing

A strip is as wide as a row of 128 bytes; each consumer, a warpgroup, has runs and a ring of tiles
of its own, and a warp that fetches them. A few thread blocks have runs of A instead of W's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import few_rows_layout, few_rows_tile
from jax_dora.ops.mosaic.few_rows_layout import THREADS
from jax_dora.ops.mosaic.few_rows_tile import ROWS
from jax_dora.ops.mosaic.few_rows_tiling import A_COLS, in_pairs, parts, tilings
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, consume_registers, pad, padded_rank
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config, Tiling, Walk
from jax_dora.ops.quantised import bits

# Rows that are copied as they are; more are padded to whole instructions.
LOOSE_ROWS = 2


@dataclasses.dataclass(frozen=True)
class _Job:
    """The sums that some of the thread blocks take: those of x W, or those of x A.

    Attributes:
      tiling: how the matrix is cut, as for one multiprocessor a consumer.
      first: the number of the first of these blocks.
      w_gmem: the matrix [in, columns].
      out_gmem: the sums f32[splits, rows, columns].
      scales_gmem: the scales of the matrix's tiles, or nothing.
      w, ready: names of the buffer of tiles and of its barrier.
      slots: tiles in a consumer's ring; x has as many slots or more.
      width: columns that are copied at once.
    """

    tiling: Tiling
    first: int
    w_gmem: Any
    out_gmem: Any
    scales_gmem: tuple[Any, ...]
    w: str
    ready: str
    slots: int
    width: int

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.tiling.blocks, self.tiling.config.consumers)


def launch(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array | None,
    lora_a: jax.Array,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the parts of x W and of x A."""
    c, dtype, (rows, in_features) = config, x.dtype, x.shape
    held = pl.cdiv(rows, ROWS) * ROWS
    copied = rows if rows <= LOOSE_ROWS else held
    x = pad(x, copied, in_features)
    lora_a = pad(lora_a, in_features, padded_rank(lora_a.shape[1]))
    of_tiles = [] if scales is None else [scales]
    table = few_rows_tile.table_for(w.dtype, dtype)
    tables = [] if table is None else [jnp.asarray(table)]
    ring = c.consumers * c.slots
    rank, a_ring = lora_a.shape[1], c.consumers * c.stages
    tiling, a_tiling = tilings(in_features, w.shape[1], rank, held, c, sm_count)
    blocks, a_blocks = (pl.cdiv(one.blocks, c.consumers) for one in (tiling, a_tiling))
    a_width = min(A_COLS, rank)
    scale_tiles = 0 if scales is None else tiling.row_tiles // scales.shape[0]

    def kernel(x_gmem, w_gmem, *rest, buffers, ready, free, table_ready, paired):
        *rest, a_gmem, parts_gmem, z_gmem = rest
        tables_gmem, scales_gmem = rest[: len(tables)], tuple(rest[len(tables) :])
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        jobs = [
            _Job(
                tiling=tiling,
                first=0,
                w_gmem=w_gmem,
                out_gmem=parts_gmem,
                scales_gmem=scales_gmem,
                w="w",
                ready="ready",
                slots=c.slots,
                width=c.tile_cols,
            ),
            _Job(
                tiling=a_tiling,
                first=blocks,
                w_gmem=a_gmem,
                out_gmem=z_gmem,
                scales_gmem=(),
                w="a",
                ready="a_ready",
                slots=c.stages,
                width=a_width,
            ),
        ]

        def each_job(do):
            """Does this block's job."""
            for job in jobs:
                is_its = (block >= job.first) & (block < job.first + job.blocks)
                pl.when(is_its)(lambda job=job: do(job))

        def walk_of(job, consumer):
            return Walk(job.tiling, (block - job.first) * c.consumers + consumer)

        def slots_of(job, consumer, tile):
            """Returns a tile's place in the rings of x and of W."""
            slot = lax.rem(tile, job.slots)
            return consumer * c.slots + slot, consumer * job.slots + slot

        def fetch(job, consumer):
            """Fills, as one warp, a consumer's ring."""
            walk = walk_of(job, consumer)

            def fetch_run(index, before):
                cols, _, first, tiles = walk.run(index)
                cols = pl.ds(cols.start, job.width)

                def fetch_tile(tile, _):
                    x_slot, slot = slots_of(job, consumer, before + tile)
                    at_k = walk.rows(first + tile)
                    at_scale = lax.div(first + tile, scale_tiles) if of_tiles else 0
                    plgpu.barrier_wait(free.at[x_slot])
                    for gmem, smem in (
                        (job.w_gmem.at[at_k, cols], buffers[job.w].at[slot]),
                        (x_gmem.at[:, at_k], buffers["x"].at[x_slot]),
                        *(
                            (one.at[at_scale, cols], buffers["scales"].at[slot])
                            for one in job.scales_gmem
                        ),
                    ):
                        plgpu.copy_gmem_to_smem(gmem, smem, ready[job.ready].at[slot])

                lax.fori_loop(0, tiles, fetch_tile, None)
                return before + tiles

            lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
            # Every slot was handed back once more than it was filled.
            for slot in range(job.slots):
                plgpu.barrier_wait(free.at[consumer * c.slots + slot])

        def consume(job):
            walk, of = walk_of(job, warpgroup), buffers[job.w].dtype
            looks_up = bool(tables) and job.w == "w"
            layout, width = few_rows_layout.layout(of), few_rows_layout.columns(of)
            swizzled = job.width * bits(of) == 8 * few_rows_tile.TILE_BYTES
            zero = plgpu.layout_cast(jnp.zeros((held, width), jnp.float32), layout)
            if looks_up:
                plgpu.barrier_wait(table_ready)

            def consume_run(index, before):
                cols, split, _, tiles = walk.run(index)

                def add(tile, total):
                    x_slot, slot = slots_of(job, warpgroup, before + tile)
                    table_smem = buffers["table"] if looks_up else None
                    operands = buffers["x"].at[x_slot], buffers[job.w].at[slot], table_smem
                    plgpu.barrier_wait(ready[job.ready].at[slot])
                    if job.scales_gmem:
                        sums = few_rows_tile.multiplied(zero, *operands)
                        scale = plgpu.load(
                            buffers["scales"].at[slot], layout=layout.reduce(0), optimized=False
                        ).astype(jnp.float32)
                        total = total + sums * lax.broadcast_in_dim(scale, total.shape, (1,))
                    else:
                        total = few_rows_tile.multiplied(total, *operands, swizzled_w=swizzled)
                    # Without it the copy engine overtakes what the lanes read.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[x_slot])
                    return total

                total = lax.fori_loop(0, tiles, add, zero)

                def write(total, split):
                    out_gmem = job.out_gmem.at[split, :, cols]
                    few_rows_layout.store_first_rows(total, out_gmem, of)

                if not in_pairs(job.tiling):
                    write(total, split)
                else:
                    handed = buffers["handed"].at[pl.ds(0, total.size // THREADS)]

                    @pl.when(warpgroup == 1)
                    def _hand_over():
                        few_rows_layout.hand_over(total, handed, of)
                        plgpu.barrier_arrive(paired)

                    @pl.when(warpgroup == 0)
                    def _add_up():
                        plgpu.barrier_wait(paired)
                        both = few_rows_layout.added_to(total, handed, of)
                        write(both, lax.div(split, 2))

                return before + tiles

            lax.fori_loop(0, walk.runs, consume_run, jnp.int32(0))

        @pl.when(warpgroup == c.consumers)
        def _fetch_all():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                for table_gmem in tables_gmem:

                    @pl.when(warp == 0)
                    def _fetch_table(table_gmem=table_gmem):
                        plgpu.copy_gmem_to_smem(table_gmem, buffers["table"], table_ready)

                @pl.when(warp < c.consumers)
                def _fetch():
                    each_job(lambda job: fetch(job, warp))

        @pl.when(warpgroup < c.consumers)
        def _consume():
            plgpu.set_max_registers(consume_registers(c.consumers), action="increase")
            for slot in range(c.slots):
                plgpu.barrier_arrive(free.at[warpgroup * c.slots + slot])
            each_job(consume)

    of_x = few_rows_tile.swizzled if copied == held else plgpu.SMEM
    buffers: dict[str, Any] = {
        "x": of_x((ring, copied, TILE_ROWS), dtype),
        "w": few_rows_tile.swizzled((ring, TILE_ROWS, c.tile_cols), w.dtype),
        "handed": plgpu.SMEM((held * c.tile_cols // THREADS, THREADS), jnp.float32),
        # Whole rows of 128 bytes would all begin in one bank.
        "a": (few_rows_tile.swizzled if a_width == A_COLS else plgpu.SMEM)(
            (a_ring, TILE_ROWS, a_width), dtype
        ),
    }
    for one in tables:
        buffers["table"] = plgpu.SMEM(one.shape, one.dtype)
    for one in of_tiles:
        buffers["scales"] = plgpu.SMEM((ring, c.tile_cols), one.dtype)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts(tiling), rows, tiling.out), jnp.float32),
            jax.ShapeDtypeStruct((parts(a_tiling), rows, a_tiling.padded_out), jnp.float32),
        ),
        grid=(blocks + a_blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "buffers": buffers,
            "ready": {
                "ready": plgpu.Barrier(num_arrivals=2 + len(of_tiles), num_barriers=ring),
                "a_ready": plgpu.Barrier(num_arrivals=2, num_barriers=a_ring),
            },
            "free": plgpu.Barrier(num_barriers=ring),
            "table_ready": plgpu.Barrier(),
            "paired": plgpu.Barrier(),
        },
        kernel_name="dora_few_rows",
    )(x, w, *tables, *of_tiles, lora_a)
