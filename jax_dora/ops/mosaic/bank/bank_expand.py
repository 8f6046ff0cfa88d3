"""Expand and compose in one pass, for groups of rows with one adapter per group.

    y[n] = g[n]∘(base[n] + s[n]·(z[n] B[slot[n]])) [+ bias]

    base  [groups, time, out]  bf16 or fp16     z  [groups, time, r]  base's dtype
    B     [slots, r, out]      base's dtype     slot  i32[groups]     s  f32[groups]
    g     f32[groups, out]     bias  [out] (optional)                 y  [groups, time, out]

Where g is 1 and s is 0, y is base (+ bias), bit for bit. B is read from the bank, without a copy.
Tiles of z B stay in registers, in fp32, and y is rounded once.

Bytes: 2 · groups · time · out · 2, plus z, and for every group the B of its slot; the floor is
bytes / copy rate.
FLOPs: 2 · groups · time · r · out.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection import expand_compose
from jax_dora.ops.mosaic.projection.expand_compose import CHUNK
from jax_dora.ops.mosaic.projection.strip_kernel import Task, strip_kernel
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config, Tiling, pad_features


def refuses(groups: int, time: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [groups, time, out], z [groups, time, rank] and B of `dtype` are not
    supported, or None."""
    if time % TILE_ROWS:
        return f"each row of the batch has {time} tokens, which is not a multiple of {TILE_ROWS}"
    if rank % limits.ALIGNMENT:
        return f"rank {rank} is not a multiple of {limits.ALIGNMENT} (rows of 16 bytes)"
    if out % CHUNK:
        return f"out = {out} is not a multiple of {CHUNK}, and the adapters are not padded"
    return expand_compose.refuses(groups * time, rank, out, dtype)


def wins(groups: int, time: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is expected to be no slower than XLA.

    That is assumed of the same sizes as for `expand_compose`, which differs only in B's address.
    """
    return expand_compose.wins(groups * time, rank, out, dtype)


def config(groups: int, time: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the fastest config of `expand_compose`."""
    return expand_compose.config(groups * time, rank, out, dtype)


@launcher()
def launch(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    slot: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns y [groups, time, out]."""
    groups, time, out = base.shape
    rank, dtype = z.shape[-1], base.dtype
    tiling = Tiling(time, out, config, sm_count, groups)
    vectors = [g] if bias is None else [g, jnp.broadcast_to(bias, g.shape)]

    def epilogue(carry, tile, out_gmem):
        shape = (TILE_ROWS, CHUNK)
        for start in range(0, config.tile_cols, CHUNK):
            chunk = pl.ds(start, CHUNK)
            g = lax.broadcast_in_dim(tile.vectors_smem[0, chunk], shape, (1,))
            base = tile.smem[:, chunk].astype(jnp.float32)
            scaled = tile.scale * tile.acc[:, start : start + CHUNK]
            # Selected, because base + 0·(z B) turns -0 into 0, and is NaN if z B is not finite.
            y = jnp.where((g == 1) & (tile.scale == 0), base, g * (base + scaled))
            if bias is not None:
                y = y + lax.broadcast_in_dim(tile.vectors_smem[1, chunk], shape, (1,))
            tile.smem[:, chunk] = y.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.smem, out_gmem[0].at[tile.rows, tile.cols])
        return carry

    (y,) = strip_kernel(
        tiling,
        Task(
            products=[(k,) for k in range(limits.slices(rank))],
            epilogue=epilogue,
            vectors=len(vectors),
            stores=True,
            grouped=True,
        ),
        dtype,
        dtype,
        out_type=[jax.ShapeDtypeStruct((groups * time, out), dtype)],
        scratch={},
        kernel_name="dora_bank_expand",
    )(
        limits.pad(z.reshape(groups * time, rank), groups * time, limits.padded_rank(rank)),
        lora_b,
        base.reshape(groups * time, out),
        scale.astype(jnp.float32),
        jax.vmap(lambda *group_vectors: pad_features(group_vectors, tiling))(*vectors),
        slot,
    )
    return y.reshape(base.shape)
