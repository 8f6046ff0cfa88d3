"""The gradient of `jax_dora.ops.residual_layer_norm`, by
`dora_common.triton.residual_norm_backward`.

    dz, and what the forward pass has taken, except the bias
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import kernel_call
from jax_dora.ops.triton.triton_residual_norm_forward import constants
from jax_dora.ops.triton.triton_residual_norm_forward import refuses as refuses
from jax_dora.ops.triton.triton_residual_norm_forward import wins as wins


def config(capability: int, count: int, features: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability. One row of few warps, and many programs,
    hide the latency of its four sums best: 69 µs for 10,240 rows of 1,536, with 4 warps 89 µs, and
    with 528 programs of 4 warps 106 (`benchmarks/results/h200/tried.jsonl`)."""
    from dora_common.triton.residual_norm_rows import Config

    return Config(rows=1, warps=2 if features <= 2048 else 8, programs=1056)


@launcher("epsilon", "rate", "capability")
def launch(
    dz: jax.Array,
    y: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    seed: jax.Array | None,
    *,
    epsilon: float,
    rate: float,
    config: Any,
    capability: int,
) -> tuple[jax.Array, ...]:
    """Returns (dy, dx, dscale, dbias), the last two in fp32."""
    from dora_common.triton import residual_norm_backward
    from dora_common.triton.jit import cdiv

    count, features = y.shape
    programs = min(config.programs, cdiv(count, config.rows))
    sums = jax.ShapeDtypeStruct((programs, features), jnp.float32)
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    dx, *dy, dscale, dbias = kernel_call(
        residual_norm_backward.kernel,
        (programs,),
        capability,
        warps=config.warps,
        dz_ptr=dz,
        y_ptr=y,
        x_ptr=x,
        scale_ptr=scale,
        seed_ptr=seed,
        dx_ptr=like,
        dy_ptr=None if seed is None else like,
        dscale_ptr=sums,
        dbias_ptr=sums,
        PROGRAMS=programs,
        ROWS=config.rows,
        **constants(y, epsilon, rate),
    )
    return (dy or [dx])[0], dx, jnp.sum(dscale, axis=0), jnp.sum(dbias, axis=0)
