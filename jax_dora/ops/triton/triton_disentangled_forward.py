"""The forward pass of `jax_dora.ops.disentangled_attention`, by
`dora_common.triton.disentangled_forward`.

    q, k, v, o   [batch, time, heads, size]             bf16, fp16 or fp32
    c2p, p2c     [heads, batch, time, buckets] or None  the same
    buckets      i32[2·time - 1]                        lse  f32[batch, heads, time]
    mask         i8[batch, time] or None                seed i32[2] or None
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.dropout import kept_share, threshold
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call

# A grid's second number, which has the texts and heads.
MAX_PROGRAMS = 65535


def refuses(
    batch: int, time: int, heads: int, size: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why q [batch, time, heads, size] of `dtype` is not supported, or None."""
    if dtype not in (*HALVES, jnp.float32):
        return f"q has dtype {jnp.dtype(dtype)}, none of bfloat16, float16 and float32"
    if size not in (16, 32, 64, 128):
        return f"a head has {size} features, none of 16, 32, 64 and 128"
    if 0 in (batch, time, heads):
        return f"one of batch = {batch}, time = {time}, heads = {heads} is 0"
    if batch * heads > MAX_PROGRAMS:
        return f"batch·heads = {batch * heads} is above {MAX_PROGRAMS}"
    return None


def wins(batch: int, time: int, heads: int, size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernels are faster than XLA where that was measured: with both terms of
    positions and 20 texts of 512 tokens, 24 heads of 64 features, in bf16 on an H200
    (`benchmarks/results/h200/encoder.jsonl`)."""
    return dtype == jnp.bfloat16 and size == 64 and time >= 512


def config(
    capability: int, batch: int, time: int, heads: int, size: int, dtype: jax.typing.DTypeLike
) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton.disentangled_scores import Config

    # Elsewhere, larger tiles spill registers.
    is_large = dtype in HALVES and size <= 64 and capability == 90
    return Config() if is_large else Config(rows=32, columns=32, stages=1)


def constants(q: jax.Array, c2p: jax.Array | None, p2c: jax.Array | None) -> dict[str, Any]:
    """Returns the sizes and the scale of the scores, as constants of the kernels."""
    batch, time, heads, size = q.shape
    products = [one for one in (c2p, p2c) if one is not None]
    scale = ((1 + len(products)) * size) ** -0.5
    buckets = products[0].shape[-1] if products else 1
    return {
        **{"BATCH": batch, "TIME": time, "HEADS": heads, "SIZE": size},
        **{"BUCKETS": buckets, "SCALE": scale},
    }


@launcher("rate", "capability")
def launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    c2p: jax.Array | None,
    p2c: jax.Array | None,
    buckets: jax.Array,
    mask: jax.Array | None,
    seed: jax.Array | None,
    *,
    rate: float,
    config: Any,
    capability: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns (o, lse)."""
    from dora_common.triton import disentangled_forward
    from dora_common.triton.jit import cdiv

    batch, time, heads, _ = q.shape
    o, lse = kernel_call(
        disentangled_forward.kernel,
        (cdiv(time, config.rows), batch * heads),
        capability,
        warps=config.warps,
        stages=config.stages,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        c2p_ptr=c2p,
        p2c_ptr=p2c,
        bucket_ptr=buckets,
        mask_ptr=mask,
        seed_ptr=seed,
        o_ptr=jax.ShapeDtypeStruct(q.shape, q.dtype),
        lse_ptr=jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        THRESHOLD=int(threshold(rate)),
        KEPT=kept_share(rate),
        ROWS=config.rows,
        COLUMNS=config.columns,
        **constants(q, c2p, p2c),
    )
    return o, lse
