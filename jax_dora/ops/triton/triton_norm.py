"""The norm's square in one pass over the kernel: ‖W + s·A B‖² per output feature, by
`dora_common.triton.ring_norm`, `strip_norm` or `one_pass_norm`.

    W  [in, out]  bf16 or fp16     A  [in, r], B  [r, out]  bf16, fp16 or fp32     s  f32[]

The accuracy of fp32 adapters is that of `dora_common.triton.adapter_pieces`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.norm import one_pass_norm as mosaic
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call


def refuses(
    in_features: int, rank: int, out: int, kernel_dtype: Any, adapter_dtype: Any
) -> str | None:
    """Returns why the kernel does not support W [in, out] and A, B of `rank`, or None."""
    if kernel_dtype not in HALVES:
        return f"the kernel has dtype {kernel_dtype}, neither bfloat16 nor float16"
    if adapter_dtype not in (*HALVES, jnp.float32):
        return f"the adapter has dtype {adapter_dtype}, none of bfloat16, float16, float32"
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    return None


def wins(in_features: int, rank: int, out: int, kernel_dtype: Any, adapter_dtype: Any) -> bool:
    """Returns whether the kernel was no slower than XLA on an H200, up to the highest rank that was
    measured; other cards were not measured."""
    return rank <= 384 and mosaic.wins(in_features, rank, out, kernel_dtype, adapter_dtype)


def config(
    capability: int,
    in_features: int,
    rank: int,
    out: int,
    kernel_dtype: Any,
    adapter_dtype: Any,
) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import one_pass_norm, rings, strip_norm

    is_in_pieces = jnp.dtype(adapter_dtype) == jnp.float32
    pieces = 1 + is_in_pieces
    # Rings and strips were measured on Hopper only.
    least = 1 if is_in_pieces else 129
    if capability == 90 and rank >= least and rings.fits(rank, rank, out, pieces=pieces):
        from dora_common.triton import ring_norm

        return ring_norm.config(rank, pieces)
    if capability == 90 and rank <= (64 if is_in_pieces else 128):
        return strip_norm.config(rank, is_coded=False, out_last=True)
    return one_pass_norm.config(
        rank, is_in_pieces=is_in_pieces, is_coded=False, axis=0, capability=capability
    )


@launcher("capability")
def launch(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    *,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns norm² f32[out]."""
    from dora_common.triton import one_pass_norm, rings, strips
    from dora_common.triton.jit import cdiv

    if isinstance(config, rings.Config):
        return _by_rings(kernel, lora_a, lora_b, scale, config, capability)
    if isinstance(config, strips.Config):
        weight = {"weight_ptr": kernel, "levels_ptr": None, "scales_ptr": None}
        return squares(weight | FLOATS, lora_a, lora_b, scale, config, capability)
    (rows, columns), rank = kernel.shape, lora_a.shape[1]
    left, right, units = lora_a, lora_b, (None, None)
    if lora_a.dtype == jnp.float32:
        left, right, *units = _pieces(left, right, capability)
    tiles = cdiv(rows, config.rows)
    (partial,) = kernel_call(
        one_pass_norm.kernel,
        (tiles * cdiv(columns, config.columns),),
        capability,
        warps=config.warps,
        stages=config.stages,
        weight_ptr=kernel,
        levels_ptr=None,
        scales_ptr=None,
        right_ptr=right,
        left_ptr=left,
        unit_right_ptr=units[1],
        unit_left_ptr=units[0],
        partial_ptr=jax.ShapeDtypeStruct((tiles, columns), jnp.float32),
        rows=rows,
        columns=columns,
        scale=scale.astype(jnp.float32),
        AXIS=0,
        RANK=rank,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        RUN=0,
        GROUP=1,
        PIECES=lora_a.dtype == jnp.float32,
    )
    return jnp.sum(partial, axis=0)


FLOATS = {"CODES": "", "RUN": 1, "GROUP": 1}


def squares(
    weight: dict[str, Any],
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns norm² f32[out] by strips, given the kernel's arguments that describe W."""
    from dora_common.triton import strip_norm

    (in_features, rank), out = lora_a.shape, lora_b.shape[1]
    units, is_in_pieces = (None, None), lora_a.dtype == jnp.float32
    if is_in_pieces:
        lora_a, lora_b, *units = _pieces(lora_a, lora_b, capability)
    programs, splits, steps = config.walk(out, in_features, capability)
    (partial,) = kernel_call(
        strip_norm.kernel,
        (programs,),
        capability,
        warps=config.warps,
        stages=config.stages,
        lora_a_ptr=lora_a,
        lora_b_ptr=lora_b,
        unit_a_ptr=units[0],
        unit_b_ptr=units[1],
        partial_ptr=jax.ShapeDtypeStruct((splits, out), jnp.float32),
        in_features=in_features,
        out_features=out,
        splits=splits,
        steps=steps,
        scale=scale.astype(jnp.float32),
        OUT_LAST=True,
        PIECES=is_in_pieces,
        **weight,
        **config.slices(rank),
    )
    return jnp.sum(partial, axis=0)


def _by_rings(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns norm² f32[out] by rings of tiles."""
    from dora_common.triton import ring_norm, rings
    from dora_common.triton.jit import cdiv

    (in_features, rank), out = lora_a.shape, lora_b.shape[1]
    units, pieces = (None, None), 1
    if lora_a.dtype == jnp.float32:
        lora_a, lora_b, *units = _pieces(lora_a, lora_b, capability)
        pieces = 2
    programs, splits, steps = config.walk(out, in_features, capability)
    (partial,) = kernel_call(
        ring_norm.kernel,
        (programs,),
        capability,
        warps=config.warps,
        scratch=3 * rings.DESCRIPTOR_BYTES,
        weight_ptr=kernel,
        lora_a_ptr=lora_a,
        lora_b_ptr=lora_b,
        unit_a_ptr=units[0],
        unit_b_ptr=units[1],
        partial_ptr=jax.ShapeDtypeStruct((splits, out), jnp.float32),
        in_features=in_features,
        out_features=out,
        splits=splits,
        steps=steps,
        scale=scale.astype(jnp.float32),
        PIECES=pieces,
        RANK=rank,
        SLICES=cdiv(rank, config.depth),
        STAGES=config.stages,
        WIDTH=config.width,
        OUT_LAST=True,
    )
    return jnp.sum(partial, axis=0)


def _pieces(lora_a: jax.Array, lora_b: jax.Array, capability: int) -> list[jax.Array]:
    """Returns f16[2, in, r] and f16[2, r, out], and their units f32[in] and f32[out]."""
    from dora_common.triton import adapter_pieces

    # The kernel knows B [out, r] and A [r, in]: of the transposed layout these are A and B.
    (rows, rank), columns = lora_a.shape, lora_b.shape[1]
    programs, constants = adapter_pieces.programs_of(rank, columns, rows)
    pieces_b, pieces_a, unit_b, unit_a = kernel_call(
        adapter_pieces.kernel,
        (programs,),
        capability,
        warps=adapter_pieces.WARPS,
        lora_a_ptr=lora_b,
        lora_b_ptr=lora_a,
        a_ptr=jax.ShapeDtypeStruct((2, *lora_b.shape), jnp.float16),
        b_ptr=jax.ShapeDtypeStruct((2, *lora_a.shape), jnp.float16),
        cast_a_ptr=None,
        cast_b_ptr=None,
        unit_a_ptr=jax.ShapeDtypeStruct((columns,), jnp.float32),
        unit_b_ptr=jax.ShapeDtypeStruct((rows,), jnp.float32),
        in_features=columns,
        out_features=rows,
        **constants,
    )
    return [pieces_a, pieces_b, unit_a, unit_b]
