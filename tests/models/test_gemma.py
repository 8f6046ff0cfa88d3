"""gemma's linen models, whole: all that products read is adapted, trains and merges."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage, join_adapters, merge_dora, split_adapters
from tests.models.gemma_models import EXAMPLE, MODELS, TOKENS, made

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # what gemma warns of is gemma's
]
RULES = [DoRARule("all-linear", 4, 8), DoRARule("embedder", 4, 8)]
WEIGHTS = {"Gemma2": 9, "Gemma3": 11, "Gemma4": 11, "Gemma4 MoE": 17}


@pytest.fixture(autouse=True)
def _as_gemma_computes():
    """gemma promotes ranks and dtypes as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _difference(one, other) -> float:
    return float(jnp.abs(one - other).max() / jnp.abs(other).max())


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_trains_and_merges(name):
    model, base = made(name)
    table = coverage(model, *EXAMPLE)
    assert len(table.weights) == table.count("adaptable") == WEIGHTS[name]
    assert not any(one.merged_bytes for one in table.weights)
    adapted = apply_dora(model, RULES, example=EXAMPLE)
    add = functools.partial(adapted.apply, rngs={"params": jax.random.key(1)}, mutable=["params"])
    variables = jax.jit(add)(base, TOKENS)[1]
    adapters, frozen = split_adapters(variables["params"])
    assert len(jax.tree.leaves(adapters)) == 3 * WEIGHTS[name]

    @jax.jit
    def logits(variables):
        return adapted.apply(variables, TOKENS).logits

    expected = jax.jit(lambda variables: model.apply(variables, TOKENS).logits)
    assert _difference(logits(variables), expected(base)) <= 2e-5
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(adapters, state):
        def loss(adapters):
            joined = {"params": join_adapters(adapters, frozen)}
            scores = adapted.apply(joined, TOKENS).logits[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, TOKENS[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value, grads

    state, losses, grads = optimizer.init(adapters), [], None
    for _ in range(20):
        adapters, state, value, grads = step(adapters, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    dead = [
        jax.tree_util.keystr(path)
        for path, one in jax.tree_util.tree_leaves_with_path(grads)
        if not jnp.any(one)
    ]
    assert not dead
    trained = {"params": join_adapters(adapters, frozen)}
    merged = merge_dora(adapted, trained, *EXAMPLE)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert _difference(expected(merged), logits(trained)) <= 2e-5
    assert _difference(expected(base), logits(trained)) > 1e-2
