"""Models that bonsai writes for an explicit mesh, adapted whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from jax_dora import DoRARule, apply_dora, coverage, get_adapter, merge_dora
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.weights.sharded_models import VOCABULARY, Own, Tied

pytestmark = pytest.mark.slow


@pytest.fixture
def mesh():
    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=kinds, devices=jax.devices()[:4])
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

    @nnx.jit
    def call(model):
        with jax.default_matmul_precision("highest"):
            return model(ids)

    def close(found, expected) -> bool:
        bound = OPERATOR_FP32_MAX_ABS * max(1.0, float(jnp.abs(expected).max()))
        return float(jnp.abs(found - expected).max()) <= bound

    assert close(call(model), call(base))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    wrt = nnx.DiffState(0, nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            targets = jax.nn.one_hot(ids[:, 1:], VOCABULARY)
            return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(model(ids)[:, :-1]), -1))

        value, grads = nnx.value_and_grad(loss, argnums=wrt)(model)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, grads)
        return value, jax.tree.map(lambda one: jnp.any(one != 0), grads)

    before = nnx.to_flat_state(nnx.state(base, nnx.Param))
    losses, alive = [], None
    for _ in range(20):
        value, alive = step(model, optimizer)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert all(map(bool, jax.tree.leaves(alive)))
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert all(jnp.array_equal(one[...], after[path][...]) for path, one in before)
    merged = merge_dora(model)
    assert type(merged) is kind
    assert close(call(merged), call(model))
    assert not close(call(base), call(model))
