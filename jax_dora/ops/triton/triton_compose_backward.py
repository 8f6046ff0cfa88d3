"""The gradient of compose, with d_g's sum over rows in the same pass, by
`dora_common.triton.compose_backward`.

    dy, inner  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows.compose_backward import wins as wins
from jax_dora.ops.triton.kernel_call import kernel_call
from jax_dora.ops.triton.triton_compose_forward import refuses as refuses


def config(capability: int, rows: int, out: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import compose_backward

    return compose_backward.CONFIG


@launcher("delta", "want_base", "want_lora", "capability")
def launch(
    dy: jax.Array,
    inner: jax.Array | None,
    g: jax.Array,
    scale: jax.Array,
    *,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    config: Any,
    capability: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (d_base, d_lora, d_g), each None if not wanted, for dy, inner [..., out].

    d_g is None if inner is None.
    """
    from dora_common.triton import compose_backward

    features = dy.shape[-1]
    rows = dy.size // features
    strips, programs, constants = compose_backward.strips_of(config, rows, features)
    result = jax.ShapeDtypeStruct(dy.shape, dy.dtype)
    sums = jax.ShapeDtypeStruct((strips, features), jnp.float32)
    wanted = {"d_base_ptr": want_base, "d_lora_ptr": want_lora, "partial_ptr": inner is not None}
    found = kernel_call(
        compose_backward.kernel,
        (programs,),
        capability,
        warps=config.warps,
        dy_ptr=dy,
        inner_ptr=inner,
        g_ptr=g,
        d_base_ptr=result if want_base else None,
        d_lora_ptr=result if want_lora else None,
        partial_ptr=None if inner is None else sums,
        rows=rows,
        features=features,
        strips=strips,
        scale=scale.astype(jnp.float32),
        DELTA=delta,
        WITH_BASE=want_base,
        WITH_LORA=want_lora,
        WITH_G=inner is not None,
        **constants,
    )
    results = iter(found)
    d_base, d_lora, partial = (next(results) if want else None for want in wanted.values())
    return d_base, d_lora, None if partial is None else jnp.sum(partial, axis=0)
