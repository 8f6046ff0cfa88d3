"""gemma's linen models, whole: all that products read is adapted, trains and merges."""

import jax
import pytest

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage
from tests.models.gemma_models import EXAMPLE, MODELS, made
from tests.tables import thinned
from tests.whole_models import check_linen

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # what gemma warns of is gemma's
]
RULES = [DoRARule("all-linear", 4, 8), DoRARule("embedder", 4, 8)]
WEIGHTS = {"Gemma2": 9, "Gemma3": 11, "Gemma4": 11, "Gemma4 MoE": 17}


@pytest.mark.parametrize("name", thinned(MODELS, ["Gemma3", "Gemma4", "Gemma4 MoE"]))
def test_a_whole_model_trains_and_merges(name):
    model, base = made(name)
    table = coverage(model, *EXAMPLE)
    assert len(table.weights) == table.count("adaptable") == WEIGHTS[name]
    assert not any(one.merged_bytes for one in table.weights)
    adapted = apply_dora(model, RULES, example=EXAMPLE)
    adapters = check_linen(model, adapted, base, EXAMPLE, lambda result: result.logits)
    assert len(jax.tree.leaves(adapters)) == 3 * WEIGHTS[name]
