"""The gradient of `jax_dora.ops.residual_layer_norm`, by
`dora_common.triton.residual_norm_backward`.

    dz, and what the forward pass has taken, except the bias, and its mean and inverse
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
    """Returns the launch options for a compute capability: 45 µs for 10,240 rows of 1,536, and 16
    for rows of 512. With two warps a row and nothing fetched ahead it takes 58 and 19
    (`benchmarks/results/h200/tried.jsonl`)."""
    from dora_common.triton.jit import next_power_of_2
    from dora_common.triton.residual_norm_rows import Config

    columns = next_power_of_2(features)
    stages = 3 if columns * jnp.dtype(dtype).itemsize <= 4096 else 1
    if columns <= 1024:
        return Config(rows=1 if columns == 1024 else 2, warps=2, programs=528, stages=stages)
    return Config(rows=1, warps=4 if columns == 2048 else 8, programs=396, stages=stages)


@launcher("rate", "capability")
def launch(
    dz: jax.Array,
    y: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    seed: jax.Array | None,
    mean: jax.Array,
    inverse: jax.Array,
    *,
    rate: float,
    config: Any,
    capability: int,
) -> tuple[jax.Array, ...]:
    """Returns (dy, dx, dscale, dbias), the last two in fp32."""
    from dora_common.triton import residual_norm_backward
    from dora_common.triton.jit import cdiv

    count, features = y.shape
    programs = min(config.programs, cdiv(count, config.rows))
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    dx, *dy, sums = kernel_call(
        residual_norm_backward.kernel,
        (programs,),
        capability,
        warps=config.warps,
        dz_ptr=dz,
        y_ptr=y,
        x_ptr=x,
        scale_ptr=scale,
        seed_ptr=seed,
        mean_ptr=mean,
        inverse_ptr=inverse,
        dx_ptr=like,
        dy_ptr=None if seed is None else like,
        sums_ptr=jax.ShapeDtypeStruct((programs, 2, features), jnp.float32),
        PROGRAMS=programs,
        ROWS=config.rows,
        STAGES=config.stages,
        **constants(y, rate),
    )
    return (dy or [dx])[0], dx, *jnp.sum(sums, axis=0)
