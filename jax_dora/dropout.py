"""From `nnx.Dropout`, which knows whether and with which key to drop, to `jax_dora.ops.Dropout`."""

import jax
from flax import nnx

from jax_dora import ops
from jax_dora.hyperparameters import DropoutMode


def drawn(
    dropout: nnx.Dropout | None,
    mode: DropoutMode,
    deterministic: bool | None,
    rngs: nnx.Rngs | nnx.RngStream | jax.Array | None,
) -> ops.Dropout | None:
    """What to drop in this call, or None for nothing.

    Args:
      dropout: a layer's, or None for a layer without.
      mode: "adapter" or "input".
      deterministic, rngs: as `nnx.Dropout.__call__`'s; they take precedence over the layer's.

    Raises:
      ValueError: neither the call nor the layer says whether to drop, or with which key.
    """
    if dropout is None:
        return None
    if deterministic is None:
        deterministic = dropout.deterministic
    if deterministic is None:
        raise ValueError(
            "deterministic is None in the call and in the layer; expected a bool from either, or "
            "model.train() or model.eval() before"
        )
    if deterministic or not dropout.rate:
        return None
    rngs = dropout.rngs if rngs is None else rngs
    if rngs is None:
        raise ValueError(
            "rngs is None in the call and in the layer; expected an nnx.Rngs, an nnx.RngStream or "
            "a key from either"
        )
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[dropout.rng_collection]
    key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
    return ops.Dropout(ops.draw_seed(key), dropout.rate, mode)
