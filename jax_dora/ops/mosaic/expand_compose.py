"""Expand and compose in one pass: y = base + ((g-1)∘base + g∘(s·(z B))) [+ bias].

    base  [rows, out]  bf16 or fp16     z  [rows, r]  base's dtype      B  [r, out]  base's dtype
    g     f32[out]                      s  f32[]                        bias  [out] (optional)
    y     [rows, out]  base's dtype     inner = base + s·(z B)  [rows, out]  (optional)

Tiles of z B stay in registers, in fp32, and y is rounded once. The dtypes' products are exact in
fp32.

Bytes: 2 · rows · out · 2 (3 with inner) through device memory, plus z and B once; the floor is
bytes / copy rate. FLOPs: 2 · rows · r · out, which takes as long at a rank near 400.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops import mesh
from jax_dora.ops.mosaic import strips
from jax_dora.ops.mosaic.strips import StripConfig
from jax_dora.ops.mosaic.sweep import Task, sweep_kernel

# Columns that the epilogue holds at once: a swizzled row of 16-bit numbers.
CHUNK = 64

# Best first; a rank takes the first that shared memory has room for. Slices of z count most: with
# fewer than four in flight a consumer waits for them. A second slot gains little.
CONFIGS = (
    StripConfig(tile_cols=128, stages=4, slots=2),
    StripConfig(tile_cols=128, stages=4, slots=1),
    StripConfig(tile_cols=128, stages=3, slots=1),
    StripConfig(tile_cols=64, stages=4, slots=2),
    StripConfig(tile_cols=64, stages=4, slots=1),
    StripConfig(tile_cols=64, stages=2, slots=1),
)


def heuristic(rank: int, want_inner: bool) -> StripConfig | None:
    """The config for a rank, or None where its strip of B does not fit."""
    return next((config for config in CONFIGS if fits(config, rank, want_inner)), None)


def fits(config: StripConfig, rank: int, want_inner: bool) -> bool:
    """Whether shared memory has room for a launch of `config`."""
    return strips.fits(config, strips.slices(rank), 2, extra_tiles=1 if want_inner else 0)


def refuses(
    rows: int,
    rank: int,
    out: int,
    dtype: jax.typing.DTypeLike,
    adapter_dtype: jax.typing.DTypeLike,
    *,
    want_inner: bool = True,
) -> str | None:
    """Why the kernel cannot take base [rows, out] and z, B of those dtypes, or None."""
    dtype, adapter_dtype = jnp.dtype(dtype), jnp.dtype(adapter_dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"base has dtype {dtype}, neither bfloat16 nor float16"
    if adapter_dtype != dtype:
        return f"z and B have dtype {adapter_dtype}, base has {dtype}"
    if rows == 0 or rank == 0:
        return f"there are no {'ranks' if rows else 'rows'}"
    if out == 0 or out % strips.ALIGNMENT:
        return f"out = {out} is not a multiple of {strips.ALIGNMENT} (rows of 16 bytes)"
    if heuristic(rank, want_inner) is None:
        return f"a strip of B of rank {rank} does not fit into shared memory"
    return None


@mesh.jit("want_inner", "sm_count", "config")
def expand_compose(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    want_inner: bool,
    sm_count: int,
    config: StripConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, inner or None) for base [..., out] and z [..., r]."""
    shape, dtype = base.shape, base.dtype
    out, rank = shape[-1], z.shape[-1]
    base, z = base.reshape(-1, out), z.reshape(-1, rank)
    rows = base.shape[0]
    config = config or heuristic(rank, want_inner)
    if config is None:
        raise NotImplementedError(
            f"rank = {rank} is too large for shared memory: ask `refuses` first"
        )
    padded_rows = pl.cdiv(rows, strips.ROW_ALIGNMENT) * strips.ROW_ALIGNMENT
    padded_rank = strips.padded_rank(rank)
    sweep = strips.Sweep(padded_rows, out, config, sm_count)
    base = strips.pad(base, padded_rows, out)
    z = strips.pad(z, padded_rows, padded_rank)
    lora_b = strips.pad(lora_b, padded_rank, sweep.padded_out)
    vectors = [g] if bias is None else [g, bias]

    def epilogue(carry, tile, out_gmem, inner_smem=None):
        shape = (strips.TILE_ROWS, CHUNK)
        consumer = lax.axis_index("warpgroup")
        for start in range(0, config.tile_cols, CHUNK):
            chunk = pl.ds(start, CHUNK)
            g = lax.broadcast_in_dim(tile.vectors_smem[0, chunk], shape, (1,))
            base = tile.smem[:, chunk].astype(jnp.float32)
            scaled = tile.scale * tile.acc[:, start : start + CHUNK]
            y = base + ((g - 1.0) * base + g * scaled)
            if bias is not None:
                y = y + lax.broadcast_in_dim(tile.vectors_smem[1, chunk], shape, (1,))
            tile.smem[:, chunk] = y.astype(dtype)
            if inner_smem is not None:
                inner_smem[consumer, :, chunk] = (base + scaled).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.smem, out_gmem[0].at[tile.rows, tile.cols])
        if inner_smem is not None:
            plgpu.copy_smem_to_gmem(inner_smem.at[consumer], out_gmem[1].at[tile.rows, tile.cols])
        return carry

    inner_smem = strips.tiled((config.consumers, strips.TILE_ROWS, config.tile_cols), dtype, out)
    results = sweep_kernel(
        sweep,
        Task(
            products=[(k,) for k in range(strips.slices(rank))],
            epilogue=epilogue,
            vectors=len(vectors),
            stores=True,
        ),
        dtype,
        dtype,
        out_type=[jax.ShapeDtypeStruct(base.shape, dtype)] * (2 if want_inner else 1),
        scratch={"inner_smem": inner_smem} if want_inner else {},
        kernel_name="dora_expand_compose",
    )(
        z,
        lora_b,
        base,
        jnp.reshape(scale, 1).astype(jnp.float32),
        strips.pad_features(vectors, sweep),
    )
    results = [result[:rows].reshape(shape) for result in results]
    return results[0], results[1] if want_inner else None
