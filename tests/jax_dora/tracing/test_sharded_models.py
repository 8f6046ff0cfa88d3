"""Models that bonsai writes for an explicit mesh, adapted whole."""

import jax
import pytest
from flax import nnx
from jax import P

from jax_dora import DoRARule, apply_dora, coverage, get_adapter
from tests.jax_dora.meshes import explicit
from tests.jax_dora.tracing.sharded_models import VOCABULARY, Own, Tied
from tests.whole_models import check_nnx

pytestmark = pytest.mark.slow


@pytest.fixture
def mesh():
    mesh = explicit(fsdp=2, tp=2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize(
    ("kind", "count", "embedding"), [(Tied, 15, "embedder"), (Own, 16, "wte|ff_out")]
)
def test_every_weight_is_adapted_trained_and_merged(mesh, kind, count, embedding):
    base = kind(nnx.Rngs(0))
    ids = jax.random.randint(jax.random.key(1), (4, 5), 0, VOCABULARY)
    ids = jax.device_put(ids, P("fsdp", None))
    table = coverage(base, ids)
    assert table.count("adaptable") == len(table.weights) == count
    assert not any(one.merged_bytes for one in table.weights)
    tables = [one.path for one in table.weights if one.how.startswith("looked up")]
    assert tables == [embedding.split("|")[0]]
    rules = [DoRARule("all-linear", 2, 3.0), DoRARule(embedding, 2, 5.0)]
    model = apply_dora(base, rules, rngs=nnx.Rngs(1), example=(ids,))
    assert len(get_adapter(model).arrays) == count
    if kind is Own:
        up = model.blocks[0].up
        assert (up.lora_a[...].sharding.spec, up.magnitude[...].sharding.spec) == (
            P("fsdp", None),
            P("tp"),
        )
    check_nnx(model, base, lambda model: model(ids), ids, 2e-5)
