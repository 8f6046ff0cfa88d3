"""The gradient of `jax_dora.ops.swiglu`, with all sums over rows in the same pass, by
`dora_common.triton.swiglu_backward`.

    dh, gate, up  [rows, out]  bf16, fp16 or fp32      g, b of gate and of up  f32[out]
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows.swiglu_backward import wins as wins
from jax_dora.ops.triton.kernel_call import kernel_call
from jax_dora.ops.triton.triton_compose_forward import refuses as refuses


def config(capability: int, rows: int, out: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import swiglu_backward

    return swiglu_backward.CONFIG


@launcher("want_bias", "capability")
def launch(
    dh: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    gate_g: jax.Array,
    up_g: jax.Array,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    want_bias: bool = False,
    config: Any,
    capability: int,
) -> tuple[jax.Array, ...]:
    """Returns (d_gate, d_up, d_gate_g, d_up_g), followed by (d_gate_bias, d_up_bias) if
    `want_bias`, for dh, gate, up [..., out]."""
    from dora_common.triton import swiglu_backward
    from dora_common.triton.compose_backward import strips_of

    features = dh.shape[-1]
    rows = dh.size // features
    strips, programs, constants = strips_of(config, rows, features)
    result = jax.ShapeDtypeStruct(dh.shape, dh.dtype)
    d_gate, d_up, partial = kernel_call(
        swiglu_backward.kernel,
        (programs,),
        capability,
        warps=config.warps,
        dh_ptr=dh,
        gate_ptr=gate,
        up_ptr=up,
        gate_g_ptr=gate_g,
        up_g_ptr=up_g,
        gate_bias_ptr=gate_bias,
        up_bias_ptr=up_bias,
        d_gate_ptr=result,
        d_up_ptr=result,
        partial_ptr=jax.ShapeDtypeStruct((4 if want_bias else 2, strips, features), jnp.float32),
        rows=rows,
        features=features,
        strips=strips,
        WITH_BIAS=want_bias,
        **constants,
    )
    return d_gate, d_up, *jnp.sum(partial, axis=1)
