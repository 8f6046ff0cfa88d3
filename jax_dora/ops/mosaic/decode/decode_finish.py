"""The second kernel of a projection of few rows: y = g∘(σ∘Σ parts + s·(Σ z) B) + bias.

    parts  [splits, rows, out]  f32 or y's dtype     z  [splits, rows, ≥ r]  f32 or y's dtype
    B  [r, out]  y's dtype      y  [rows, out]  bf16 or fp16
    σ  [out] or None    g  f32[out] or None    s  f32[]    bias  [out] or None

The sums Σ are over splits. `parts` and `z` are the partial sums of `decode_sums`; or, with a
single split, base and z that XLA computed.

A thread block computes 64 columns of at most 64 rows. It starts all its copies to shared memory at
once.

Bytes: parts, z and B once, y once; the floor is bytes / copy rate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.decode import decode_layout, decode_tile
from jax_dora.ops.mosaic.decode.decode_tile import ROWS
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import pad, padded_rank

TILE_ROWS = 64
COLS = 64
# The rank of a tile of B.
DEPTH = 64
# The row pitch of z in shared memory: 16 extra bytes, so that rows begin in different banks.
PITCH = DEPTH + 8
MOST_ROWS = 256
MOST_RANK = 128


def refuses(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [rows, out], z [rows, rank] and B of `dtype` are not supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"base has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if rows > TILE_ROWS and rows % ROWS:
        return f"{rows} rows are more than {TILE_ROWS} and not a multiple of {ROWS}"
    if not 1 <= rank <= MOST_RANK:
        return f"the adapter's rank is {rank}, not 1 to {MOST_RANK}"
    if out == 0 or out % COLS:
        return f"out = {out} is not a multiple of {COLS}"
    return None


def wins(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is no slower than XLA's product z B and its pass for g
    (`benchmarks sizes`)."""
    return rows >= ROWS and out >= 1024


def config(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> None:
    """Returns None: the kernel has no tuning parameters."""


@launcher()
def launch(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    g: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: None,
    sm_count: int,
) -> jax.Array:
    """Returns g∘(base + s·z B) + bias [..., out] for base [..., out] and z [..., r]."""
    rows = base.size // base.shape[-1]
    parts, z = (array.reshape(1, rows, -1) for array in (base, z))
    return finish(parts, z, lora_b, None, g, scale, bias, base.dtype).reshape(base.shape)


def finish(
    parts: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    sigma: jax.Array | None,
    g: jax.Array | None,
    scale: jax.Array | float,
    bias: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """Returns y [rows, out].

    Args:
      parts, z: the partial sums of x W and x A.
      lora_b, sigma, g, scale, bias: B, σ, g, s and bias.
      dtype: y's dtype.
    """
    (splits, rows, out), (z_splits, _, z_columns) = parts.shape, z.shape
    rank = len(lora_b)
    slices = pl.cdiv(rank, DEPTH)
    # The rows of a copy, and the rows of whole instructions.
    copied = min(rows, TILE_ROWS)
    padded = pl.cdiv(copied, ROWS) * ROWS
    lora_b = pad(lora_b, padded_rank(rank), out)
    z = pad(z, z_splits, rows, max(padded_rank(rank), z_columns))
    vectors = {"sigma": sigma, "g": g, "bias": bias}
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    layout = decode_layout.layout(COLS)

    def kernel(scale_gmem, parts_gmem, b_gmem, z_gmem, *rest, smem, ready):
        # [out] of each vector, [rows, out].
        *vectors_gmem, y_gmem = rest
        strip, tile = lax.axis_index("strip"), lax.axis_index("tile")
        cols = pl.ds(strip * COLS, COLS)
        # The starts are traced (`tile * 0`), because a static slice must not exceed the array. Past
        # the array's end TMA reads zeros and writes nothing.
        at_rows = pl.ds(tile * copied, copied)
        for slice_ in range(slices):
            ranks = pl.ds(tile * 0 + slice_ * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(b_gmem.at[ranks, cols], smem["b"].at[slice_], ready)
            for split in range(z_splits):
                to_smem = smem["z"].at[slice_ * z_splits + split, pl.ds(0, copied)]
                plgpu.copy_gmem_to_smem(z_gmem.at[split, at_rows, ranks], to_smem, ready)
        for split in range(splits):
            to_smem = smem["parts"].at[split, pl.ds(0, copied)]
            plgpu.copy_gmem_to_smem(parts_gmem.at[split, at_rows, cols], to_smem, ready)
        loaded = {}
        for name, vector_gmem in zip(vectors, vectors_gmem, strict=True):
            vector = plgpu.load(vector_gmem.at[cols], layout=layout.reduce(0), optimized=False)
            vector = vector.astype(jnp.float32)
            loaded[name] = lax.broadcast_in_dim(vector, (padded, COLS), (1,))
        s = scale_gmem[0]
        plgpu.barrier_wait(ready)

        def sum_of(name, first, count):
            """Returns the sum of `count` tiles of smem[name] from `first` on, in registers."""
            total = None
            for index in range(first, first + count):
                term = plgpu.load(smem[name].at[index], layout=layout, optimized=False)
                term = term.astype(jnp.float32)
                total = term if total is None else total + term
            assert total is not None
            return total

        for slice_ in range(slices):
            total = sum_of("z", slice_ * z_splits, z_splits)
            # Columns of z beyond the rank have arbitrary values.
            column = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=layout)
            total = jnp.where(column < rank - slice_ * DEPTH, total * s, 0.0).astype(dtype)
            decode_layout.store(total, smem["z_half"].at[slice_, :, pl.ds(0, DEPTH)])
        plgpu.commit_smem()
        y = sum_of("parts", 0, splits)
        if sigma is not None:
            y = y * loaded["sigma"]
        for slice_ in range(slices):
            y = decode_tile.accumulate(y, smem["z_half"].at[slice_], smem["b"].at[slice_], None)
        if g is not None:
            y = y * loaded["g"]
        if bias is not None:
            y = y + loaded["bias"]
        decode_layout.store(y.astype(dtype), smem["y"])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["y"].at[pl.ds(0, copied)], y_gmem.at[at_rows, cols])
        plgpu.wait_smem_to_gmem(0)

    buffers = {
        "parts": plgpu.SMEM((splits, padded, COLS), parts.dtype),
        "y": plgpu.SMEM((padded, COLS), dtype),
        "z": plgpu.SMEM((slices * z_splits, padded, DEPTH), z.dtype),
        "z_half": plgpu.SMEM((slices, padded, PITCH), dtype),
        "b": decode_tile.swizzled((slices, DEPTH, COLS), dtype),
    }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, out), dtype),
        grid=(out // COLS, pl.cdiv(rows, TILE_ROWS)),
        grid_names=("strip", "tile"),
        scratch_types={
            "smem": buffers,
            "ready": plgpu.Barrier(num_arrivals=splits + slices * (z_splits + 1)),
        },
        kernel_name="dora_decode_finish",
    )(jnp.asarray(scale, jnp.float32).reshape(1), parts, lora_b, z, *vectors.values())
