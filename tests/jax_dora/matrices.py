"""Layers as training leaves them, and what is to be judged of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def trained(layer: Any, seed: int = 0) -> Any:
    """`layer`, changed in place to look trained: lora_a, lora_b random, the magnitude off its norm,
    and a bias."""
    rng = np.random.default_rng(seed)
    for variable, scale in ((layer.lora_a, 0.3), (layer.lora_b, 0.4)):
        value = scale * rng.normal(size=variable.shape)
        variable.set_value(jnp.asarray(value, variable.dtype))
    norm = layer.norm()
    layer.magnitude.set_value(norm * jnp.asarray(1 + 0.1 * rng.normal(size=norm.shape), norm.dtype))
    if getattr(layer, "bias", None) is not None:
        layer.bias.set_value(jnp.asarray(rng.normal(size=layer.bias.shape), layer.bias.dtype))
    return layer


def differentiate(layer: Any, x: jax.Array, seed: int = 1) -> tuple[Any, ...]:
    """(y, dy, gradients by name, dx or None for integer x) for a random cotangent dy."""
    inexact = jnp.issubdtype(x.dtype, jnp.floating)
    wrt = nnx.DiffState(0, nnx.LoRAParam)

    def objective(layer, x, dy):
        return jnp.vdot(layer(x).astype(jnp.float32), dy.astype(jnp.float32))

    @nnx.jit
    def both(layer, x, dy):
        if inexact:
            return nnx.grad(objective, argnums=(wrt, 1))(layer, x, dy)
        return nnx.grad(objective, argnums=wrt)(layer, x, dy), None

    with jax.default_matmul_precision("highest"):
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
        dy = jnp.asarray(np.random.default_rng(seed).normal(size=y.shape), y.dtype)
        return y, dy, *both(layer, x, dy)
