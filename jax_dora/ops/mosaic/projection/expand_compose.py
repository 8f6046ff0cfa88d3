"""Expand and compose in one pass: y = g∘(base + s·(z B)) [+ bias].

    base  [rows, out]  bf16 or fp16     z  [rows, r]  base's dtype      B  [r, out]  base's dtype
    g     f32[out]                      s  f32[]                        bias  [out] (optional)
    y     [rows, out]  base's dtype     inner = base + s·(z B)  [rows, out]  (optional)

If base is an FP8 product before its scales are applied, (rows ⊗ columns)∘base replaces base above:

    rows  f32[rows]                     columns  f32[out]                           (both optional)

Tiles of z B stay in registers, in fp32, and y is rounded once. Products of two 16-bit numbers are
exact in fp32.

Bytes: 2 · rows · out · 2 (· 3 with inner), plus z and B once; the floor is bytes / copy rate.
FLOPs: 2 · rows · r · out, which take as long as the bytes at a rank near 400.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection.strip_kernel import Scales, Task, strip_kernel
from jax_dora.ops.mosaic.projection.strip_tiling import (
    CONFIGS,
    TILE_ROWS,
    Config,
    Tiling,
    first_with_room,
    pad_features,
)

# The columns that the epilogue processes at once: a swizzled row of 16-bit numbers.
CHUNK = 64
# The most shared memory that scales need: the columns of a strip and the rows of 6 tiles in flight.
SCALES_BYTES = 4 * (128 + 6 * TILE_ROWS)


def refuses(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [rows, out], z [rows, rank] and B of `dtype` are not supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"base has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if rows == 0 or rank == 0:
        return f"there are no {'ranks' if rows else 'rows'}"
    if out == 0 or out % limits.ALIGNMENT:
        return f"out = {out} is not a multiple of {limits.ALIGNMENT} (rows of 16 bytes)"
    if _with_room(CONFIGS, rank, want_inner=True, scaled=True) is None:
        return f"a strip of B of rank {rank} does not fit into shared memory"
    return None


def wins(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`)."""
    return rows >= 1012 and out >= 1024 and rows * out >= 2**20 and rank <= 768


def config(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config that was measured to be fastest (H200, 9446849, `benchmarks tune`), or the
    first of `CONFIGS` if none was measured or it does not fit into shared memory."""
    measured = None
    if rows >= 4096 and 544 <= rank <= 768 and out >= 4096:
        measured = Config(tile_cols=64, stages=4, slots=1, consumers=3)
    elif rows >= 1024 and 1024 <= out <= 2896:
        if 129 <= rank <= 384:
            measured = Config(tile_cols=128, stages=4, slots=1)
        elif 384 < rank <= 768:
            measured = Config(tile_cols=64, stages=4, slots=1)
        elif rank <= 64:
            measured = Config(tile_cols=64, stages=4, slots=2)
    found = _with_room([measured, *CONFIGS] if measured else CONFIGS, rank, want_inner=False)
    assert found is not None
    return found


def _with_room(
    configs: Iterable[Config], rank: int, *, want_inner: bool, scaled: bool = False
) -> Config | None:
    """Returns the first config that fits into shared memory, or None."""
    scales_bytes = SCALES_BYTES if scaled else 0
    return first_with_room(configs, limits.slices(rank), 2, int(want_inner), scales_bytes)


@launcher("want_inner", "want_copy")
def launch(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    want_inner: bool,
    want_copy: bool = False,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, inner, a copy of y, or None) for base [..., out] and z [..., r].

    Args:
      base, z, lora_b, g, scale, bias: see the module.
      scales: base's scales, rows f32[...] and columns f32[out]; or None.
      want_inner: whether to return inner.
      want_copy: whether to write y twice, which saves a pass that copies it; not with inner.
      config, sm_count: see `choose.Choice`.
    """
    shape, dtype = base.shape, base.dtype
    out, rank = shape[-1], z.shape[-1]
    base, z = base.reshape(-1, out), z.reshape(-1, rank)
    rows = base.shape[0]
    # inner and the scales need more shared memory than `config` allows for. `refuses` ensures that
    # one of `CONFIGS` fits.
    needs = {"want_inner": want_inner, "scaled": scales is not None}
    config = _with_room([config, *CONFIGS], rank, **needs) or config
    padded_rows = pl.cdiv(rows, limits.ROW_ALIGNMENT) * limits.ROW_ALIGNMENT
    padded_rank = limits.padded_rank(rank)
    tiling = Tiling(padded_rows, out, config, sm_count)
    base = limits.pad(base, padded_rows, out)
    z = limits.pad(z, padded_rows, padded_rank)
    lora_b = limits.pad(lora_b, padded_rank, tiling.padded_out)
    vectors, row_scales = [g] if bias is None else [g, bias], []
    if scales is not None:
        vectors.append(scales[1])
        row_scales.append(limits.pad(scales[0].reshape(-1), tiling.row_tiles * TILE_ROWS))

    def epilogue(carry, tile, out_gmem, inner_smem=None):
        shape = (TILE_ROWS, CHUNK)
        consumer = lax.axis_index("warpgroup")
        scale_rows = None
        if scales is not None:
            per_row = plgpu.Layout.WGMMA.reduce(1)
            scale_rows = plgpu.load(tile.scales_smem, layout=per_row, optimized=False)
            scale_rows = lax.broadcast_in_dim(scale_rows, shape, (0,))
        for start in range(0, config.tile_cols, CHUNK):
            chunk = pl.ds(start, CHUNK)
            g = lax.broadcast_in_dim(tile.vectors_smem[0, chunk], shape, (1,))
            base = tile.smem[:, chunk].astype(jnp.float32)
            if scale_rows is not None:
                scale_columns = tile.vectors_smem[len(vectors) - 1, chunk]
                base = base * (scale_rows * lax.broadcast_in_dim(scale_columns, shape, (1,)))
            scaled = tile.scale * tile.acc[:, start : start + CHUNK]
            y = g * (base + scaled)
            if bias is not None:
                y = y + lax.broadcast_in_dim(tile.vectors_smem[1, chunk], shape, (1,))
            tile.smem[:, chunk] = y.astype(dtype)
            if inner_smem is not None:
                inner_smem[consumer, :, chunk] = (base + scaled).astype(dtype)
        plgpu.commit_smem()
        for y_gmem in out_gmem[: 2 if want_copy else 1]:
            plgpu.copy_smem_to_gmem(tile.smem, y_gmem.at[tile.rows, tile.cols])
        if inner_smem is not None:
            plgpu.copy_smem_to_gmem(inner_smem.at[consumer], out_gmem[1].at[tile.rows, tile.cols])
        return carry

    inner_smem = limits.tiled((config.consumers, TILE_ROWS, config.tile_cols), dtype, out)
    results = strip_kernel(
        tiling,
        Task(
            products=[(k,) for k in range(limits.slices(rank))],
            epilogue=epilogue,
            vectors=len(vectors),
            scales=Scales(TILE_ROWS, jnp.float32, lambda _, rows, __: (rows,))
            if row_scales
            else None,
            stores=True,
        ),
        dtype,
        dtype,
        out_type=[jax.ShapeDtypeStruct(base.shape, dtype)] * (2 if want_inner or want_copy else 1),
        scratch={"inner_smem": inner_smem} if want_inner else {},
        kernel_name="dora_expand_compose",
    )(
        z,
        lora_b,
        base,
        jnp.reshape(scale, 1).astype(jnp.float32),
        pad_features(vectors, tiling),
        *row_scales,
    )
    results = [result[:rows].reshape(shape) for result in results]
    if want_copy:
        # Without the barrier XLA would launch the kernel again for the stack of a scan.
        return lax.optimization_barrier(results[0]), results[1]
    return results[0], results[1] if want_inner else None
