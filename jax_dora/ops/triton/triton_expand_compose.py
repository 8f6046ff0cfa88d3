"""Expand and compose in one pass: y = g∘(base + s·(z B)) [+ bias], by
`dora_common.triton.ring_expand`, `strip_expand` or `expand_compose`.

    base  [rows, out]  bf16 or fp16     z  [rows, r], B  [r, out]  base's dtype
    g     f32[out]                      s  f32[]                     bias  [out] (optional)
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection import expand_compose as mosaic
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call


def refuses(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [rows, out], z [rows, rank] and B of `dtype` are not supported, or None."""
    if dtype not in HALVES:
        return f"base has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if 0 in (rows, rank, out):
        return f"one of rows = {rows}, rank = {rank}, out = {out} is 0"
    return None


def wins(rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA on an H200, where XLA was faster at rank
    768; other cards were not measured."""
    return rank <= 384 and mosaic.wins(rows, rank, out, dtype)


def config(capability: int, rows: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import expand_compose, rings, strip_expand

    # Rings and strips were measured on Hopper only.
    if capability == 90 and rank > 128 and rings.fits(rank, rank, out):
        from dora_common.triton import ring_expand

        return ring_expand.config(rank)
    if capability == 90 and rank <= 128:
        return strip_expand.config(rank)
    return expand_compose.config(rank, capability)


@launcher("want_inner", "capability")
def launch(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    want_inner: bool,
    config: Any,
    capability: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, inner or None) for base [..., out] and z [..., r]."""
    from dora_common.triton import expand_compose, rings, strip_expand, strips
    from dora_common.triton.jit import cdiv

    rank, features = lora_b.shape
    rows = base.size // features
    scratch = 0
    if isinstance(config, rings.Config):
        from dora_common.triton import ring_expand

        kernel = ring_expand.kernel
        programs, splits, steps = config.walk(rows, features, capability)
        tiles = {"RANK": rank, "SLICES": cdiv(rank, config.depth), "STAGES": config.stages}
        tiles |= {"SLOTS": config.slots, "splits": splits, "steps": steps}
        # Of base, z and B; each group has those of its results.
        scratch = (3 + rings.GROUPS * (1 + want_inner)) * rings.DESCRIPTOR_BYTES
    elif isinstance(config, strips.Config):
        kernel = strip_expand.kernel
        programs, splits, steps = config.walk(features, rows, capability)
        tiles = config.slices(rank) | {"splits": splits, "steps": steps}
    else:
        kernel = expand_compose.kernel
        programs = cdiv(rows, config.rows) * cdiv(features, config.columns)
        tiles = {"ROWS": config.rows, "COLUMNS": config.columns, "DEPTH": config.depth}
        tiles |= {"RANK": rank, "ADDS": False}
    result = jax.ShapeDtypeStruct(base.shape, base.dtype)
    y, *inner = kernel_call(
        kernel,
        (programs,),
        capability,
        warps=config.warps,
        stages=config.stages,
        scratch=scratch,
        base_ptr=base,
        z_ptr=z,
        lora_b_ptr=lora_b,
        g_ptr=g,
        bias_ptr=bias,
        y_ptr=result,
        inner_ptr=result if want_inner else None,
        rows=rows,
        features=features,
        scale=scale.astype(jnp.float32),
        HAS_BIAS=bias is not None,
        WITH_INNER=want_inner,
        OUT_LAST=True,
        ADDS_BIAS=True,
        **tiles,
    )
    return y, inner[0] if want_inner else None
