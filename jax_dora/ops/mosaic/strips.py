"""How expand_compose and norm sweep a matrix: shared by both.

Both take tiles of `left @ right`, [rows, k] @ [k, out] with a short k (the rank), and meet each with
the tile of a large [rows, out] matrix:

- The matrix is cut into strips of `tile_cols` columns, and a strip into `splits` runs of whole
  tiles. A run is a thread block's unit of work. For its length the strip of `right`, [k, tile_cols],
  stays in shared memory; were it fetched per tile, level-2 traffic would be twice as high, and that,
  not arithmetic, would set the pace.
- The `consumers` take turns at tiles: while one works on its accumulator the others keep the tensor
  cores busy. Each has its own fetching warp and its own rings of slices of `left` and of tiles
  of the matrix; with one fetcher for all, a consumer's slices would wait for another's.
- Past the last row, column or rank the copy engine reads zeros and writes nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of 16 bytes are what the copy engine can address.
ALIGNMENT = 8
# Tensor cores read shared memory in blocks of 8 rows, which the copy engine can make of whole ones.
ROW_ALIGNMENT = 8
# One m64 instruction; taller tiles would only need more registers.
TILE_ROWS = 64
SHARED_MEMORY = 232_448
# What vectors, barriers and sums over warps may take of it.
RESERVED = 3_072
REDUCTION_SCRATCH = 1_024
FETCH_REGISTERS = 40
REGISTERS = 512


@dataclasses.dataclass(frozen=True)
class StripConfig:
    """Launch knobs.

    Attributes:
      tile_cols: columns of a strip. 128 keeps the tensor cores fed from shared memory; 64 halves
        the resident strip of `right` where the rank is large, at twice the traffic of `left`.
      stages: slices of `left` in flight for each consumer.
      slots: tiles of the matrix in flight for each consumer; with two, one is fetched while the
        other is worked on and stored.
      consumers: warpgroups that multiply.
      tile_k: depth of a slice, 64 or 32.
      splits: runs that a strip is cut into; None balances them over the multiprocessors.
    """

    tile_cols: int = 128
    stages: int = 4
    slots: int = 2
    consumers: int = 2
    tile_k: int = 64
    splits: int | None = None


def padded_rank(rank: int, tile_k: int) -> int:
    """The rank with zeros up to what the copy engine can address: whole slices, if more than one."""
    step = ALIGNMENT if rank < tile_k else tile_k
    return pl.cdiv(rank, step) * step


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Static geometry of one launch over [rows, out]."""

    rows: int
    out: int
    config: StripConfig
    sm_count: int

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def strips(self) -> int:
        return pl.cdiv(self.out, self.config.tile_cols)

    @property
    def padded_out(self) -> int:
        return self.strips * self.config.tile_cols

    @property
    def run(self) -> int:
        """Tiles of a run; the last of a strip may have fewer."""
        splits = self.config.splits or _balanced(self.row_tiles, self.strips, self.sm_count)
        return pl.cdiv(self.row_tiles, splits)

    @property
    def splits(self) -> int:
        return pl.cdiv(self.row_tiles, self.run)

    @property
    def units(self) -> int:
        return self.strips * self.splits

    @property
    def blocks(self) -> int:
        return min(self.sm_count, self.units)


def _balanced(row_tiles: int, strips: int, sm_count: int) -> int:
    """The number of runs a strip that finishes first, a run costing one tile more than it has."""

    def time(splits: int) -> int:
        return pl.cdiv(strips * splits, sm_count) * (pl.cdiv(row_tiles, splits) + 1)

    return min(range(1, min(row_tiles, 4 * sm_count) + 1), key=time)


def shared_memory(
    config: StripConfig, right_rank: int, tile_itemsize: int, extra_tiles: int = 0
) -> int:
    """Bytes that a launch takes; `extra_tiles` further tiles for each consumer."""
    c = config
    tile = TILE_ROWS * c.tile_cols * tile_itemsize
    return (
        pl.cdiv(right_rank, c.tile_k) * c.tile_k * c.tile_cols * 2
        + c.consumers * c.stages * TILE_ROWS * c.tile_k * 2
        + c.consumers * (c.slots + extra_tiles) * tile
        + RESERVED
    )


def fits(
    right_rank: int, tile_itemsize: int, candidates: Sequence[StripConfig], extra_tiles: int = 0
) -> StripConfig | None:
    """The first of `candidates` that shared memory has room for."""
    for config in candidates:
        if shared_memory(config, right_rank, tile_itemsize, extra_tiles) <= SHARED_MEMORY:
            return config
    return None


def tiled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, gmem_cols: int | None = None):
    """Shared memory for [..., rows, cols], laid out for the copy engine and the tensor cores.

    `gmem_cols` is the width of the matrix that is copied to or from; no block may straddle its end.
    """
    itemsize = jnp.dtype(dtype).itemsize
    cols = math.gcd(shape[-1], gmem_cols or shape[-1])
    swizzle = plgpu.find_swizzle(8 * itemsize * cols)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    # A swizzle of 16 bytes is none.
    swizzles = () if swizzle == 16 else (plgpu.SwizzleTransform(swizzle),)
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzles))


def pad(array: jax.Array, *shape: int) -> jax.Array:
    """`array` with zeros up to `shape`; itself where it has that shape already."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, to - size) for size, to in zip(array.shape, shape, strict=True)])


def pad_features(vectors: Sequence[jax.Array], sweep: Sweep) -> jax.Array:
    """Vectors [out] as f32[len(vectors), padded_out]."""
    stacked = jnp.stack([v.astype(jnp.float32) for v in vectors])
    return pad(stacked, len(vectors), sweep.padded_out)


@dataclasses.dataclass(frozen=True)
class Run:
    """What `finish` sees of a run: its strip's columns, and which of the strip's runs it is."""

    cols: Any
    split: jax.Array


def sweep_kernel(
    sweep: Sweep,
    products: Sequence[Sequence[int]],
    operand_dtype: jax.typing.DTypeLike,
    tile_dtype: jax.typing.DTypeLike,
    *,
    out_type: Any,
    scratch: dict[str, Any],
    epilogue: Callable[..., Any],
    start: Callable[[], Any] = lambda: 0,
    finish: Callable[..., None] | None = None,
    vectors: int = 0,
    stores: bool,
    kernel_name: str,
) -> Callable[..., Any]:
    """A function of (left, right, matrix, scale[1], *vectors[n, padded_out]).

    Args:
      products: for each slice of `left` along k, the slices of `right` that it multiplies.
      scratch: further shared memory, by name, given to `epilogue` and `finish` as keywords.
      epilogue: `(carry, acc, tile_smem, vectors_smem, scale, rows, cols, outputs, **scratch)`
        for f32 acc [tile_rows, tile_cols]; returns the next carry.
      start: the first carry of a run.
      finish: `(carry, run, outputs, **scratch)`, after a run's last tile; one consumer at a time,
        since sums across warps go through scratch memory that all warpgroups share.
      vectors: n, rows of fp32 numbers per column that `epilogue` sees in shared memory.
      stores: `epilogue` stores from `tile_smem`, which is therefore not free when it returns.
    """
    c = sweep.config
    left_slices = len(products)
    right_slices = 1 + max(k for ks in products for k in ks)
    outputs = len(out_type)
    # Late enough not to wait for the stores, early enough for the next tile to arrive in time.
    hand_back_at = min(left_slices // 3, c.stages - 1)
    left_ring, tile_ring = c.consumers * c.stages, c.consumers * c.slots

    def kernel(left_gmem, right_gmem, matrix_gmem, scale_gmem, *refs, fetch, extra):
        vectors_gmem = refs[0] if vectors else None
        out_gmem = refs[len(refs) - outputs :]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        runs = (sweep.units - block + sweep.blocks - 1) // sweep.blocks

        def run_at(index):
            """The columns, the split, the first tile and the number of tiles."""
            unit = block + index * sweep.blocks
            split = lax.rem(unit, sweep.splits)
            first = split * sweep.run
            tiles = jnp.minimum(sweep.run, sweep.row_tiles - first)
            return (
                pl.ds(lax.div(unit, sweep.splits) * c.tile_cols, c.tile_cols),
                split,
                first,
                tiles,
            )

        def tile_rows(tile):
            return pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def turns_of(consumer, before, tiles):
            """The first of `tiles` tiles, `before` of them gone by, that is `consumer`'s; how many are."""
            skipped = lax.rem(consumer - lax.rem(before, c.consumers) + c.consumers, c.consumers)
            return skipped, lax.div(tiles - skipped + c.consumers - 1, c.consumers)

        def fetch_for(consumer):
            def fetch_run(index, before):
                cols, _, first, tiles = run_at(index)
                skipped, turns = turns_of(consumer, before, tiles)

                @pl.when(consumer == 0)
                def _fetch_strip():
                    plgpu.barrier_wait(fetch["right_free"])
                    if vectors:
                        plgpu.copy_gmem_to_smem(
                            vectors_gmem.at[:, cols], fetch["vectors_smem"], fetch["vectors_ready"]
                        )

                    def fetch_right(k, _):
                        plgpu.copy_gmem_to_smem(
                            right_gmem.at[pl.ds(k * c.tile_k, c.tile_k), cols],
                            fetch["right_smem"].at[k],
                            fetch["right_ready"].at[k],
                        )

                    lax.fori_loop(0, right_slices, fetch_right, None)

                def fetch_tile(i, _):
                    tile = skipped + i * c.consumers
                    turn = lax.div(before + tile, c.consumers)
                    rows = tile_rows(first + tile)

                    def fetch_left(k, _):
                        stage = consumer * c.stages + lax.rem(turn * left_slices + k, c.stages)
                        plgpu.barrier_wait(fetch["left_free"].at[stage])
                        plgpu.copy_gmem_to_smem(
                            left_gmem.at[rows, pl.ds(k * c.tile_k, c.tile_k)],
                            fetch["left_smem"].at[stage],
                            fetch["left_ready"].at[stage],
                        )

                    # A consumer's only slot is handed back while it works on the next tile's slices.
                    ahead = 0 if c.slots > 1 else min(c.stages, left_slices)
                    lax.fori_loop(0, ahead, fetch_left, None)
                    slot = consumer * c.slots + lax.rem(turn, c.slots)
                    plgpu.barrier_wait(fetch["tile_free"].at[slot])
                    plgpu.copy_gmem_to_smem(
                        matrix_gmem.at[rows, cols],
                        fetch["tile_smem"].at[slot],
                        fetch["tile_ready"].at[slot],
                    )
                    lax.fori_loop(ahead, left_slices, fetch_left, None)

                lax.fori_loop(0, turns, fetch_tile, None)
                return before + tiles

            lax.fori_loop(0, runs, fetch_run, jnp.int32(0))

            # Every buffer was handed back once more than it was filled.
            @pl.when(consumer == 0)
            def _settle_strip():
                plgpu.barrier_wait(fetch["right_free"])

            for slot in range(c.slots):
                plgpu.barrier_wait(fetch["tile_free"].at[consumer * c.slots + slot])
            for stage in range(c.stages):
                plgpu.barrier_wait(fetch["left_free"].at[consumer * c.stages + stage])

        @pl.when(warpgroup == c.consumers)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                pl.when(warp < c.consumers)(lambda: fetch_for(warp))

        @pl.when(warpgroup < c.consumers)
        def _consume():
            registers = (REGISTERS - FETCH_REGISTERS) // c.consumers // 8 * 8
            plgpu.set_max_registers(min(240, registers), action="increase")
            scale = scale_gmem[0]

            def slot_of(turn):
                return warpgroup * c.slots + lax.rem(turn, c.slots)

            if finish is not None:

                @pl.when(warpgroup == 0)
                def _give_first_turn():
                    plgpu.barrier_arrive(fetch["finish_turn"].at[0])

            plgpu.barrier_arrive(fetch["right_free"])
            for stage in range(c.stages):
                plgpu.barrier_arrive(fetch["left_free"].at[warpgroup * c.stages + stage])
            # What a tile's stores read is handed back during the next tile.
            for turn in range(c.slots - 1 if stores else c.slots):
                plgpu.barrier_arrive(fetch["tile_free"].at[slot_of(turn)])

            def hand_back_stored(turn):
                """The slot of the tile before `turn`, once its stores have read it."""
                if stores:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(fetch["tile_free"].at[slot_of(turn + c.slots - 1)])

            def consume_run(index, before):
                cols, split, first, tiles = run_at(index)
                skipped = lax.rem(
                    warpgroup - lax.rem(before, c.consumers) + c.consumers, c.consumers
                )
                turns = lax.div(tiles - skipped + c.consumers - 1, c.consumers)
                if vectors:
                    plgpu.barrier_wait(fetch["vectors_ready"])

                @pl.when(turns == 0)
                def _see_right():
                    for k in range(right_slices):
                        plgpu.barrier_wait(fetch["right_ready"].at[k])

                def consume_tile(i, carry):
                    tile = skipped + i * c.consumers
                    turn = lax.div(before + tile, c.consumers)

                    def stage_of(k):
                        return warpgroup * c.stages + lax.rem(turn * left_slices + k, c.stages)

                    def multiply(acc_ref):
                        fresh = set(range(right_slices))
                        for k, partners in enumerate(products):
                            unseen = [p for p in partners if p in fresh]
                            fresh.difference_update(unseen)
                            if unseen:

                                @pl.when(i == 0)
                                def _see_right(unseen=unseen):
                                    for p in unseen:
                                        plgpu.barrier_wait(fetch["right_ready"].at[p])

                            plgpu.barrier_wait(fetch["left_ready"].at[stage_of(k)])
                            for p in partners:
                                plgpu.wgmma(
                                    acc_ref,
                                    fetch["left_smem"].at[stage_of(k)],
                                    fetch["right_smem"].at[p],
                                )
                            if k == hand_back_at:
                                hand_back_stored(turn)
                            if k > 0:
                                # All but this slice's products are done, so the last slice is free.
                                plgpu.wgmma_wait(len(partners))
                                plgpu.barrier_arrive(fetch["left_free"].at[stage_of(k - 1)])
                        return acc_ref[...]

                    acc = pl.run_scoped(
                        multiply, plgpu.ACC((TILE_ROWS, c.tile_cols), jnp.float32)
                    )
                    plgpu.barrier_arrive(fetch["left_free"].at[stage_of(left_slices - 1)])
                    slot = slot_of(turn)
                    plgpu.barrier_wait(fetch["tile_ready"].at[slot])
                    carry = epilogue(
                        carry,
                        acc,
                        fetch["tile_smem"].at[slot],
                        fetch["vectors_smem"] if vectors else None,
                        scale,
                        tile_rows(first + tile),
                        cols,
                        out_gmem,
                        **extra,
                    )
                    if not stores:
                        # The copy engine may not write before these ordinary reads.
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(fetch["tile_free"].at[slot])
                    return carry

                carry = lax.fori_loop(0, turns, consume_tile, start())
                plgpu.barrier_arrive(fetch["right_free"])
                if finish is not None:
                    plgpu.barrier_wait(fetch["finish_turn"].at[warpgroup])
                    finish(carry, Run(cols, split), out_gmem, **extra)
                    plgpu.barrier_arrive(fetch["finish_turn"].at[lax.rem(warpgroup + 1, c.consumers)])
                return before + tiles

            tiles = lax.fori_loop(0, runs, consume_run, jnp.int32(0))
            hand_back_stored(lax.div(tiles - warpgroup + c.consumers - 1, c.consumers))
            plgpu.wait_smem_to_gmem(0)
            if finish is not None:

                @pl.when(warpgroup == 0)
                def _take_last_turn():
                    plgpu.barrier_wait(fetch["finish_turn"].at[0])

    buffers = {
        "left_smem": tiled((left_ring, TILE_ROWS, c.tile_k), operand_dtype),
        "left_ready": plgpu.Barrier(num_barriers=left_ring),
        "left_free": plgpu.Barrier(num_barriers=left_ring),
        # Tensor cores want both operands swizzled alike.
        "right_smem": tiled((right_slices, c.tile_k, c.tile_cols), operand_dtype, c.tile_k),
        "right_ready": plgpu.Barrier(num_barriers=right_slices),
        "right_free": plgpu.Barrier(num_arrivals=c.consumers),
        "tile_smem": tiled((tile_ring, TILE_ROWS, c.tile_cols), tile_dtype, sweep.out),
        "tile_ready": plgpu.Barrier(num_barriers=tile_ring),
        "tile_free": plgpu.Barrier(num_barriers=tile_ring),
    }
    if vectors:
        buffers["vectors_smem"] = plgpu.SMEM((vectors, c.tile_cols), jnp.float32)
        buffers["vectors_ready"] = plgpu.Barrier()

    if finish is not None:
        buffers["finish_turn"] = plgpu.Barrier(num_barriers=c.consumers)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(sweep.blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={"fetch": buffers, "extra": scratch},
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_SCRATCH),
        kernel_name=kernel_name,
    )
