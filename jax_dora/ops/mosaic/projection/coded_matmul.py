"""A product of FP8 codes, its scales, and an adapter's product in one kernel, rounded once.

    result = g∘((rows ⊗ columns)∘(codes kernelᵀ) + z adapterᵀ)

    codes  [rows, k]   kernel   [cols, k]    FP8, of the same or of different formats; kernel also
                                             [parts, cols, k / parts], as devices gather it
    z  [rows, r]       adapter  [cols, r]    bf16 or fp16, the dtype of the result [rows, cols]
    rows  f32[rows]    columns, g  f32[cols] (each optional)

A projection has the codes of x and Wᵀ, its z and Bᵀ. Its gradient with respect to x has the codes
of dy and W, dz and A. Tensor cores read FP8 only where the summed features are contiguous, so W is
transposed before one of the two.

FLOPs: 2 · rows · cols · (k at the rate of FP8, and r).
Bytes: 1 per code, and 2 per element of z, the adapter and the result.

As in `matmul`, the last warpgroup of a thread block fetches slices of the codes into a ring of
`stages` buffers, and the others, the consumers, multiply them. A chunk of the sums is multiplied by
its scales in registers, and z adapterᵀ, which has accumulators of its own, is added to it.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits, ring
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import FETCH_REGISTERS, TILE_K, consume_registers
from jax_dora.ops.mosaic.projection.matmul import store_chunk
from jax_dora.ops.mosaic.projection.matmul_tiling import CONSUMERS, Config, Tiles

# The codes of a slice: 128 bytes, as `TILE_K` numbers of 16 bits.
CODES = 2 * TILE_K
# Beside four slices, shared memory has room for an adapter of this rank and for small chunks.
RANK = 16
CHUNK_ROWS, CHUNK_COLS, CHUNK_BUFFERS = 64, 32, 2
# The columns of z adapterᵀ that a consumer's registers have room for.
PART_COLS = 128


def refuses(
    rows: int, summed: int, cols: int, rank: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why codes [rows, summed] and [cols, summed], with an adapter of this rank and dtype,
    are not supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the result has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if rows == 0 or rows % limits.ROW_ALIGNMENT:
        return f"rows = {rows} is not a positive multiple of {limits.ROW_ALIGNMENT}"
    if summed == 0 or summed % CODES:
        return f"{summed} summed features are not a positive multiple of {CODES}"
    if cols <= TILE_K or cols % TILE_K:
        return f"{cols} features are not a multiple of {TILE_K} above {TILE_K}"
    return None if 0 < rank <= RANK else f"rank = {rank}; expected 1 to {RANK}"


def wins(rows: int, summed: int, cols: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is no slower than cuBLAS with `expand_compose`.

    Measured are the products of a step of Llama 3 70B: 4096 rows, and 8192 features with 1024, 8192
    and 28,672, both ways (H200, `h200/tried.jsonl`, "FP8 codes and the adapter in one kernel").
    Others, such as 8B's, are estimated from those rows: a tile takes 5.3 ns a summed feature and
    1.6 µs, cuBLAS a time in proportion to the FLOPs, and `expand_compose` to the results. With 4096
    rows, 4096 features by 4096 are 93 µs against 104. Tiles that leave many multiprocessors idle in
    the last round are not considered.
    """
    return rows >= 2048 and summed >= 1024 and cols >= 1024 and summed * cols >= 2**23


def config(rows: int, summed: int, cols: int, rank: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config that was measured to be fastest (the same rows)."""
    return Config(band=16 if cols > summed else 8)


@launcher("want_copy")
def launch(
    codes: jax.Array,
    scales: jax.Array,
    kernel: jax.Array,
    z: jax.Array,
    adapter: jax.Array,
    columns: jax.Array | None = None,
    g: jax.Array | None = None,
    *,
    want_copy: bool = False,
    config: Config,
    sm_count: int,
) -> list[jax.Array]:
    """Returns [the result] [..., cols] in the dtype of z [..., r], or [the result, a copy of it].

    Args:
      codes, scales: [..., k] and the scale of each row, f32[...].
      kernel, z, adapter, columns, g: see the module. Each part of a kernel has a multiple of
        `CODES` summed features.
      want_copy: whether to write the result twice, which saves a pass that copies it.
      config, sm_count: see `choose.Choice`.
    """
    c, dtype = config, z.dtype
    *_, cols, summed_in_part = kernel.shape
    shape, kernel = (*codes.shape[:-1], cols), kernel.reshape(-1, summed_in_part)
    codes, z = codes.reshape(-1, codes.shape[-1]), z.reshape(-1, z.shape[-1])
    rows, summed = codes.shape
    outputs, steps_in_part = 2 if want_copy else 1, summed_in_part // CODES
    # With a block for each tile, as during collectives, every tile waits for its first slices, and
    # nothing is multiplied while it is stored: 7 to 17 % of the time of 70B's products (H200,
    # `h200/tried.jsonl`, "FP8 codes and the adapter, thread blocks").
    steps, tiles = pl.cdiv(summed, CODES), Tiles.of(c, rows, cols, sm_count).in_pairs()
    consumer_rows, consumer_cols = c.consumer_tile
    part_cols = min(PART_COLS, consumer_cols)
    parts = list(
        itertools.product(range(0, consumer_rows, CHUNK_ROWS), range(0, consumer_cols, part_cols))
    )
    arguments = [codes, kernel, limits.pad(z, rows, RANK), limits.pad(adapter, cols, RANK)]
    arguments.append(limits.pad(scales.reshape(-1), tiles.rows * c.tile_rows))
    # What a tile needs once.
    once = {
        "z": limits.tiled((c.tile_rows, RANK), dtype),
        "adapter": limits.tiled((c.tile_cols, RANK), dtype),
    }
    vectors = [vector for vector in (columns, g) if vector is not None]
    if vectors:
        stacked = jnp.stack([vector.astype(jnp.float32) for vector in vectors])
        arguments.append(limits.pad(stacked, len(vectors), tiles.cols * c.tile_cols))
        once["vectors"] = plgpu.SMEM((len(vectors), c.tile_cols), jnp.float32)

    def body(
        codes_gmem,  # [rows, k]
        kernel_gmem,  # [parts · cols, k / parts]
        z_gmem,  # [rows, r]
        adapter_gmem,  # [cols, r]
        scales_gmem,  # f32[rows]
        *others_gmem,  # perhaps vectors f32[1 or 2, cols]; the results [rows, cols]
        codes_smem,
        kernel_smem,
        ready,
        free,
        once_smem,
        once_ready,
        once_free,
        chunk_smem,
    ):
        vectors_gmem, outs_gmem = others_gmem[:-outputs], others_gmem[-outputs:]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        my_tiles = tiles.of_block(block)

        def by_adapter(r, j):
            """Returns z adapterᵀ for several chunks, from row r and column j of the tile on."""

            def product(acc_ref):
                z_smem = once_smem["z"].at[pl.ds(r, CHUNK_ROWS)]
                right_smem = once_smem["adapter"].at[pl.ds(j, part_cols)].transpose((1, 0))
                plgpu.wgmma(acc_ref, z_smem, right_smem)
                return acc_ref[...]

            acc = plgpu.WGMMAAccumulatorRef((CHUNK_ROWS, part_cols), jnp.float32)
            return pl.run_scoped(product, acc)

        def finished(chunk, scales, adapted, j):
            """Returns the result of a chunk of sums, at column j of the tile."""

            def vector(i):
                found = plgpu.load(
                    once_smem["vectors"].at[i, pl.ds(j, CHUNK_COLS)],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                )
                return lax.broadcast_in_dim(found, chunk.shape, (1,))

            chunk = chunk * lax.broadcast_in_dim(scales, chunk.shape, (0,))
            if columns is not None:
                chunk = chunk * vector(0)
            chunk = chunk + adapted
            return chunk if g is None else chunk * vector(len(vectors) - 1)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch_tile(index, _):
                row, col = tiles.corner(block, index)
                at_rows, at_cols = pl.ds(row, c.tile_rows), pl.ds(col, c.tile_cols)

                def fetch_slice(k, _):
                    stage = lax.rem(index * steps + k, c.stages)
                    plgpu.barrier_wait(free.at[stage])
                    # Past the columns of a part are those of the next, whose sums are not stored.
                    part, k_in_part = lax.div(k, steps_in_part), lax.rem(k, steps_in_part)
                    of_part = pl.ds(part * cols + col, c.tile_cols)
                    for gmem, smem, at, start in (
                        (codes_gmem, codes_smem, at_rows, k),
                        (kernel_gmem, kernel_smem, of_part, k_in_part),
                    ):
                        slice_gmem = gmem.at[at, pl.ds(start * CODES, CODES)]
                        plgpu.copy_gmem_to_smem(slice_gmem, smem.at[stage], ready.at[stage])

                lax.fori_loop(0, steps, fetch_slice, None)
                # Fetched last: these buffers are free only after the previous tile has been stored,
                # while those of the slices are free long before.
                plgpu.barrier_wait(once_free)
                for name, gmem in (
                    ("z", z_gmem.at[at_rows]),
                    ("adapter", adapter_gmem.at[at_cols]),
                    *[("vectors", one.at[:, at_cols]) for one in vectors_gmem],
                ):
                    plgpu.copy_gmem_to_smem(gmem, once_smem[name], once_ready)

            lax.fori_loop(0, my_tiles, fetch_tile, None)
            ring.drain(free)
            plgpu.barrier_wait(once_free)

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            ring.release(free)
            plgpu.barrier_arrive(once_free)
            my_row = warpgroup * consumer_rows if c.split_rows else 0
            my_col = 0 if c.split_rows else warpgroup * consumer_cols

            def consume_tile(index, _):
                row, col = tiles.corner(block, index)
                # From global memory, as shared memory has no room: long before they are needed.
                scales = [
                    plgpu.load(
                        scales_gmem.at[pl.ds(row + my_row + r, CHUNK_ROWS)],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    for r in range(0, consumer_rows, CHUNK_ROWS)
                ]

                def number(k):
                    return index * steps + k

                def multiply(acc_ref, stage, _):
                    plgpu.barrier_wait(ready.at[stage])
                    left = codes_smem.at[stage, pl.ds(my_row, consumer_rows)]
                    right = kernel_smem.at[stage, pl.ds(my_col, consumer_cols)]
                    plgpu.wgmma(acc_ref, left, right.transpose((1, 0)))

                acc = ring.accumulate(steps, multiply, c.consumer_tile, free, number)
                plgpu.barrier_arrive(free.at[lax.rem(number(steps - 1), c.stages)])
                plgpu.barrier_wait(once_ready)
                stores = 0
                for r, start in parts:
                    adapted = by_adapter(my_row + r, my_col + start)
                    for j in range(start, start + part_cols, CHUNK_COLS):
                        chunk = finished(
                            acc[r : r + CHUNK_ROWS, j : j + CHUNK_COLS],
                            scales[r // CHUNK_ROWS],
                            adapted[:, j - start : j - start + CHUNK_COLS],
                            my_col + j,
                        )
                        at_rows = pl.ds(row + my_row + r, CHUNK_ROWS)
                        at_cols = pl.ds(col + my_col + j, CHUNK_COLS)
                        buffer = warpgroup * CHUNK_BUFFERS + stores % CHUNK_BUFFERS
                        stores += 1
                        plgpu.wait_smem_to_gmem(CHUNK_BUFFERS - 1, wait_read_only=True)
                        store_chunk(chunk.astype(dtype), chunk_smem.at[buffer])
                        plgpu.commit_smem()
                        for out_gmem in outs_gmem:
                            plgpu.copy_smem_to_gmem(
                                chunk_smem.at[buffer],
                                out_gmem.at[at_rows, at_cols],
                                commit_group=False,
                            )
                        plgpu.commit_smem_to_gmem_group()
                plgpu.barrier_arrive(once_free)

            lax.fori_loop(0, my_tiles, consume_tile, None)
            plgpu.wait_smem_to_gmem(0)

    def slices(rows, qtype):
        transforms = limits.row_transforms(CODES, qtype)
        return plgpu.SMEM((c.stages, rows, CODES), qtype, transforms=transforms)

    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, cols), dtype)] * outputs,
        grid=(tiles.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "codes_smem": slices(c.tile_rows, codes.dtype),
            "kernel_smem": slices(c.tile_cols, kernel.dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            "once_smem": once,
            "once_ready": plgpu.Barrier(num_arrivals=len(once)),
            "once_free": plgpu.Barrier(num_arrivals=CONSUMERS),
            # Not in tiles of 8 rows, because the result's last chunk may have any number of rows.
            "chunk_smem": limits.swizzled(
                (CONSUMERS * CHUNK_BUFFERS, CHUNK_ROWS, CHUNK_COLS), dtype
            ),
        },
        compiler_params=limits.STATED_LAYOUTS,
        kernel_name="dora_coded_matmul",
    )(*arguments)
    # Without this barrier XLA launches the kernel twice if a scan both stacks and reads a result.
    result, *copy = (result.reshape(shape) for result in results)
    return [lax.optimization_barrier(result), *copy]
