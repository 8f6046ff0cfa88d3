"""The forward pass of `jax_dora.ops.disentangled_attention`: scores of positions by
`dora_common.triton.disentangled_pairs`, and all else by `disentangled_forward`.

    q, k, v, o   [batch, time, heads, size]            bf16, fp16 or fp32
    key_table    [2·time - 1, heads, size] or None     the same; for each distance from 1 - time on,
                                                       what a query and the key there multiply
    query_table  [2·time - 1, heads, size] or None     the same, of a key and the query there
    c2p, p2c     [batch, heads, time, pitch] or None   the same; of all pairs of tokens
    mask         i8[batch, time] or None               lse  f32[batch, heads, time]
    seed         i32[2] or None
"""

from typing import Any, NamedTuple

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


class Configs(NamedTuple):
    """The launch options of the two kernels."""

    pairs: Any
    attention: Any


def config(
    capability: int, batch: int, time: int, heads: int, size: int, dtype: jax.typing.DTypeLike
) -> Configs:
    """Returns the launch options for a compute capability."""
    from dora_common.triton.disentangled_scores import Config

    # Elsewhere, larger tiles spill registers.
    is_large = dtype in HALVES and size <= 64 and capability == 90
    if not is_large:
        return Configs(*2 * [Config(rows=32, columns=32, stages=1)])
    return Configs(Config(columns=128), Config())


def constants(
    q: jax.Array, c2p: jax.Array | None, p2c: jax.Array | None, rate: float
) -> dict[str, Any]:
    """Returns the constants of both passes: sizes, the scale of the scores, and dropout."""
    size = q.shape[-1]
    scale = ((1 + (c2p is not None) + (p2c is not None)) * size) ** -0.5
    dropout = {"THRESHOLD": int(threshold(rate)), "KEPT": kept_share(rate)}
    return sizes(q) | {"SCALE": scale} | dropout


def sizes(q: jax.Array) -> dict[str, int]:
    """Returns the constants of all kernels of the attention."""
    from dora_common.triton.disentangled_scores import pitch

    _, time, heads, size = q.shape
    return {"TIME": time, "PITCH": pitch(time), "HEADS": heads, "SIZE": size}


@launcher("rate", "capability")
def launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_table: jax.Array | None,
    query_table: jax.Array | None,
    mask: jax.Array | None,
    seed: jax.Array | None,
    *,
    rate: float,
    config: Configs,
    capability: int,
) -> tuple[jax.Array | None, ...]:
    """Returns (o, lse, c2p, p2c)."""
    from dora_common.triton import disentangled_forward, disentangled_pairs
    from dora_common.triton.disentangled_scores import pitch, programs
    from dora_common.triton.jit import cdiv

    batch, time, heads, _ = q.shape

    def pairs(x: jax.Array, table: jax.Array | None) -> jax.Array | None:
        if table is None:
            return None
        chosen = config.pairs
        [y] = kernel_call(
            disentangled_pairs.kernel,
            (programs(time, chosen.rows), batch * heads),
            capability,
            warps=chosen.warps,
            stages=chosen.stages,
            x_ptr=x,
            table_ptr=table,
            y_ptr=jax.ShapeDtypeStruct((batch, heads, time, pitch(time)), q.dtype),
            ROWS=chosen.rows,
            COLUMNS=chosen.columns,
            **sizes(q),
        )
        return y

    c2p, p2c, chosen = pairs(q, key_table), pairs(k, query_table), config.attention
    o, lse = kernel_call(
        disentangled_forward.kernel,
        (cdiv(time, chosen.rows), batch * heads),
        capability,
        warps=chosen.warps,
        stages=chosen.stages,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        c2p_ptr=c2p,
        p2c_ptr=p2c,
        mask_ptr=mask,
        seed_ptr=seed,
        o_ptr=jax.ShapeDtypeStruct(q.shape, q.dtype),
        lse_ptr=jax.ShapeDtypeStruct((batch, heads, time), jnp.float32),
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        **constants(q, c2p, p2c, rate),
    )
    return o, lse, c2p, p2c
