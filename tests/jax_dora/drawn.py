"""What NumPy draws: arrays, and weights of models, whose draws take XLA seconds to compile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def normals(seed: int) -> Callable[..., jax.Array]:
    """Returns a function that draws normal numbers f32[*shape] of a deviation, one by default."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float = 1.0) -> jax.Array:
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32))

    return normal


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


def drawn_variables(init: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
    """Returns variables like those that linen's `init` would make, of the values of `drawn`."""
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], like: Any) -> jax.Array:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return value_of(tuple(names), like, rng)

    shapes = jax.eval_shape(init, jax.random.key(0), *arguments)
    return jax.tree_util.tree_map_with_path(value, shapes)


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
    inputs = like.shape[-2] if like.ndim > 1 else 1
    return jnp.asarray(noise / inputs**0.5, like.dtype)
