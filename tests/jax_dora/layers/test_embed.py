"""DoRAEmbed: against the oracle, whose input rows are one-hot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import NamedSharding

from jax_dora import DoRAEmbed, DoRARule, apply_dora, get_adapter, set_adapter
from parity import oracle, tolerances
from tests.jax_dora.matrices import differentiate, trained
from tests.jax_dora.meshes import explicit
from tests.matrices import Problem, judge, within
from tests.tables import thinned

VOCABULARY, FEATURES, RANK, ALPHA = 41, 24, 3, 4.0


def make(dtype=jnp.float32, **options) -> DoRAEmbed:
    base = nnx.Embed(VOCABULARY, FEATURES, param_dtype=dtype, rngs=nnx.Rngs(0))
    return DoRAEmbed(base, rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1), **options)


@pytest.mark.parametrize(
    "dtype", thinned([jnp.float32, jnp.bfloat16, jnp.float16], [jnp.float32, jnp.bfloat16])
)
@pytest.mark.ci
def test_agrees_with_the_oracle(dtype):
    layer = trained(make(dtype))
    ids = jax.random.randint(jax.random.key(0), (3, 7), 0, VOCABULARY)
    y, dy, grads, _ = differentiate(layer, ids)
    assert y.dtype == dtype
    assert y.shape == (3, 7, FEATURES)
    problem = Problem(
        x=np.eye(VOCABULARY)[np.asarray(ids).reshape(-1)],
        dy=dy.reshape(-1, FEATURES),
        kernel=layer.embedding[...],
        lora_a=layer.lora_a[...],
        lora_b=layer.lora_b[...],
        magnitude=layer.magnitude[...],
        y=y.reshape(-1, FEATURES),
        d_lora_a=grads["lora_a"][...],
        d_lora_b=grads["lora_b"][...],
        d_magnitude=grads["magnitude"][...],
    )
    judge(problem, layer.scale, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.ci
def test_a_fresh_adapter_changes_no_bit(dtype):
    layer = make(dtype)
    base = nnx.Embed(VOCABULARY, FEATURES, param_dtype=dtype, rngs=nnx.Rngs(0))
    ids = jnp.arange(VOCABULARY)
    assert jnp.array_equal(layer(ids), base(ids))
    norm = jnp.linalg.norm(layer.embedding[...].astype(jnp.float32), axis=0)
    assert jnp.allclose(layer.magnitude[...], norm, rtol=1e-6)
    assert jnp.any(layer.lora_b[...] != 0)


@pytest.mark.parametrize("adapter_dtype", [jnp.float32, jnp.bfloat16])
def test_attend_multiplies_by_the_adapted_embedding(adapter_dtype):
    layer = trained(make(adapter_dtype=adapter_dtype))
    query = jax.random.normal(jax.random.key(3), (5, FEATURES))
    weights = oracle.from_flax(layer.embedding[...], layer.lora_a[...], layer.lora_b[...])
    merged = oracle.merged_weight(*weights, layer.magnitude[...], layer.scale, jnp.float32)
    exact = oracle.fp64(query) @ merged
    with jax.default_matmul_precision("highest"):
        found = layer.attend(query)
    # Two sums of products, of FEATURES and RANK terms, whose factors are rounded a few times.
    length = tolerances.two_norm_of_products(oracle.fp64(query), merged)
    bound = tolerances.accumulation(FEATURES, exact, length)
    within(found, exact, 4 * bound + 8 * tolerances.rounding(length, jnp.float32))


def test_attend_may_leave_a_tied_head_as_it_was():
    layer = trained(make(adapt_attend=False))
    base = nnx.Embed(VOCABULARY, FEATURES, rngs=nnx.Rngs(0))
    query = jax.random.normal(jax.random.key(3), (5, FEATURES))
    assert jnp.array_equal(layer.attend(query), base.attend(query))
    ids = jnp.arange(VOCABULARY)
    assert jnp.array_equal(layer(ids), trained(make())(ids))
    with pytest.raises(TypeError, match="adapt_attend is 'no'; expected True, False or None"):
        make(adapt_attend="no")


def test_adapt_attend_is_the_rules_and_goes_with_the_adapter():
    base = nnx.Dict(embed=nnx.Embed(5, 4, rngs=nnx.Rngs(0)), out=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    rule = DoRARule("embed", rank=2, alpha=2, adapt_attend=False)
    model = apply_dora(base, rule, rngs=nnx.Rngs(0))
    assert model["embed"].adapt_attend is False
    assert set_adapter(base, get_adapter(model))["embed"].adapt_attend is False
    assert apply_dora(base, DoRARule("embed", 2, 2), rngs=nnx.Rngs(0))["embed"].adapt_attend is True
    with pytest.raises(ValueError, match=r"'out' cannot be.*adapt_attend is True for an nnx\.Lin"):
        apply_dora(base, DoRARule("out", 2, 2, adapt_attend=True), rngs=nnx.Rngs(0))


def test_rows_over_the_explicit_axis_that_has_the_features_too():
    """As under FSDP."""
    layer = trained(make())
    ids = jax.random.randint(jax.random.key(0), (4, 3), 0, VOCABULARY)
    expected = layer(ids)
    mesh = explicit(fsdp=4)
    specs = {"embedding": P(None, "fsdp"), "lora_b": P(None, "fsdp"), "magnitude": P("fsdp")}
    for name in ("embedding", "lora_a", "lora_b", "magnitude"):
        parameter = getattr(layer, name)
        sharding = NamedSharding(mesh, specs.get(name, P()))
        parameter.set_value(jax.device_put(parameter[...], sharding))
    ids = jax.device_put(ids, NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        y = layer(ids, out_sharding=P("fsdp", None, None))
    assert y.sharding.spec == P("fsdp", None, None)
    within(y, np.asarray(expected), tolerances.caps.OPERATOR_FP32_MAX_ABS)


def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"dropout is 0\.1 for an embedding.*expected 0"):
        make(dropout=0.1)
