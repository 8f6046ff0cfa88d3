"""Layers that quantise their activations too: plain and adapted, and what keeps them so."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import DoRARule, apply_dora, coverage, merge_dora, quantize
from jax_dora.layers.quantised_kernel import act_qtype_of
from jax_dora.ops import row_scaled
from jax_dora.ops.operands import ProductSettings
from tests.jax_dora.meshes import automatic
from tests.jax_dora.small_models import Mixed, train

FP8 = "float8_e4m3fn"
RULE = DoRARule("all-linear", 3, 4.0)


class Block(nnx.Module):
    """A gated half, and a projection of two axes."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(16, 24, rngs=rngs)
        self.up = nnx.Linear(16, 24, use_bias=False, rngs=rngs)
        self.down = nnx.LinearGeneral((4, 6), (2, 8), axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        hidden = jax_dora.swiglu(self.gate, self.up, x)
        return self.down(hidden.reshape(*x.shape[:-1], 4, 6))


@pytest.mark.parametrize("bwd_qtype", [None, *row_scaled.BWD_QTYPES])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.ci
def test_copies_are_the_same_layers(bwd_qtype, copied):
    model = quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8, bwd_qtype=bwd_qtype)
    other = copied(model)
    assert nnx.graphdef(other) == nnx.graphdef(model)
    adapted = apply_dora(other, RULE, rngs=nnx.Rngs(1))
    assert nnx.graphdef(jax_dora.remove_dora(adapted)) == nnx.graphdef(model)


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32)


@pytest.mark.ci
def test_plain_layers_compute_by_rows_and_a_fresh_adapter_changes_no_bit():
    x = inputs()
    base = quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8)
    assert type(base.gate) is nnx.Linear
    adapted = apply_dora(base, RULE, rngs=nnx.Rngs(1))
    assert [layer.act_qtype for layer in (base.up, adapted.gate, adapted.down)] == [FP8] * 3
    hidden = jnp.ones((3, 4, 6)) * x[:, :6][:, None]

    @nnx.jit
    def results(model, x, hidden):
        return model(x), model.up(x), model.down(hidden)

    (whole, *parts), (plain, up, down) = (results(one, x, hidden) for one in (adapted, base))
    np.testing.assert_array_equal(parts[0], up)
    np.testing.assert_array_equal(parts[1], down)
    # The fused half adds its biases in one rounding less.
    np.testing.assert_allclose(whole, plain, rtol=1e-5, atol=1e-6)
    wanted = jax.jit(row_scaled.linear, static_argnums=0)(
        ProductSettings(None), row_scaled.Factors(x, base.up.kernel[...])
    )
    np.testing.assert_array_equal(up, wanted)
    then = quantize(apply_dora(Block(nnx.Rngs(0)), RULE, rngs=nnx.Rngs(1)), FP8, act_qtype=FP8)
    assert nnx.graphdef(then) == nnx.graphdef(adapted)


def test_activations_are_rounded_and_gradients_are_those_without():
    x = inputs()
    rounded = train(
        apply_dora(quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8), RULE, rngs=nnx.Rngs(1))
    )
    whole = jax_dora.set_adapter(
        apply_dora(quantize(Block(nnx.Rngs(0)), FP8), RULE, rngs=nnx.Rngs(1)),
        jax_dora.get_adapter(rounded),
    )

    def linear(model, x):
        return (model.up(x) * jnp.arange(24.0)[None]).sum()

    both = nnx.jit(lambda m, x: (m(x), nnx.grad(linear, argnums=1)(m, x)))
    one, other = both(rounded, x), both(whole, x)
    off = jnp.linalg.norm(one[0] - other[0]) / jnp.linalg.norm(other[0])
    assert 1e-3 < off < 0.1
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4)
    base = quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8)
    weight_only = quantize(Block(nnx.Rngs(0)), FP8)
    found, wanted = (nnx.jit(nnx.grad(linear, argnums=1))(m, x) for m in (base, weight_only))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_columns_lie_in_one_piece():
    def order(model):
        return model.up.kernel[...].qvalue.format.layout.major_to_minor

    base = quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8)
    adapted = apply_dora(base, RULE, rngs=nnx.Rngs(1))
    for model in (base, adapted, nnx.clone(adapted), nnx.merge(*nnx.split(adapted))):
        assert order(model) == (1, 0)
    assert order(quantize(Block(nnx.Rngs(0)), FP8)) == (0, 1)
    graphdef, state = nnx.split(adapted)
    x = inputs()
    # A program that returns the model gives it JAX's own layout, in which it is as good.
    back = jax.jit(lambda state: state)(state)
    assert order(nnx.merge(graphdef, back)) == (0, 1)
    compute = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    np.testing.assert_array_equal(compute(back, x), compute(state, x))


def test_a_model_that_is_placed_on_a_mesh():
    mesh, x = automatic(x=2), inputs()
    model = quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8)
    wanted = model.up(x)
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    assert model.up.kernel[...].qvalue.format.layout.major_to_minor == (1, 0)
    np.testing.assert_allclose(model.up(x), wanted, rtol=1e-6)
    sharded = jax.device_put(x, NamedSharding(mesh, P(None, "x")))
    np.testing.assert_allclose(model.up(sharded), wanted, rtol=1e-5)


@pytest.mark.slow
def test_coverage_merging_and_removing():
    model = train(
        apply_dora(quantize(Block(nnx.Rngs(0)), FP8, act_qtype=FP8), RULE, rngs=nnx.Rngs(1))
    )
    assert "float8_e4m3fn, scales 1×24, activations float8_e4m3fn" in str(coverage(model))
    assert act_qtype_of(jax_dora.remove_dora(model).gate) == FP8
    merged = merge_dora(model)
    assert act_qtype_of(merged.gate) is None
    assert not hasattr(merged.gate, "act_qtype")
    again, _ = merge_dora(model, requantize=True, return_report=True)
    assert act_qtype_of(again.gate) == FP8
    x = inputs()
    found, wanted = (nnx.jit(lambda model, x: model(x))(one, x) for one in (again, model))
    assert jnp.linalg.norm(found - wanted) < 0.1 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("make", "qtype", "options", "error", "message"),
    [
        (Block, FP8, {"act_qtype": "int8"}, ValueError, "act_qtype is 'int8'; expected None"),
        (Block, FP8, {"bwd_qtype": FP8}, ValueError, "and act_qtype None; expected act_qtype="),
        (
            Block,
            "int8",
            {"act_qtype": FP8},
            ValueError,
            "with qtype 'int8'; expected qtype 'float8_e4m3fn'",
        ),
        (Block, FP8, {"act_qtype": FP8, "tile_size": 8}, ValueError, "and tile_size 8; expected"),
        (
            Mixed,
            FP8,
            {"act_qtype": FP8, "path": "conv|pairs/.*|blocks/.*"},
            TypeError,
            r"(?s)rows by one matrix; expected nnx.Linear.*conv \(nnx.Conv",
        ),
    ],
)
def test_bad_input(make, qtype, options, error, message):
    with pytest.raises(error, match=message):
        quantize(make(nnx.Rngs(0)), qtype, **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gated_half_in_fp8_has_the_gradients_of_both_layers(dtype):
    """Its projections multiply by g, and take gradients that SwiGLU has multiplied by it."""
    halves = nnx.Dict(
        gate=nnx.Linear(16, 24, use_bias=False, rngs=nnx.Rngs(0)),
        up=nnx.Linear(16, 24, use_bias=False, rngs=nnx.Rngs(1)),
    )
    model = quantize(halves, FP8, act_qtype=FP8, bwd_qtype="float8_e5m2")
    model = train(apply_dora(model, RULE, rngs=nnx.Rngs(2)))
    model.gate.magnitude[...] *= 2.0
    x = inputs().astype(dtype)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 24)), dtype)

    def gradients(gated):
        def loss(model, x):
            return (gated(model, x) * weights).astype(jnp.float32).sum()

        of_model = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.jit(nnx.grad(loss, argnums=(of_model, 1)))(model, x)
        return jax.tree.leaves(grads)

    with jax.numpy_dtype_promotion("standard"):
        found = gradients(lambda model, x: jax_dora.swiglu(model.gate, model.up, x))
        wanted = gradients(lambda model, x: jax.nn.silu(model.gate(x)) * model.up(x))
    assert len(found) == 7
    for one, other in zip(found, wanted, strict=True):
        off = jnp.linalg.norm((one - other).astype(jnp.float32))
        # Near the middle of two codes, another one may be the nearest.
        assert off < 0.02 * jnp.linalg.norm(other.astype(jnp.float32))
