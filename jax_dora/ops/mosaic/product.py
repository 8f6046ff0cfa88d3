"""A matrix product in two parts, one accumulator: the frame of project and project_back.

    result = g∘(left₁ right₁ + left₂ right₂) [+ bias]

All of bf16 or all of fp16, the result likewise. The loop over the contracted axis runs through the
first pair of operands, then through the second, into one fp32 accumulator; nothing is rounded
before the last step.

FLOPs: 2 · rows · (k₁ + k₂) · cols set the floor; bytes: each operand and result once, 2 bytes each.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, TILE_K, consume_registers

CONSUMERS = 2
# What a consumer stores at a time: one instruction's rows, one swizzled row of 16-bit numbers.
CHUNK_ROWS, CHUNK_COLS = 64, 64
CHUNK_SLOTS = 2
# Of one m64 instruction, and fp32 numbers that a consumer's 128 threads keep in 128 registers each.
MAX_INSTRUCTION_COLS = 256
MAX_ACCUMULATORS = 128 * 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_rows, tile_cols: of the result, for a thread block. 128 × 256 fills the registers of two
        consumers with accumulators, and asks the least of shared memory and of the level-2 cache
        for each product.
      split_rows: the two consumers divide the tile's rows, or else its columns. By rows, a consumer
        issues the widest instruction, which reads the least from shared memory.
      stages: slices of the operands in flight.
      band: tiles that are worked on at one time form a band this many tiles wide, so that what they
        read is in the level-2 cache.
      band_in_cols: bands are of columns, or else of rows.
    """

    tile_rows: int = 128
    tile_cols: int = 256
    split_rows: bool = True
    stages: int = 4
    band: int = 8
    band_in_cols: bool = False

    @property
    def consumer_tile(self) -> tuple[int, int]:
        if self.split_rows:
            return self.tile_rows // CONSUMERS, self.tile_cols
        return self.tile_rows, self.tile_cols // CONSUMERS


def has_room(config: Config) -> bool:
    """Returns whether shared memory and the tensor cores' instructions have room for a launch."""
    rows, cols = config.consumer_tile
    slices = config.stages * (config.tile_rows + config.tile_cols) * TILE_K * 2
    chunks = CONSUMERS * CHUNK_SLOTS * CHUNK_ROWS * CHUNK_COLS * 2
    return (
        rows % CHUNK_ROWS == 0
        and cols % CHUNK_COLS == 0
        and cols <= MAX_INSTRUCTION_COLS
        and rows * cols <= MAX_ACCUMULATORS
        and slices + chunks + hopper.RESERVED <= hopper.SHARED_MEMORY
    )


def refuses(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in], W [in, out] and an adapter of `dtype` are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x and the kernel have dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if rows == 0:
        return "there are no rows"
    for name, size in (("in", in_features), ("out", out)):
        if size % TILE_K:
            return f"{name} = {size} is not a multiple of {TILE_K}"
        if size == 0:
            return f"{name} is 0"
    return None


def wins(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`)."""
    return rows >= 1024 and in_features >= 4096 and out >= 1024 and rows * out >= 2**22


def config(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs (H200, 9446849, `benchmarks tune`)."""
    if rows >= 1024 and in_features >= 2048 and 1449 <= out <= 2896 and rows * out >= 2**21:
        return Config(tile_rows=128, tile_cols=128, stages=6)
    return Config()


def two_part_product(
    lefts: tuple[jax.Array, jax.Array],
    rights: tuple[jax.Array, jax.Array],
    vectors: list[jax.Array],
    *,
    outputs: int = 1,
    transposed: bool = False,
    config: Config,
    sm_count: int,
) -> list[jax.Array]:
    """Returns g∘(Σ left @ right) + bias, and the bare sum if there are two outputs.

    Args:
      lefts: [rows, k] each.
      rights: [k, cols] each, or [cols, k] if transposed.
      vectors: g and bias, f32[cols]; none for the bare sum, or g alone.
    """
    c, dtype = config, lefts[0].dtype
    rows = lefts[0].shape[0]
    cols = rights[0].shape[0 if transposed else 1]
    if cols == CHUNK_COLS:
        # The copy engine drops an axis of one chunk, and with it the end of the columns: a chunk
        # that lies past it would be written into other rows.
        c = dataclasses.replace(c, tile_cols=CHUNK_COLS, split_rows=True)
    padded_rows = pl.cdiv(rows, hopper.ROW_ALIGNMENT) * hopper.ROW_ALIGNMENT
    steps = [pl.cdiv(left.shape[1], TILE_K) for left in lefts]
    row_tiles, col_tiles = pl.cdiv(rows, c.tile_rows), pl.cdiv(cols, c.tile_cols)
    tiles = row_tiles * col_tiles
    blocks = min(sm_count, tiles)
    consumer_rows, consumer_cols = c.consumer_tile
    arguments = [hopper.pad(left, padded_rows, left.shape[1]) for left in lefts] + [*rights]
    if vectors:
        stacked = jnp.stack([v.astype(jnp.float32) for v in vectors])
        arguments.append(hopper.pad(stacked, len(vectors), col_tiles * c.tile_cols))
        features = {
            "smem": plgpu.SMEM((len(vectors), c.tile_cols), jnp.float32),
            "ready": plgpu.Barrier(),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS),
        }
    else:
        features = {}

    def body(*refs, left_smem, right_smem, ready, free, chunk_smem, features):
        lefts_gmem, rights_gmem, out_gmem = refs[:2], refs[2:4], refs[len(refs) - outputs :]
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

            def fetch_tile(index, _):
                row, col = corner(index)
                at_rows, at_cols = pl.ds(row, c.tile_rows), pl.ds(col, c.tile_cols)
                before = index * sum(steps)
                for left_gmem, right_gmem, count in zip(
                    lefts_gmem, rights_gmem, steps, strict=True
                ):

                    def fetch_slice(
                        k, _, left_gmem=left_gmem, right_gmem=right_gmem, before=before
                    ):
                        slot = lax.rem(before + k, c.stages)
                        at_k = pl.ds(k * TILE_K, TILE_K)
                        plgpu.barrier_wait(free.at[slot])
                        plgpu.copy_gmem_to_smem(
                            left_gmem.at[at_rows, at_k], left_smem.at[slot], ready.at[slot]
                        )
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
                        refs[4].at[:, at_cols], features["smem"], features["ready"]
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

    right_tile = (c.tile_cols, TILE_K) if transposed else (TILE_K, c.tile_cols)
    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((padded_rows, cols), dtype)] * outputs,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "left_smem": hopper.tiled((c.stages, c.tile_rows, TILE_K), dtype),
            "right_smem": hopper.tiled((c.stages, *right_tile), dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            "chunk_smem": hopper.tiled((CONSUMERS * CHUNK_SLOTS, CHUNK_ROWS, CHUNK_COLS), dtype),
            "features": features,
        },
        kernel_name="dora_project_back" if transposed else "dora_project",
    )(*arguments)
    # Where a scan both stacks a result and reads it, XLA would launch the kernel twice.
    return [lax.optimization_barrier(result[:rows]) for result in results]
