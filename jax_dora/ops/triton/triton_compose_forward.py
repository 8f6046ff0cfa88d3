"""Compose forward: y = g∘(base + s·lora), or ΔY = (g-1)∘base + g∘(s·lora), by
`dora_common.triton.compose_forward`.

    base, lora  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows.compose_forward import wins as wins
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call


def refuses(rows: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why the kernel does not support [rows, out] of `dtype`, or None."""
    if dtype not in (*HALVES, jnp.float32):
        return f"dtype {jnp.dtype(dtype)} is none of bfloat16, float16, float32"
    if 0 in (rows, out):
        return f"one of rows = {rows}, out = {out} is 0"
    return None


def config(capability: int, rows: int, out: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import compose_forward

    return compose_forward.CONFIG


@launcher("delta", "want_inner", "capability")
def launch(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    delta: bool,
    want_inner: bool,
    config: Any,
    capability: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y or ΔY, inner or None) for base, lora [..., out]; adds bias [out] if given."""
    from dora_common.triton import compose_forward
    from dora_common.triton.jit import cdiv, next_power_of_2

    features = base.shape[-1]
    rows, columns = base.size // features, min(config.columns, next_power_of_2(features))
    result = jax.ShapeDtypeStruct(base.shape, base.dtype)
    y, *inner = kernel_call(
        compose_forward.kernel,
        (cdiv(rows, config.rows) * cdiv(features, columns),),
        capability,
        warps=config.warps,
        base_ptr=base,
        lora_ptr=lora,
        g_ptr=g,
        bias_ptr=bias,
        result_ptr=result,
        inner_ptr=result if want_inner else None,
        rows=rows,
        features=features,
        scale=scale.astype(jnp.float32),
        DELTA=delta,
        ADDS=False,
        HAS_BIAS=bias is not None,
        ADDS_BIAS=True,
        WITH_INNER=want_inner,
        ROWS=config.rows,
        COLUMNS=columns,
    )
    return y, inner[0] if want_inner else None
