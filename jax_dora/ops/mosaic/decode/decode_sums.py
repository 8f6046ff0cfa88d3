"""The first kernel of a projection of few rows: partial sums of x W, and of x A with an adapter.

    x  [rows, in]    W  [in, out]    σ  [in / t, out] or None    A  [in, r], x's dtype
    parts  f32[splits, rows, out]     Σ_splits parts = x (σ∘v(W))
    z      f32[splits, rows, 64·n]    Σ_splits z = x A; columns from r on have arbitrary values

W is divided into strips of `tile_cols` columns, and a strip into runs of tiles along the inner
axis. A consumer (a warpgroup) sums the tiles of a run; it has its own ring of buffers and
its own warp that fetches them. Most thread blocks process runs of W, a few process runs of A.

Bytes: W, σ and A once; the floor is bytes / read rate.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.decode import decode_layout, decode_tile
from jax_dora.ops.mosaic.decode.decode_layout import THREADS
from jax_dora.ops.mosaic.decode.decode_tile import ROWS
from jax_dora.ops.mosaic.decode.decode_tiling import A_COLS, in_pairs, parts, tilings
from jax_dora.ops.mosaic.hopper.limits import (
    FETCH_REGISTERS,
    consume_registers,
    pad,
    padded_rank,
)
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config, Tiling, Walk

# Up to this number, rows are copied without padding. More are padded to whole instructions.
UNPADDED_ROWS = 2


@dataclasses.dataclass(frozen=True)
class _Job:
    """The work of some thread blocks: the partial sums of x W, or those of x A.

    Attributes:
      tiling: the tiling of the matrix, in which each consumer counts as a thread block.
      first: the index of the job's first thread block.
      w_gmem: the matrix [in, columns].
      out_gmem: the partial sums f32[splits, rows, columns].
      scales_gmem: (the scales of the matrix's tiles,), or ().
      w, ready: the names of the matrix's buffer and of its barrier.
      slots: the number of tiles in a consumer's ring, at most the number of x's tiles.
      width: the number of columns of a copy.
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
        """Returns the number of the job's thread blocks."""
        return pl.cdiv(self.tiling.blocks, self.tiling.config.consumers)


def launch(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array | None,
    lora_a: jax.Array | None,
    config: Config,
    sm_count: int,
) -> list[jax.Array]:
    """Returns [parts, z], or [parts] without an adapter."""
    c, dtype, (rows, in_features) = config, x.dtype, x.shape
    padded = pl.cdiv(rows, ROWS) * ROWS
    copied = rows if rows <= UNPADDED_ROWS else padded
    x = pad(x, copied, in_features)
    # Lists of one array, or empty.
    tile_scales = [] if scales is None else [scales]
    table = decode_tile.table_for(w.dtype, dtype)
    tables = [] if table is None else [jnp.asarray(table)]
    rank = 0 if lora_a is None else padded_rank(lora_a.shape[1])
    adapter = [] if lora_a is None else [pad(lora_a, in_features, rank)]
    ring, a_ring, a_width = c.consumers * c.slots, c.consumers * c.stages, min(A_COLS, rank)
    tiling, a_tiling = tilings(in_features, w.shape[1], rank, padded, c, sm_count)
    all_tilings = [tiling] if a_tiling is None else [tiling, a_tiling]
    blocks = [pl.cdiv(t.blocks, c.consumers) for t in all_tilings]
    tiles_per_scale = 0 if scales is None else tiling.row_tiles // scales.shape[0]

    def kernel(x_gmem, w_gmem, *rest, buffers, ready, free, table_ready, paired):
        # The results have as many arrays as the operands W and A.
        rest, sums_gmem = rest[: -len(blocks)], rest[-len(blocks) :]
        tables_gmem, rest = rest[: len(tables)], rest[len(tables) :]
        scales_gmem, adapter_gmem = rest[: len(tile_scales)], rest[len(tile_scales) :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        jobs = [
            _Job(
                tiling=tiling,
                first=0,
                w_gmem=w_gmem,
                out_gmem=sums_gmem[0],
                scales_gmem=scales_gmem,
                w="w",
                ready="ready",
                slots=c.slots,
                width=c.tile_cols,
            )
        ]
        if a_tiling is not None:
            of_a = _Job(
                tiling=a_tiling,
                first=blocks[0],
                w_gmem=adapter_gmem[0],
                out_gmem=sums_gmem[1],
                scales_gmem=(),
                w="a",
                ready="a_ready",
                slots=c.stages,
                width=a_width,
            )
            jobs.append(of_a)

        def run_job(function):
            """Calls `function` with this thread block's job."""
            for job in jobs:
                is_mine = (block >= job.first) & (block < job.first + job.blocks)
                pl.when(is_mine)(lambda job=job: function(job))

        def walk_of(job, consumer):
            return Walk(job.tiling, (block - job.first) * c.consumers + consumer)

        def slots_of(job, consumer, tile):
            """Returns a tile's slots in the rings of x and of the job's matrix."""
            slot = lax.rem(tile, job.slots)
            return consumer * c.slots + slot, consumer * job.slots + slot

        def fetch(job, consumer):
            """Fills the ring of a consumer, by one warp."""
            walk = walk_of(job, consumer)

            def fetch_run(index, before):
                cols, _, first, tiles = walk.run(index)
                cols = pl.ds(cols.start, job.width)

                def fetch_tile(tile, _):
                    x_slot, slot = slots_of(job, consumer, before + tile)
                    at_k = walk.rows(first + tile)
                    scale_row = lax.div(first + tile, tiles_per_scale) if tile_scales else 0
                    plgpu.barrier_wait(free.at[x_slot])
                    for gmem, smem in (
                        (job.w_gmem.at[at_k, cols], buffers[job.w].at[slot]),
                        (x_gmem.at[:, at_k], buffers["x"].at[x_slot]),
                        *(
                            (scales_gmem.at[scale_row, cols], buffers["scales"].at[slot])
                            for scales_gmem in job.scales_gmem
                        ),
                    ):
                        plgpu.copy_gmem_to_smem(gmem, smem, ready[job.ready].at[slot])

                lax.fori_loop(0, tiles, fetch_tile, None)
                return before + tiles

            lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
            # The consumer frees every slot once more than it is filled. All arrivals at a barrier
            # must be waited for before the kernel ends.
            for slot in range(job.slots):
                plgpu.barrier_wait(free.at[consumer * c.slots + slot])

        def consume(job):
            walk, width = walk_of(job, warpgroup), job.tiling.config.tile_cols
            uses_table = bool(tables) and job.w == "w"
            layout, swizzled = decode_layout.layout(width), job.width == width
            zero = plgpu.layout_cast(jnp.zeros((padded, width), jnp.float32), layout)
            if uses_table:
                plgpu.barrier_wait(table_ready)

            def consume_run(index, before):
                cols, split, _, tiles = walk.run(index)

                def add(tile, total):
                    x_slot, slot = slots_of(job, warpgroup, before + tile)
                    table_smem = buffers["table"] if uses_table else None
                    operands = buffers["x"].at[x_slot], buffers[job.w].at[slot], table_smem
                    plgpu.barrier_wait(ready[job.ready].at[slot])
                    if job.scales_gmem:
                        sums = decode_tile.accumulate(zero, *operands)
                        scale = plgpu.load(
                            buffers["scales"].at[slot], layout=layout.reduce(0), optimized=False
                        ).astype(jnp.float32)
                        total = total + sums * lax.broadcast_in_dim(scale, total.shape, (1,))
                    else:
                        total = decode_tile.accumulate(total, *operands, swizzled_w=swizzled)
                    # This fence keeps the next TMA copy from overwriting the tile while lanes still
                    # read it.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[x_slot])
                    return total

                total = lax.fori_loop(0, tiles, add, zero)

                def write(total, split):
                    out_gmem = job.out_gmem.at[split, :, cols]
                    decode_layout.store_first_rows(total, out_gmem)

                if not in_pairs(job.tiling):
                    write(total, split)
                else:
                    # The two consumers have the same strip: the second passes its sums to the
                    # first, which writes both.
                    exchange_smem = buffers["exchange"].at[pl.ds(0, total.size // THREADS)]

                    @pl.when(warpgroup == 1)
                    def _pass_sums():
                        decode_layout.store_exchange(total, exchange_smem)
                        plgpu.barrier_arrive(paired)

                    @pl.when(warpgroup == 0)
                    def _add_sums():
                        plgpu.barrier_wait(paired)
                        both = decode_layout.add_exchanged(total, exchange_smem)
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
                    run_job(lambda job: fetch(job, warp))

        @pl.when(warpgroup < c.consumers)
        def _consume():
            plgpu.set_max_registers(consume_registers(c.consumers), action="increase")
            for slot in range(c.slots):
                plgpu.barrier_arrive(free.at[warpgroup * c.slots + slot])
            run_job(consume)

    x_buffer = decode_tile.swizzled if copied == padded else plgpu.SMEM
    buffers: dict[str, Any] = {
        "x": x_buffer((ring, copied, TILE_ROWS), dtype),
        "w": decode_tile.swizzled((ring, TILE_ROWS, c.tile_cols), w.dtype),
        "exchange": plgpu.SMEM((padded * c.tile_cols // THREADS, THREADS), jnp.float32),
    }
    ready = {"ready": plgpu.Barrier(num_arrivals=2 + len(tile_scales), num_barriers=ring)}
    if adapter:
        # Swizzled only if a row has 128 bytes, because such rows would all begin in the same bank.
        a_buffer = decode_tile.swizzled if a_width == A_COLS else plgpu.SMEM
        buffers["a"] = a_buffer((a_ring, TILE_ROWS, a_width), dtype)
        ready["a_ready"] = plgpu.Barrier(num_arrivals=2, num_barriers=a_ring)
    for array in tables:
        buffers["table"] = plgpu.SMEM(array.shape, array.dtype)
    for array in tile_scales:
        buffers["scales"] = plgpu.SMEM((ring, c.tile_cols), array.dtype)
    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((parts(t), rows, t.padded_out), jnp.float32) for t in all_tilings
        ],
        grid=(sum(blocks),),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "buffers": buffers,
            "ready": ready,
            "free": plgpu.Barrier(num_barriers=ring),
            "table_ready": plgpu.Barrier(),
            "paired": plgpu.Barrier(),
        },
        kernel_name="dora_decode_project",
    )(x, w, *tables, *tile_scales, *adapter)


def added(parts: jax.Array, column_scales: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns σ∘Σ parts [rows, out] in `dtype`, bf16 or fp16, for parts f32[splits, rows, out].

    The bits are the same in every program, whatever XLA fuses this with: `jnp.sum` may add in
    another order, and XLA may leave out a plain rounding to `dtype` if the next operation is in
    fp32.
    """
    total = functools.reduce(jnp.add, parts)
    if column_scales is not None:
        total = total * column_scales.astype(jnp.float32)[None]
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # `reduce_precision` would replace fp16's subnormal numbers by zeros.
    return lax.optimization_barrier(total.astype(dtype))
