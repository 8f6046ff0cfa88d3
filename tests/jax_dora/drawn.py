"""Models whose weights NumPy draws: the draws of a whole model take XLA seconds to compile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def drawn[Model: nnx.Module](make: Callable[[], Model], seed: int = 0) -> Model:
    """Returns the model that `make` would, compiling nothing.

    Vectors of a layer, of which a stack has one more axis, are near one; matrices are normal
    numbers divided by the root of their inputs. No magnitude is a norm, and no `lora_b` zero.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)
    flat = nnx.to_flat_state(state)
    values = [value_of(path, variable.get_value(), rng) for path, variable in flat]
    leaves = [variable.replace(value) for (_, variable), value in zip(flat, values, strict=True)]
    paths = [path for path, _ in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(zip(paths, leaves, strict=True)))


def value_of(path: tuple[Any, ...], like: Any, rng: np.random.Generator) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        bits = rng.integers(0, 2**32, (*like.shape, 2), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(bits))
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.zeros(like.shape, like.dtype)
    noise = rng.standard_normal(like.shape, np.float32)
    if path[-1] in ("scale", "magnitude"):
        return jnp.asarray(1 + 0.2 * noise, like.dtype)
    if path[-1] == "bias":
        return jnp.asarray(0.2 * noise, like.dtype)
    return jnp.asarray(noise / like.shape[-2] ** 0.5, like.dtype)
