"""The end of a projection of few rows: y = g∘(σ∘Σ parts + s·(Σ z) B) + bias.

    parts  [splits, rows, out]  f32 or y's dtype     z  [splits, rows, ≥ r]  f32 or y's dtype
    B  [r, out]  y's dtype      y  [rows, out]  bf16 or fp16
    σ  [out] or None    g  f32[out] or None    s  f32[]    bias  [out] or None

A thread block has a strip of 64 columns of at most 64 rows; all that it reads is on its way at
once. `parts` is the base's result, or what `few_rows_sums` has summed up.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import few_rows_layout, few_rows_tile
from jax_dora.ops.mosaic.few_rows_tile import ROWS
from jax_dora.ops.mosaic.hopper import pad, padded_rank
from jax_dora.ops.mosaic.launch import launcher

TILE_ROWS = 64
COLS = 64
# Ranks of a tile of B.
DEPTH = 64
# Columns of z in shared memory: rows of another 16 bytes begin in other banks.
PITCH = DEPTH + 8
MOST_ROWS = 256
MOST_RANK = 128


def refuses(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [rows, out], z [rows, rank] and B of `dtype` are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"base has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if rows > TILE_ROWS and rows % ROWS:
        return f"{rows} rows are more than {TILE_ROWS} and no multiple of {ROWS}"
    if not 1 <= rank <= MOST_RANK:
        return f"the adapter's rank is {rank}, not 1 to {MOST_RANK}"
    if out == 0 or out % COLS:
        return f"out = {out} is not a multiple of {COLS}"
    return None


def wins(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is no slower than XLA's expansion and its pass for g
    (`benchmarks sizes`)."""
    return rows >= ROWS and out >= 1024


def config(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> None:
    """Returns no knobs: there are none."""


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
    parts, z = (one.reshape(1, rows, -1) for one in (base, z))
    return finished([(parts, z)], lora_b, None, g, scale, bias, base.dtype).reshape(base.shape)


def finished(
    passes: Sequence[tuple[jax.Array, jax.Array]],
    lora_b: jax.Array,
    sigma: jax.Array | None,
    g: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """Returns y [rows, out].

    Args:
      passes: parts and z of some rows each; of several, all have as many, at most `TILE_ROWS`.
    """
    (splits, some, out), z_splits, rank = passes[0][0].shape, passes[0][1].shape[0], len(lora_b)
    slices, alone = pl.cdiv(rank, DEPTH), len(passes) == 1
    tiles = pl.cdiv(some, TILE_ROWS) if alone else len(passes)
    # Rows of a copy, and of whole instructions.
    copied = min(some, TILE_ROWS)
    held = pl.cdiv(copied, ROWS) * ROWS
    lora_b = pad(lora_b, padded_rank(rank), out)
    parts = [one for one, _ in passes]
    zs = [pad(z, *z.shape[:2], max(padded_rank(rank), z.shape[2])) for _, z in passes]
    vectors = {"sigma": sigma, "g": g, "bias": bias}
    given = {name: one for name, one in vectors.items() if one is not None}
    layout = few_rows_layout.layout(dtype)

    def kernel(b_gmem, scale_gmem, *rest, smem, ready):
        *rest, y_gmem = rest
        parts_gmem, zs_gmem = rest[: len(passes)], rest[len(passes) : 2 * len(passes)]
        vectors_gmem = rest[2 * len(passes) :]
        strip, tile = lax.axis_index("strip"), lax.axis_index("tile")
        cols = pl.ds(strip * COLS, COLS)
        # Starts that vary: past the end the copy engine reads zeros, and writes nothing.
        to_rows = pl.ds(tile * copied, copied)
        for slice_ in range(slices):
            ranks = pl.ds(tile * 0 + slice_ * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(b_gmem.at[ranks, cols], smem["b"].at[slice_], ready)

        def fetch(one_gmem, z_gmem, at):
            for split in range(splits):
                to = smem["parts"].at[split, pl.ds(0, copied)]
                plgpu.copy_gmem_to_smem(one_gmem.at[split, at, cols], to, ready)
            for slice_, split in itertools.product(range(slices), range(z_splits)):
                ranks = pl.ds(tile * 0 + slice_ * DEPTH, DEPTH)
                to = smem["z"].at[slice_ * z_splits + split, pl.ds(0, copied)]
                plgpu.copy_gmem_to_smem(z_gmem.at[split, at, ranks], to, ready)

        for number, pair in enumerate(zip(parts_gmem, zs_gmem, strict=True)):
            if alone:
                fetch(*pair, to_rows)
            else:
                pl.when(tile == number)(functools.partial(fetch, *pair, pl.ds(tile * 0, copied)))
        loaded = {}
        for name, one in zip(given, vectors_gmem, strict=True):
            vector = plgpu.load(one.at[cols], layout=layout.reduce(0), optimized=False)
            vector = vector.astype(jnp.float32)
            loaded[name] = lax.broadcast_in_dim(vector, (held, COLS), (1,))
        s = scale_gmem[0]
        plgpu.barrier_wait(ready)

        def summed(name, first, count):
            total = None
            for one in range(first, first + count):
                some = plgpu.load(smem[name].at[one], layout=layout, optimized=False)
                some = some.astype(jnp.float32)
                total = some if total is None else total + some
            assert total is not None
            return total

        for slice_ in range(slices):
            total = summed("z", slice_ * z_splits, z_splits)
            # Beyond the rank there is anything.
            column = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=layout)
            total = jnp.where(column < rank - slice_ * DEPTH, total * s, 0.0).astype(dtype)
            few_rows_layout.store(total, smem["z_half"].at[slice_, :, pl.ds(0, DEPTH)], dtype)
        plgpu.commit_smem()
        y = summed("parts", 0, splits)
        if sigma is not None:
            y = y * loaded["sigma"]
        for slice_ in range(slices):
            y = few_rows_tile.multiplied(y, smem["z_half"].at[slice_], smem["b"].at[slice_], None)
        if g is not None:
            y = y * loaded["g"]
        if bias is not None:
            y = y + loaded["bias"]
        few_rows_layout.store(y.astype(dtype), smem["y"], dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["y"].at[pl.ds(0, copied)], y_gmem.at[to_rows, cols])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((some * len(passes), out), dtype),
        grid=(out // COLS, tiles),
        grid_names=("strip", "tile"),
        scratch_types={
            "smem": {
                "parts": plgpu.SMEM((splits, held, COLS), parts[0].dtype),
                "z": plgpu.SMEM((slices * z_splits, held, DEPTH), zs[0].dtype),
                "z_half": plgpu.SMEM((slices, held, PITCH), dtype),
                "b": few_rows_tile.swizzled((slices, DEPTH, COLS), dtype),
                "y": plgpu.SMEM((held, COLS), dtype),
            },
            "ready": plgpu.Barrier(num_arrivals=splits + slices * (z_splits + 1)),
        },
        kernel_name="dora_few_rows_finish",
    )(lora_b, scale.astype(jnp.float32).reshape(1), *parts, *zs, *given.values())
