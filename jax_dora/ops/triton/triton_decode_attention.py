"""Attention of one new token per row to a KV cache in FP8, by
`dora_common.triton.decode_attention`.

    q  f32[batch, heads, size]    key  f32[batch, kv_heads, size]    value  [batch, kv_heads, size]
    codes  e4m3[layers, batch, kv_heads, capacity, size]    scales  f32[layers, ..., capacity]
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import kernel_call

# The sizes of heads and of groups, and the dtypes, for which results were checked on a GPU.
SIZES = (64, 96, 128, 256)
MAX_GROUP = 32
DTYPES = (jnp.bfloat16, jnp.float32)
# A multiple of every config's `tokens`.
CAPACITY = 128


def refuses(group: int, size: int, capacity: int, dtype: Any) -> str | None:
    """Returns why the kernel does not support groups of so many heads, or None."""
    if dtype not in DTYPES:
        return f"values have dtype {dtype}, neither bfloat16 nor float32"
    if size not in SIZES:
        return f"head_dim is {size}, none of {', '.join(map(str, SIZES))}"
    if group > MAX_GROUP:
        return f"{group} heads share a key; the kernel supports up to {MAX_GROUP}"
    if not capacity or capacity % CAPACITY:
        return f"the capacity is {capacity}, not a multiple of {CAPACITY}"
    return None


def wins(group: int, size: int, capacity: int, dtype: Any) -> bool:
    """Returns True: XLA would write the dequantised cache to memory."""
    return True


def config(capability: int, group: int, size: int, capacity: int, dtype: Any) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import decode_attention

    return decode_attention.CONFIG


@launcher("window", "capability")
def launch(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_codes: jax.Array,
    key_scales: jax.Array,
    value_codes: jax.Array,
    value_scales: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    *,
    window: int | None,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns the attention [batch, heads, size] in value's dtype; layer is i32[1]."""
    from dora_common.triton import decode_attention
    from dora_common.triton.jit import cdiv, next_power_of_2

    batch, heads, size = q.shape
    kv_heads, capacity = key.shape[1], key_codes.shape[3]
    group, splits = heads // kv_heads, cdiv(capacity, config.chunk)
    part = jax.ShapeDtypeStruct((splits, *q.shape), value.dtype if splits == 1 else jnp.float32)
    parts, log_sums = kernel_call(
        decode_attention.kernel,
        (batch * kv_heads * splits,),
        capability,
        warps=config.warps,
        stages=config.stages,
        q_ptr=q,
        key_ptr=key,
        value_ptr=value,
        keys_ptr=key_codes,
        key_scales_ptr=key_scales,
        values_ptr=value_codes,
        value_scales_ptr=value_scales,
        lengths_ptr=lengths,
        layer_ptr=layer,
        part_ptr=part,
        log_sum_ptr=jax.ShapeDtypeStruct((splits, batch, heads), jnp.float32),
        batch=batch,
        kv_heads=kv_heads,
        capacity=capacity,
        splits=splits,
        scale=math.log2(math.e) * size**-0.5,
        WINDOW=window or 0,
        GROUP=group,
        ROWS=decode_attention.padded_rows(group),
        SIZE=size,
        PADDED=next_power_of_2(size),
        CHUNK=config.chunk,
        TOKENS=config.tokens,
        STAGES=config.stages,
        CONVERTS=capability >= decode_attention.CONVERTS,
    )
    if splits == 1:
        return parts[0]
    weights = jax.nn.softmax(log_sums * math.log(2), axis=0)
    return jnp.sum(weights[..., None] * parts, axis=0).astype(value.dtype)
