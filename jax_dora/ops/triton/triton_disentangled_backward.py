"""The gradients of `jax_dora.ops.disentangled_attention`: of scores and values by
`dora_common.triton.disentangled_backward`, of queries and keys by `disentangled_products`, and of
the embeddings by `disentangled_tables`.

    do, and what the forward pass has returned and taken
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call
from jax_dora.ops.triton.triton_disentangled_forward import constants, sizes
from jax_dora.ops.triton.triton_disentangled_forward import refuses as refuses
from jax_dora.ops.triton.triton_disentangled_forward import wins as wins

# Texts are summed in this many parts, so that there are programs for all multiprocessors.
PARTS = 4


class Configs(NamedTuple):
    """The launch options of the three kernels."""

    scores: Any
    products: Any
    tables: Any


def config(
    capability: int, batch: int, time: int, heads: int, size: int, dtype: jax.typing.DTypeLike
) -> Configs:
    """Returns the launch options for a compute capability."""
    from dora_common.triton.disentangled_scores import Config

    if capability != 90 or size > 64 or dtype not in HALVES:  # larger tiles spill registers
        small = Config(rows=32, columns=32, stages=1)
        return Configs(Config(rows=32, columns=32), small, small)
    return Configs(Config(stages=3), Config(stages=4), Config(stages=3))


@launcher("rate", "capability")
def launch(
    do: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    c2p: jax.Array | None,
    p2c: jax.Array | None,
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
    """Returns (dq, dk, dv, d_key_table, d_query_table), the last two in fp32."""
    from dora_common.triton import (
        disentangled_backward,
        disentangled_products,
        disentangled_tables,
    )
    from dora_common.triton.disentangled_scores import pitch, programs
    from dora_common.triton.jit import cdiv

    batch, time, heads, _ = q.shape
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    square = jax.ShapeDtypeStruct((batch, heads, time, pitch(time)), q.dtype)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    chosen = config.scores
    dv, ds, ds_back = kernel_call(
        disentangled_backward.kernel,
        (cdiv(time, chosen.rows), batch * heads),
        capability,
        warps=chosen.warps,
        stages=chosen.stages,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        do_ptr=do,
        c2p_ptr=c2p,
        p2c_ptr=p2c,
        mask_ptr=mask,
        seed_ptr=seed,
        lse_ptr=lse,
        delta_ptr=delta,
        dv_ptr=like,
        ds_ptr=square,
        ds_back_ptr=square,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        **constants(q, c2p, p2c, rate),
    )

    def product(d: jax.Array, other: jax.Array, table: jax.Array | None) -> jax.Array:
        chosen = config.products
        [dx] = kernel_call(
            disentangled_products.kernel,
            (programs(time, chosen.rows), batch * heads),
            capability,
            warps=chosen.warps,
            stages=chosen.stages,
            d_ptr=d,
            other_ptr=other,
            table_ptr=table,
            dx_ptr=like,
            ROWS=chosen.rows,
            COLUMNS=chosen.columns,
            **sizes(q),
        )
        return dx

    def of_table(d: jax.Array, x: jax.Array, table: jax.Array | None) -> jax.Array | None:
        if table is None:
            return None
        chosen, parts = config.tables, min(PARTS, batch)
        [total] = kernel_call(
            disentangled_tables.kernel,
            (cdiv(2 * time - 1, chosen.rows), heads * parts),
            capability,
            warps=chosen.warps,
            stages=chosen.stages,
            d_ptr=d,
            x_ptr=x,
            table_ptr=jax.ShapeDtypeStruct((parts, *table.shape), jnp.float32),
            BATCH=batch,
            PARTS=parts,
            ROWS=chosen.rows,
            COLUMNS=chosen.columns,
            **sizes(q),
        )
        return jnp.sum(total, axis=0)

    return (
        product(ds, k, key_table),
        product(ds_back, q, query_table),
        dv,
        of_table(ds, q, key_table),
        of_table(ds_back, k, query_table),
    )
