"""A product y = x W of more rows than in decoding with a quantised W, as for prompts.

    x  [rows, in]  bf16 or fp16
    W = σ∘v(q)     [in, out]
    q  [in, out]   int4, uint4 (NF4), int8 or float8_e4m3fn
    σ  [in / t, out], t = in or a multiple of 64
    y  [rows, out]  x's dtype

v maps codes to their numbers, rounded to x's dtype. The product of v(q) and a tile's scale, which
is of x's dtype, or with bf16 also fp32, is rounded to x's dtype. The scales of whole columns are
applied to the sums in fp32.

A thread block computes up to 128 rows and 256 columns of y, over a part of the inner axis. Its two
consumers (warpgroups) have 128 columns each, and share x in shared memory. Tensor cores get codes
from registers, in which they are converted (`decode_tile`). If the inner axis has several parts,
XLA adds them up.

Bytes: q and σ are read once for every 128 rows; the floor is FLOPs / rate of the tensor cores.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.decode import decode_layout, decode_sums, decode_tile
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import (
    FETCH_REGISTERS,
    RESERVED,
    ROW_ALIGNMENT,
    SHARED_MEMORY,
    balanced,
    consume_registers,
    pad,
)
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS
from jax_dora.ops.quantised import Format, bits, repeated

# Fewer rows are multiplied by other instructions, which do not apply scales.
LEAST_ROWS = decode_tile.MMA_ROWS + 1
# With more rows, cuBLAS saves about as much as a dense copy of W takes, or more.
MOST_ROWS = 896
BLOCK_ROWS = 128
# The columns of a consumer, and the consumers.
COLS = 128
CONSUMERS = 2
MOST_SLOTS = 6
# The cost of a thread block in addition to its tiles, in tiles; that of partial sums, which are
# written and read in fp32; and the maximum number of parts of the inner axis.
OVERHEAD = 4
PART_OVERHEAD = 12
MOST_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      slots: the number of tiles in flight.
    """

    slots: int = MOST_SLOTS


def refuses(
    rows: int, in_features: int, out: int, form: Format, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why a call is not supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not {LEAST_ROWS} to {MOST_ROWS}"
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if in_features == 0 or in_features % TILE_ROWS:
        return f"in = {in_features} is not a multiple of {TILE_ROWS}"
    if form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    is_tiled = form.tile[0] < in_features
    if jnp.dtype(dtype) == jnp.float16 and is_tiled and form.scale_dtype != jnp.float16:
        # The parts of such a scale would be subnormal numbers of fp16.
        return f"x is float16, and tiles have scales of {jnp.dtype(form.scale_dtype)}"
    if out == 0 or out % COLS:
        return f"out = {out} is not a multiple of {COLS}"
    return None


def wins(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> bool:
    """Returns whether the kernel is expected to be no slower than XLA, which writes a dequantised
    copy of W before it multiplies (`benchmarks quantised`)."""
    return in_features >= 1024 and out >= 1024


def config(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> Config:
    """Returns the config for a supported call: the most slots that fit into shared memory."""
    columns = CONSUMERS * COLS
    slot = TILE_ROWS * (_block_rows(rows) * 2 + columns * bits(form.stored) // 8) + 4 * columns
    table = decode_tile.table_for(form.stored, dtype)
    available = SHARED_MEMORY - RESERVED - (0 if table is None else table.nbytes)
    return Config(min(MOST_SLOTS, available // slot))


def _block_rows(rows: int) -> int:
    """Returns the rows of a thread block: the blocks have the same number, with little padding."""
    return pl.cdiv(rows, pl.cdiv(rows, BLOCK_ROWS) * ROW_ALIGNMENT) * ROW_ALIGNMENT


def _run(tiles: int, pieces: int, sm_count: int) -> int:
    """Returns the number of tiles of a thread block, for the shortest run time.

    Args:
      tiles: the tiles along the inner axis.
      pieces: the number of blocks of y.
    """
    splits = balanced(
        tiles,
        pieces,
        sm_count,
        overhead=OVERHEAD,
        most=MOST_SPLITS,
        sum_overhead=PART_OVERHEAD,
    )
    return pl.cdiv(tiles, splits)


@launcher()
def launch(
    x: jax.Array, w: jax.Array, scales: jax.Array, *, config: Config, sm_count: int
) -> jax.Array:
    """Returns y [..., out].

    Args:
      x: [..., in].
      w: the codes q.
      scales: σ [in / t, out / u].
      config, sm_count: see `choose.Choice`.
    """
    shape, dtype, (in_features, out) = x.shape, x.dtype, w.shape
    x = x.reshape(-1, in_features)
    rows, block_rows = len(x), _block_rows(len(x))
    blocks, strips = pl.cdiv(rows, block_rows), pl.cdiv(out, CONSUMERS * COLS)
    tiles = in_features // TILE_ROWS
    run = _run(tiles, strips * blocks, sm_count)
    splits = pl.cdiv(tiles, run)
    x = pad(x, blocks * block_rows, in_features)
    scales = repeated(scales, 1, out)
    if scales.dtype != dtype:
        scales = scales.astype(jnp.float32)
    is_tiled = len(scales) > 1
    tiles_per_scale = tiles // len(scales)
    table = decode_tile.table_for(w.dtype, dtype)
    tables = [] if table is None else [jnp.asarray(table)]
    slots = config.slots

    def kernel(x_gmem, w_gmem, scales_gmem, *rest, buffers, ready, free, table_ready):
        *tables_gmem, y_gmem = rest
        strip, block, split = (lax.axis_index(name) for name in ("strip", "block", "split"))
        warpgroup = lax.axis_index("warpgroup")
        at_rows = pl.ds(block * block_rows, block_rows)
        first = split * run
        count = jnp.minimum(run, tiles - first)

        def columns(consumer):
            return pl.ds((strip * CONSUMERS + consumer) * COLS, COLS)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                @pl.when(warp == 0)
                def _fetch_all():
                    for table_gmem in tables_gmem:
                        plgpu.copy_gmem_to_smem(table_gmem, buffers["table"], table_ready)

                    def fetch_tile(tile, _):
                        slot = lax.rem(tile, slots)
                        at_k = pl.ds((first + tile) * TILE_ROWS, TILE_ROWS)
                        plgpu.barrier_wait(free.at[slot])
                        copies = [(x_gmem.at[at_rows, at_k], buffers["x"].at[slot])]
                        for consumer in range(CONSUMERS):
                            own, cols = slot * CONSUMERS + consumer, columns(consumer)
                            copies.append((w_gmem.at[at_k, cols], buffers["w"].at[own]))
                            if is_tiled:
                                row = lax.div(first + tile, tiles_per_scale)
                                scale_gmem = scales_gmem.at[row, cols]
                                copies.append((scale_gmem, buffers["scales"].at[own]))
                        for gmem, smem in copies:
                            plgpu.copy_gmem_to_smem(gmem, smem, ready.at[slot])

                    lax.fori_loop(0, count, fetch_tile, None)
                    # The consumers free every slot once more than it is filled. All arrivals at a
                    # barrier must be waited for before the kernel ends.
                    for slot in range(slots):
                        plgpu.barrier_wait(free.at[slot])

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            layout = decode_layout.layout(COLS)
            zero = plgpu.layout_cast(jnp.zeros((block_rows, COLS), jnp.float32), layout)
            for slot in range(slots):
                plgpu.barrier_arrive(free.at[slot])
            for _ in tables:
                plgpu.barrier_wait(table_ready)

            def add(tile, total):
                slot = lax.rem(tile, slots)
                own = slot * CONSUMERS + warpgroup
                plgpu.barrier_wait(ready.at[slot])
                total = decode_tile.accumulate(
                    total,
                    buffers["x"].at[slot],
                    buffers["w"].at[own],
                    buffers["table"] if tables else None,
                    buffers["scales"].at[own] if is_tiled else None,
                )
                # This fence keeps the next TMA copy from overwriting the tile while lanes still
                # read it.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                return total

            total = lax.fori_loop(0, count, add, zero)
            cols = columns(warpgroup)

            @pl.when(cols.start < out)
            def _write():
                result = total
                if not is_tiled:
                    sigma = plgpu.load(
                        scales_gmem.at[0, cols], layout=layout.reduce(0), optimized=False
                    ).astype(jnp.float32)
                    result = total * lax.broadcast_in_dim(sigma, total.shape, (1,))
                decode_layout.store_first_rows(result, y_gmem.at[split, at_rows, cols])

    ring = CONSUMERS * slots
    buffers: dict[str, Any] = {
        "x": decode_tile.swizzled((slots, block_rows, TILE_ROWS), dtype),
        "w": decode_tile.swizzled((ring, TILE_ROWS, COLS), w.dtype),
    }
    for array in tables:
        buffers["table"] = plgpu.SMEM(array.shape, array.dtype)
    if is_tiled:
        buffers["scales"] = plgpu.SMEM((ring, COLS), scales.dtype)
    parts = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, len(x), out), dtype if splits == 1 else jnp.float32),
        grid=(strips, splits, blocks),
        grid_names=("strip", "split", "block"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "buffers": buffers,
            "ready": plgpu.Barrier(num_arrivals=1 + CONSUMERS * (1 + is_tiled), num_barriers=slots),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots),
            "table_ready": plgpu.Barrier(),
        },
        kernel_name="dora_decode_quantised",
    )(x, w, scales, *tables)
    return decode_sums.added(parts, None, dtype)[:rows].reshape(*shape[:-1], out)
