"""gemma's linen models, whole: all that products read is adapted, trains and merges."""

import functools

import jax
import pytest

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage, join_adapters, merge_dora, split_adapters
from tests.models.gemma_models import EXAMPLE, MODELS, TOKENS, made
from tests.models.training import difference, trained

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

    expected = jax.jit(lambda variables: model.apply(variables, TOKENS).logits)

    def logits(adapters):
        return adapted.apply({"params": join_adapters(adapters, frozen)}, TOKENS).logits

    result = trained(logits, adapters, TOKENS)
    assert difference(result.fresh, expected(base)) <= 2e-5
    assert result.losses[-1] < result.losses[0]
    assert not result.dead
    joined = {"params": join_adapters(result.adapters, frozen)}
    merged = merge_dora(adapted, joined, *EXAMPLE)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert difference(expected(merged), result.logits) <= 2e-5
    assert difference(expected(base), result.logits) > 1e-2
