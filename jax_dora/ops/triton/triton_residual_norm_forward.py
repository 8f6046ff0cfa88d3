"""The forward pass of `jax_dora.ops.residual_layer_norm`, by
`dora_common.triton.residual_norm_forward`.

    y, x, z      [count, features]    bf16, fp16 or fp32
    scale, bias  [features]           any of these
    seed         i32[2] or None
    mean, inverse  f32[count], of t, and 1 / sqrt(var(t) + epsilon)
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.dropout import kept_share, threshold
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call

# More features of a row than this spill registers.
MAX_FEATURES = 4096


def refuses(count: int, features: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why y [count, features] of `dtype` is not supported, or None."""
    if dtype not in (*HALVES, jnp.float32):
        return f"y has dtype {jnp.dtype(dtype)}, none of bfloat16, float16 and float32"
    if not 1 <= features <= MAX_FEATURES:
        return f"a row has {features} features; at most {MAX_FEATURES} are supported"
    return "there are no rows" if count == 0 else None


def wins(count: int, features: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernels are faster than XLA where that was measured: 10,240 rows of 512
    and 1,536 features, in bf16 on an H200 (`benchmarks/results/h200/tried.jsonl`)."""
    return dtype == jnp.bfloat16 and 512 <= features <= 2048 and count >= 8192


def config(capability: int, count: int, features: int, dtype: jax.typing.DTypeLike) -> Any:
    """Returns the launch options for a compute capability: 28 µs for 10,240 rows of 1,536, and with
    one row for each program 31 (`benchmarks/results/h200/tried.jsonl`)."""
    from dora_common.triton.jit import next_power_of_2
    from dora_common.triton.residual_norm_rows import Config

    columns = next_power_of_2(features)
    return Config(rows=1 if columns > 2048 else max(2, 2048 // columns))


def constants(y: jax.Array, rate: float) -> dict[str, Any]:
    """Returns the constants of both passes."""
    from dora_common.triton.jit import next_power_of_2

    count, features = y.shape
    sizes = {"COUNT": count, "FEATURES": features, "COLUMNS": next_power_of_2(features)}
    dropout = {"THRESHOLD": int(threshold(rate)), "KEPT": kept_share(rate)}
    return sizes | dropout


@launcher("epsilon", "rate", "capability")
def launch(
    y: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    seed: jax.Array | None,
    *,
    epsilon: float,
    rate: float,
    config: Any,
    capability: int,
) -> list[jax.Array]:
    """Returns [z, mean, inverse]."""
    from dora_common.triton import residual_norm_forward
    from dora_common.triton.jit import cdiv

    of_rows = jax.ShapeDtypeStruct((len(y),), jnp.float32)
    return kernel_call(
        residual_norm_forward.kernel,
        (cdiv(len(y), config.rows),),
        capability,
        warps=config.warps,
        y_ptr=y,
        x_ptr=x,
        scale_ptr=scale,
        bias_ptr=bias,
        seed_ptr=seed,
        z_ptr=jax.ShapeDtypeStruct(y.shape, y.dtype),
        mean_ptr=of_rows,
        inverse_ptr=of_rows,
        EPSILON=epsilon,
        ROWS=config.rows,
        **constants(y, rate),
    )
