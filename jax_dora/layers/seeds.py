"""The dropout seeds of a layer's call."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora import ops

# The difference of the seeds of products that share a dropout. It is odd, so all multiples of it
# below 2**32 differ and every product has its own mask.
NEXT_SEED = 0x9E3779B9


def dropout_of_call(
    layer: Any,
    deterministic: bool | None,
    rngs: nnx.Rngs | nnx.RngStream | jax.Array | None,
) -> ops.Dropout | None:
    """Returns the dropout of this call, or None if nothing is dropped. The arguments are those of
    `nnx.Dropout.__call__`, and take precedence over the layer's own."""
    dropout = layer.dropout
    if dropout is None:
        return None
    if deterministic is None:
        deterministic = dropout.deterministic
    if deterministic is None:
        raise ValueError(
            "deterministic is None in the call and in the layer; expected a bool in one of them: "
            "call model.train() or model.eval() first, or pass deterministic="
        )
    if deterministic or not dropout.rate:
        return None
    rngs = dropout.rngs if rngs is None else rngs
    if rngs is None:
        raise ValueError(
            "rngs is None in the call and in the layer; expected an nnx.Rngs, an nnx.RngStream "
            "or a key in one of them"
        )
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[dropout.rng_collection]
    key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
    return ops.Dropout(ops.draw_seed(key), dropout.rate, layer.dropout_mode)


def split_dropout(dropout: ops.Dropout | None, count: int) -> ops.Dropout | None:
    """Returns a dropout for `count` matrices, with a different mask for each. The result's seed
    has an additional leading axis of this size."""
    offsets = jnp.arange(count, dtype=jnp.uint32)[:, None] * jnp.uint32(NEXT_SEED)
    return jax.tree.map(lambda seed: seed[None] + offsets, dropout)
