"""A projection of few rows, as in decoding: y = g∘(x W + s·(x A) B) + bias, or y = x W, by
`dora_common.triton.few_rows`.

    x  [rows, in]  bf16 or fp16     A  [in, r], B  [r, out]  x's dtype     y  [rows, out]
    W  [in, out]   x's dtype; or codes q, int8, float8_e4m3fn, int4 or uint4 of NF4, with scales
                   σ [in / t, out / u], t = in or a multiple of 64
    g  f32[out] or None             s  f32[]                               bias  [out] or None
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.quantised import Format, repeated
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call
from jax_dora.ops.triton.triton_codes import arguments
from jax_dora.ops.triton.triton_norm import FLOATS

MOST_ROWS, MOST_RANK, DEPTH = 64, 128, 64


def refuses(
    rows: int,
    in_features: int,
    out: int,
    rank: int,
    form: Format | None,
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why a call is not supported, or None; the arguments are those of Mosaic's
    `decode_project`."""
    if dtype not in HALVES:
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if not 0 <= rank <= MOST_RANK:
        return f"the adapter's rank is {rank}, not up to {MOST_RANK}"
    if 0 in (in_features, out):
        return f"one of in = {in_features}, out = {out} is 0"
    if form is None:
        return None
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if form.tile[0] % DEPTH and form.tile[0] != in_features:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {DEPTH}"
    if out % form.packed:
        return f"out = {out} is odd, and two codes share a byte"
    return None


def wins(rows: int, in_features: int, out: int, rank: int, form: Format | None, dtype: Any) -> bool:
    """Returns False: on an H200, the kernels were slower than XLA (32 rows, NF4, 8192 × 8192: 727
    µs, and XLA 133); other formats were not timed."""
    return False


def config(capability: int, *call: Any) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import few_rows

    return few_rows.CONFIG


@launcher("capability")
def launch(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array | None,
    lora_a: jax.Array | None = None,
    lora_b: jax.Array | None = None,
    g: jax.Array | None = None,
    scale: jax.Array | float = 1.0,
    bias: jax.Array | None = None,
    *,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns y [..., out], for x [..., in]; without an adapter, lora_a and all that follows are
    left out."""
    from dora_common.triton import few_rows
    from dora_common.triton.jit import cdiv, next_power_of_2

    (in_features, out), rank = w.shape, 0 if lora_a is None else lora_a.shape[1]
    rows, f32 = x.size // in_features, jnp.float32
    weight: dict[str, Any] = {"weight_ptr": w, "levels_ptr": None, "scales_ptr": None} | FLOATS
    if scales is not None:
        weight = arguments(w, repeated(scales, 1, out))
    weight.pop("GROUP", None)
    tiles = cdiv(out, config.columns) + cdiv(rank, config.columns)
    splits, steps = config.split(in_features, tiles * config.columns, capability)
    sizes = {"rows": rows, "RANK": rank, "ROWS": few_rows.tile_rows(rows)}
    parts, *z = kernel_call(
        few_rows.sums,
        (tiles, splits),
        capability,
        warps=config.warps,
        stages=config.stages,
        x_ptr=x,
        lora_a_ptr=lora_a,
        parts_ptr=jax.ShapeDtypeStruct((splits, rows, out), f32),
        z_ptr=None if lora_a is None else jax.ShapeDtypeStruct((splits, rows, rank), f32),
        in_features=in_features,
        out_features=out,
        STEPS=steps,
        COLUMNS=config.columns,
        DEPTH=few_rows.DEPTH,
        STAGES=config.stages,
        **weight,
        **sizes,
    )
    shape = (*x.shape[:-1], out)
    if lora_a is None:
        return jnp.sum(parts, axis=0).astype(x.dtype).reshape(shape)
    (y,) = kernel_call(
        few_rows.finish,
        (cdiv(out, config.finish_columns),),
        capability,
        warps=config.warps,
        parts_ptr=parts,
        z_ptr=z[0],
        lora_b_ptr=lora_b,
        g_ptr=g,
        bias_ptr=bias,
        y_ptr=jax.ShapeDtypeStruct((rows, out), x.dtype),
        features=out,
        scale=jnp.asarray(scale, f32),
        SPLITS=splits,
        PADDED_RANK=max(16, next_power_of_2(rank)),
        COLUMNS=config.finish_columns,
        **sizes,
    )
    return y.reshape(shape)
