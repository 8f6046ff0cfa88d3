"""The norm's square in one pass over the kernel, with B held in registers: ‖W + s·A B‖² per column.

    W  [in, out]  bf16 or fp16; or codes q of int8, float8_e4m3fn, int4 or NF4 (uint4), W = σ∘v(q)
    σ  [in / t, out], t a multiple of 64
    A  [in, r], B  [r, out]  bf16, fp16 or fp32    s  f32[]
    norm² = Σ_in (W + s·A B)²  f32[out]

Each consumer, a warpgroup, keeps its 64 columns of B in registers as the left operand of its
products, (A B)ᵀ = Bᵀ Aᵀ. This has three advantages over `one_pass_norm`, whose strip of B lies in
shared memory, and which takes the calls that this kernel refuses:

- Both consumers multiply the same tile of A, so shared memory has room for several tiles in flight.
- A product reads one operand from shared memory instead of two.
- A thread sums the squares of its two columns in four registers.

While the tensor cores compute the product of the next tile, a consumer adds its tile of W to the
last product and squares the sums (`stationary_tile`). fp32 adapters are cut into bf16 pieces, with
the error bound of `one_pass_norm`.

Bytes: W (or q and σ) once; A once for every 128 columns, from the level-2 cache. FLOPs:
2 · in · r · out for each product of pieces, which set the floor at ranks over 200.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits, ring
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.norm import one_pass_norm, stationary_tile
from jax_dora.ops.mosaic.norm.stationary_tile import COLUMNS
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config, Tiling, Walk
from jax_dora.ops.quantised import Format, bits, repeated

CONSUMERS = 2
# A slice of B takes 16 registers of a thread; six leave room for two products.
MOST_SLICES = 6
MOST_SLOTS = 4
HALVES = (jnp.bfloat16, jnp.float16)


def refuses(
    in_features: int,
    rank: int,
    out: int,
    stored: Format | jax.typing.DTypeLike,
    adapter_dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why the kernel cannot take W [in, out], stored in a format or a dtype, with an
    adapter of `rank`, or None if it can."""
    if jnp.dtype(adapter_dtype) not in (*HALVES, jnp.float32):
        return (
            f"the adapter has dtype {jnp.dtype(adapter_dtype)}, none of bfloat16, float16, float32"
        )
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    if isinstance(stored, Format):
        if stored.has_zero_point:
            return f"the kernel's format is {stored} with zero points"
        if stored.tile[0] % TILE_ROWS:
            return f"the kernel's format is {stored}; a tile needs a multiple of {TILE_ROWS} rows"
    elif jnp.dtype(stored) not in HALVES:
        return f"the kernel has dtype {jnp.dtype(stored)}, neither bfloat16 nor float16"
    for name, size, unit in (
        ("in", in_features, 2 * TILE_ROWS),
        ("out", out, CONSUMERS * COLUMNS),
    ):
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}"
    if slices_of(rank, adapter_dtype) > MOST_SLICES:
        return f"B of rank {rank} and dtype {jnp.dtype(adapter_dtype)} does not fit into registers"
    return None


def wins(
    in_features: int, rank: int, out: int, stored: Any, adapter_dtype: jax.typing.DTypeLike
) -> bool:
    """Returns whether the kernel was faster than `one_pass_norm` or `quantised_norm` on an H200, or
    slower by 2 % at most (FP8 at rank 64), by `norm_kernels.jsonl`.

    With 4-bit codes it is slower at low ranks, because it looks every pair of codes up by itself.
    With few input features it is slower if B is large, because loading B takes too much of a run.
    """
    slices = slices_of(rank, adapter_dtype)
    width = _width(stored)
    if slices <= 4:
        return width > 4 and one_pass_norm.wins(in_features, rank, out, stored, adapter_dtype)
    return in_features >= 1024 and out >= 512


def config(
    in_features: int, rank: int, out: int, stored: Any, adapter_dtype: jax.typing.DTypeLike
) -> Config:
    """Returns the launch options for a call that `refuses` accepts."""
    slices = slices_of(rank, adapter_dtype)
    width = _width(stored)
    stages = {6: 4, 5: 4, 4: 5}.get(slices, 6)
    room = limits.SHARED_MEMORY - limits.RESERVED - stages * slices * TILE_ROWS * limits.TILE_K * 2
    if width == 4:
        room -= stationary_tile.TABLE_BYTES
    slots = room // (TILE_ROWS * CONSUMERS * COLUMNS * width // 8)
    return Config(
        tile_cols=CONSUMERS * COLUMNS,
        stages=stages,
        slots=min(slots, MOST_SLOTS),
        consumers=CONSUMERS,
    )


def _width(stored: Any) -> int:
    """Returns the bits of a number or code of the kernel."""
    return bits(stored.stored if isinstance(stored, Format) else stored)


def slices_of(rank: int, adapter_dtype: jax.typing.DTypeLike) -> int:
    """Returns the number of slices of `limits.TILE_K` that all pieces of an adapter need."""
    return one_pass_norm.pieces(jnp.bfloat16, adapter_dtype) * limits.slices(rank)


@launcher()
def launch(w: jax.Array, *operands: jax.Array, config: Config, sm_count: int) -> jax.Array:
    """Returns the square of the norm, f32[out].

    Args:
      w: numbers or codes, [in, out].
      *operands: for codes the scales [in / t, out / u]; then lora_a [in, r], lora_b [r, out] and
        scale f32[].
      config, sm_count: the launch options.
    """
    (squared,) = squares(w, *operands, config=config, sm_count=sm_count)
    return squared


def squares(
    w: jax.Array,
    *operands: jax.Array,
    config: Config,
    sm_count: int,
    want_codes: bool = False,
    kernel_name: str = "dora_stationary_norm",
) -> tuple[jax.Array, ...]:
    """Returns (the result of `launch`,), or with `want_codes`, for 8-bit codes, (the result, the
    codes [out, in])."""
    *scales, lora_a, lora_b, scale = operands
    (in_features, out), c = w.shape, config
    consumers, rank = c.consumers, lora_a.shape[1]
    # A run is of whole pairs of tiles.
    tiling = Tiling(in_features // 2, out, c, sm_count)
    lora_a, lora_b, products = one_pass_norm.cut_adapter(
        lora_a, lora_b, one_pass_norm.pieces(jnp.bfloat16, lora_a.dtype)
    )
    slices = len(products)
    if want_codes:
        lora_a = stationary_tile.in_order_of_codes(lora_a)
    # The last slice of each piece may have few columns that are not zero.
    steps = stationary_tile.steps(rank)
    scales = [repeated(one, 1, out) for one in scales]
    tiles_per_scale = 2 * tiling.row_tiles // len(scales[0]) if scales else 1
    # Scales of whole columns are the same for all tiles.
    has_one_scale = bool(scales) and len(scales[0]) == 1
    tables = [jnp.asarray(stationary_tile.table(w.dtype))] if bits(w.dtype) == 4 else []
    # A row of a copied tile takes at most 128 bytes.
    part_cols = min(c.tile_cols, 8 * 128 // bits(w.dtype))
    parts = c.tile_cols // part_cols

    def kernel(a_gmem, b_gmem, w_gmem, s_gmem, *rest, buffers):
        codes_gmem = rest[-1] if want_codes else None
        *rest, out_gmem = rest[: len(rest) - want_codes]
        tables_gmem, scales_gmem = rest[: len(tables)], rest[len(tables) :]
        walk = Walk(tiling, lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        def fetch_low_rank():
            """Fills the ring of low-rank operands, as one warp: for each run, one stage of B for
            each consumer, and then one stage of A for each tile."""

            def fetch(number, at_slice):
                stage = lax.rem(number, c.stages)
                plgpu.barrier_wait(buffers["low_rank_free"].at[stage])

                def fetch_slice(k, _):
                    plgpu.copy_gmem_to_smem(
                        at_slice(pl.ds(k * limits.TILE_K, limits.TILE_K)),
                        buffers["low_rank"].at[stage, k],
                        buffers["low_rank_ready"].at[stage],
                    )

                lax.fori_loop(0, slices, fetch_slice, None)

            def fetch_run(index, number):
                cols, _, first, pairs = walk.run(index)

                def fetch_columns(consumer, _):
                    own = _columns(cols, consumer)
                    fetch(number + consumer, lambda k: b_gmem.at[k, own])

                def fetch_tile(tile, _):
                    rows = walk.rows(2 * first + tile)
                    fetch(number + consumers + tile, lambda k: a_gmem.at[rows, k])

                lax.fori_loop(0, consumers, fetch_columns, None)
                lax.fori_loop(0, 2 * pairs, fetch_tile, None)
                return number + consumers + 2 * pairs

            lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
            ring.drain(buffers["low_rank_free"])

        def fetch_kernel():
            """Fills the ring of tiles of W, as one warp."""
            for table in tables_gmem:
                plgpu.copy_gmem_to_smem(table, buffers["table"], buffers["table_ready"])

            def fetch_run(index, number):
                cols, _, first, pairs = walk.run(index)

                def fetch_tile(tile, _):
                    slot = lax.rem(number + tile, c.slots)
                    plgpu.barrier_wait(buffers["w_free"].at[slot])
                    for part in range(parts):
                        part_of_cols = pl.ds(cols.start + part * part_cols, part_cols)
                        plgpu.copy_gmem_to_smem(
                            w_gmem.at[walk.rows(2 * first + tile), part_of_cols],
                            buffers["w"].at[slot, part],
                            buffers["w_ready"].at[slot],
                        )

                lax.fori_loop(0, 2 * pairs, fetch_tile, None)
                return number + 2 * pairs

            lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
            for slot in range(c.slots):
                plgpu.barrier_wait(buffers["w_free"].at[slot])

        def consume(consumer):
            """Sums the squares of a consumer's 64 columns of every run, as one warpgroup."""
            s = s_gmem[0]
            if tables:
                plgpu.barrier_wait(buffers["table_ready"])

            def consume_run(index, numbers):
                number, tile_number = numbers
                cols, split, first, pairs = walk.run(index)
                own = _columns(cols, consumer)

                stages = [lax.rem(number + other, c.stages) for other in range(consumers)]
                for stage in stages:
                    plgpu.barrier_wait(buffers["low_rank_ready"].at[stage])
                own_stage = lax.rem(number + consumer, c.stages)
                b = stationary_tile.load_columns(buffers["low_rank"].at[own_stage])
                # This fence keeps TMA from overwriting B before these ordinary reads.
                plgpu.commit_smem()
                for stage in stages:
                    plgpu.barrier_arrive(buffers["low_rank_free"].at[stage])
                number = number + consumers

                def start_product(tile):
                    stage = lax.rem(number + tile, c.stages)
                    plgpu.barrier_wait(buffers["low_rank_ready"].at[stage])
                    a_smem = buffers["low_rank"].at[stage]
                    return stationary_tile.start_product(b, a_smem, products, steps)

                def finish_product(product, tile):
                    product = stationary_tile.wait(product)
                    stage = lax.rem(number + tile, c.stages)
                    plgpu.barrier_arrive(buffers["low_rank_free"].at[stage])
                    return product

                def scales_at(at):
                    return [stationary_tile.load_scales(one.at[at, own]) for one in scales_gmem]

                of_columns = scales_at(0) if has_one_scale else None

                def load_scales(tile):
                    if of_columns is not None:
                        return of_columns
                    return scales_at(lax.div(2 * first + tile, tiles_per_scale))

                def add_squares(sums, product, factors, tile):
                    slot = lax.rem(tile_number + tile, c.slots)
                    plgpu.barrier_wait(buffers["w_ready"].at[slot])
                    w_smem = buffers["w"].at[slot, lax.div(consumer, consumers // parts)]
                    turned_gmem = None
                    if codes_gmem is not None:
                        turned_gmem = codes_gmem.at[own, walk.rows(2 * first + tile)]
                    sums = stationary_tile.add_squares(
                        sums,
                        product,
                        w_smem,
                        s,
                        factors,
                        buffers.get("table"),
                        lax.rem(consumer, consumers // parts),
                        turned_gmem,
                    )
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(buffers["w_free"].at[slot])
                    return sums

                def consume_pair(tile, carry, start_next):
                    """Adds the squares of two tiles. The product of the first one is under way.

                    Two tiles, because the registers of a product under way must not be moved, as
                    they would be at the end of an iteration with one tile.
                    """
                    product, sums = carry
                    factors = load_scales(tile)
                    product = finish_product(product, tile)
                    second = start_product(tile + 1)
                    sums = add_squares(sums, product, factors, tile)
                    factors = load_scales(tile + 1)
                    second = finish_product(second, tile + 1)
                    following = start_next()
                    return following, add_squares(sums, second, factors, tile + 1)

                def consume_pairs(pair, carry):
                    tile = 2 * pair
                    return consume_pair(tile, carry, lambda: start_product(tile + 2))

                carry = start_product(jnp.int32(0)), stationary_tile.zeros()
                carry = lax.fori_loop(0, pairs - 1, consume_pairs, carry)
                _, sums = consume_pair(2 * (pairs - 1), carry, lambda: None)
                stationary_tile.store(sums, out_gmem.at[split, own])
                return number + 2 * pairs, tile_number + 2 * pairs

            lax.fori_loop(0, walk.runs, consume_run, (jnp.int32(0), jnp.int32(0)))

        @pl.when(warpgroup == consumers)
        def _fetch_all():
            plgpu.set_max_registers(limits.FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                pl.when(warp == 0)(fetch_low_rank)
                pl.when(warp == 1)(fetch_kernel)

        @pl.when(warpgroup < consumers)
        def _consume_all():
            plgpu.set_max_registers(limits.consume_registers(consumers), action="increase")
            ring.release(buffers["low_rank_free"])
            for slot in range(c.slots):
                plgpu.barrier_arrive(buffers["w_free"].at[slot])
            consume(warpgroup)

    buffers = {
        "low_rank": stationary_tile.tiles((c.stages, slices, TILE_ROWS, COLUMNS), lora_a.dtype),
        "low_rank_ready": plgpu.Barrier(num_arrivals=slices, num_barriers=c.stages),
        "low_rank_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=c.stages),
        "w": stationary_tile.tiles((c.slots, parts, TILE_ROWS, part_cols), w.dtype),
        "w_ready": plgpu.Barrier(num_arrivals=parts, num_barriers=c.slots),
        "w_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=c.slots),
    }
    for table in tables:
        buffers["table"] = plgpu.SMEM(table.shape, table.dtype)
        buffers["table_ready"] = plgpu.Barrier()
    results = [jax.ShapeDtypeStruct((tiling.splits, out), jnp.float32)]
    if want_codes:
        results.append(jax.ShapeDtypeStruct((out, in_features), w.dtype))
    partials, *codes = plgpu.kernel(
        kernel,
        out_type=results,
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types={"buffers": buffers},
        compiler_params=limits.STATED_LAYOUTS,
        kernel_name=kernel_name,
    )(lora_a, lora_b, w, jnp.reshape(scale, 1).astype(jnp.float32), *tables, *scales)
    return jnp.sum(partials, axis=0), *codes


def _columns(cols: Any, consumer: Any) -> Any:
    """Returns the columns of a consumer in a strip."""
    return pl.ds(cols.start + consumer * COLUMNS, COLUMNS)
