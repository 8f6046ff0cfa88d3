"""Checks a whole model with a new adapter: it computes the same as its base, trains, and merges.

Twenty training steps are one compiled program.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jax_dora
from jax_dora import linen

_STEPS = 20


class Trained(NamedTuple):
    """The results of training.

    Attributes:
      adapters: after the last step.
      losses: before the first step and after each step.
      fresh: logits before the first step.
      logits: logits after the last step.
      dead: paths of parameters whose gradient is 0 after the last step.
    """

    adapters: Any
    losses: np.ndarray
    fresh: jax.Array
    logits: jax.Array
    dead: list[str]


def trained(logits_of: Callable[[Any], jax.Array], adapters: Any, tokens: jax.Array) -> Trained:
    """Trains adapters to predict the next token.

    Args:
      logits_of: returns the model's logits [batch, length, vocabulary], given its adapters.
    """
    optimizer = optax.adam(1e-2)

    def loss_of(adapters: Any) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(adapters)
        scores = logits[:, :-1].astype(jnp.float32)
        # One-hot products: a lookup on explicit mesh axes would need an output sharding.
        wanted = jax.nn.one_hot(tokens[:, 1:], scores.shape[-1])
        return -jnp.sum(wanted * jax.nn.log_softmax(scores), -1).mean(), logits

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        adapters, state = carry
        (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(adapters)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies an integer by floats
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


def check_nnx(
    model: Any, base: Any, call: Callable[[Any], jax.Array], tokens: jax.Array, close: float
) -> Trained:
    """Trains the new adapter of `model`, in place. Asserts that all of its parameters are trained,
    that it can be merged, and that the base does not change.

    Args:
      base: the model before it was adapted.
      call: returns the logits of a model.
      close: the largest `difference` between results that are equal except for rounding.
    """
    plain = nnx.jit(call)  # traced once for the base and for what it is merged to
    logits = plain(base)
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    result = trained(lambda one: call(nnx.merge(graphdef, one, rest)), adapters, tokens)
    nnx.update(model, result.adapters)
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, one in nnx.to_flat_state(nnx.state(base, nnx.Param)):
        assert np.array_equal(one.get_value(), after[path].get_value()), path
    merged = jax_dora.merge_dora(model)
    assert type(merged) is type(base)
    _check(result, logits, plain(merged), close)
    return result


def check_linen(
    model: Any,
    adapted: Any,
    base: Any,
    example: tuple[Any, ...],
    logits_of: Callable[[Any], jax.Array] = lambda result: result,
    close: float = 2e-5,
) -> Any:
    """Asserts the same of a linen model; returns its untrained adapters.

    Args:
      adapted: the module with adapters.
      base: the variables of `model`.
      example: the arguments of a call, tokens first.
      logits_of: returns the logits, given the result of a call.
    """
    add = functools.partial(adapted.apply, rngs={"params": jax.random.key(1)}, mutable=["params"])
    _, variables = jax.jit(add)(base, *example)
    adapters, frozen = linen.split_adapters(variables["params"])
    jax.tree.map(np.testing.assert_array_equal, frozen, dict(base["params"]))

    def joined(adapters: Any) -> dict[str, Any]:
        return {"params": linen.join_adapters(adapters, frozen)}

    plain = jax.jit(lambda variables: logits_of(model.apply(variables, *example)))

    def logits(adapters: Any) -> jax.Array:
        return logits_of(adapted.apply(joined(adapters), *example))

    result = trained(logits, adapters, example[0])
    merged = linen.merge_dora(adapted, joined(result.adapters), *example)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    _check(result, plain(base), plain(merged), close)
    return adapters


def _check(result: Trained, of_base: jax.Array, of_merged: jax.Array, close: float) -> None:
    assert difference(result.fresh, of_base) <= close
    assert result.losses[-1] < result.losses[0]
    assert not result.dead
    assert difference(of_merged, result.logits) <= close
    assert difference(of_base, result.logits) > 1e-2


def drawn(shapes: Any) -> Any:
    """Returns random parameters of these shapes: weights near 0, vectors near 1."""
    rng = np.random.default_rng(7)

    def draw(one: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=one.shape)
        return jnp.asarray(0.3 * noise if one.ndim > 1 else 1 + 0.1 * noise, one.dtype)

    return jax.tree.map(draw, shapes)


def difference(one: jax.Array, other: jax.Array) -> float:
    """Returns the largest difference divided by the largest magnitude in `other`."""
    found, wanted = (np.asarray(array, np.float64) for array in (one, other))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
