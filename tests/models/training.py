"""Twenty steps of training the adapters of a public model, compiled as one program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

_STEPS = 20


class Trained(NamedTuple):
    """What training has made.

    Attributes:
      adapters: after the steps.
      losses: before the first step, and after each.
      fresh, logits: before the steps, and after them.
      dead: paths of what has no gradient after them.
    """

    adapters: Any
    losses: np.ndarray
    fresh: jax.Array
    logits: jax.Array
    dead: list[str]


def trained(logits_of: Callable[[Any], jax.Array], adapters: Any, tokens: jax.Array) -> Trained:
    """Returns adapters trained to predict the next token.

    Args:
      logits_of: the model's logits [batch, length, vocabulary], given its adapters.
    """
    optimizer = optax.adam(1e-2)

    def loss_of(adapters: Any) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(adapters)
        scores = logits[:, :-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
        return losses.mean(), logits

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        adapters, state = carry
        (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(adapters)
        updates, state = optimizer.update(grads, state)
        has_gradient = jax.tree.map(lambda one: jnp.any(one != 0), grads)
        after = optax.apply_updates(adapters, updates)
        return (after, state), (adapters, loss, logits, has_gradient)

    @jax.jit
    def run(adapters: Any) -> Any:
        states = lax.scan(step, (adapters, optimizer.init(adapters)), length=_STEPS + 1)[1]
        last, _, logits, has_gradient = jax.tree.map(lambda one: one[-1], states)
        return last, states[1], states[2][0], logits, has_gradient

    adapters, losses, fresh, logits, has_gradient = run(adapters)
    flat = jax.tree_util.tree_leaves_with_path(has_gradient)
    dead = [jax.tree_util.keystr(path) for path, one in flat if not one]
    return Trained(adapters, np.asarray(losses), fresh, logits, dead)


def train[Model: nnx.Module](
    model: Model, call: Callable[[Model], jax.Array], tokens: jax.Array
) -> Trained:
    """Trains the adapters of an nnx model, in place."""
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    result = trained(lambda one: call(nnx.merge(graphdef, one, rest)), adapters, tokens)
    nnx.update(model, result.adapters)
    return result


def drawn(shapes: Any) -> Any:
    """Returns random parameters of these shapes, of weights and of vectors that scale."""
    rng = np.random.default_rng(7)

    def draw(one: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=one.shape)
        return jnp.asarray(0.3 * noise if one.ndim > 1 else 1 + 0.1 * noise, one.dtype)

    return jax.tree.map(draw, shapes)


def difference(one: jax.Array, other: jax.Array) -> float:
    """Returns the largest difference, as a share of the largest number of `other`."""
    found, wanted = (np.asarray(array, np.float64) for array in (one, other))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def keeps(model: nnx.Module, base: nnx.Module) -> bool:
    """Returns whether all parameters of `base` are those of the model adapted from it."""
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    flat = nnx.to_flat_state(nnx.state(base, nnx.Param))
    return all(np.array_equal(one.get_value(), after[path].get_value()) for path, one in flat)
