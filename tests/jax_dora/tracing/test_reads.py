"""What a traced call of a model says of weights that are out of the ordinary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora import DoRARule, apply_dora, coverage, merge_dora, quantize
from parity import oracle
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.drawn import normals
from tests.jax_dora.small_models import call, train
from tests.matrices import within

X = normals(3)(2, 3, 1)


class Lone(nnx.Module):
    """Embeds numbers one by one, and reads one back, as models of tables do."""

    def __init__(self):
        draw = normals(0)
        self.spread = nnx.Param(draw(1, 5))
        self.heads = nnx.Param(draw(5, 1, 4))
        self.last = nnx.Param(draw(4, 1))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ self.spread[...])
        return jnp.einsum("btd,dnh->btnh", x, self.heads[...])[..., 0, :] @ self.last[...]


def test_a_weight_with_one_input_is_adapted():
    base = Lone()
    told = {one.path: one.how for one in coverage(base, X).weights}
    assert told == {
        "spread": "read by a product, io",
        "heads": "read by a product, ioo",
        "last": "read by a product, io",
    }
    rule = DoRARule(".*", 2, 3)
    adapted = train(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(X,)))
    assert adapted.spread_lora_a.shape == (1, 2)
    assert adapted.spread_magnitude.shape == (5,)
    found, merged = (np.asarray(call(one, X)) for one in (adapted, merge_dora(adapted)))
    within(found, merged, OPERATOR_FP32_MAX_ABS)


class OneLayer(nnx.Module):
    """Runs one layer in a scan of length 1: with an axis that the call inserts, or as a carry that
    a rematerialised step returns."""

    def __init__(self, *, is_carry: bool):
        self.w, self.is_carry = nnx.Param(normals(4)(5, 5)), is_carry

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w)

        if not self.is_carry:
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, self.w[...][None])[0]

        @jax.checkpoint
        def step(carry, _):
            x, w = carry
            return (jax.jit(layer)(x, w), w), None

        return jax.lax.scan(step, (x, self.w[...]), None, 1)[0][0]


@pytest.mark.parametrize("is_carry", [False, True], ids=["inserted", "carry"])
def test_a_scan_of_one_that_is_no_stack_reads_the_weight_as_its_step_does(is_carry):
    base, x = OneLayer(is_carry=is_carry), normals(5)(3, 5)
    [told] = coverage(base, x).weights
    assert (told.how, told.merged_bytes) == ("read by a product, io", 0)
    rule = DoRARule("all-linear", 2, 3)
    adapted = train(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,)))
    arrays = (adapted.w_lora_a[...], adapted.w_lora_b[...])
    operands = oracle.from_flax(base.w[...], *arrays)
    merged = oracle.merged_weight(*operands, np.asarray(adapted.w_magnitude[...]), rule.scale)
    within(np.asarray(call(adapted, x)), np.tanh(oracle.fp64(x) @ merged.T), OPERATOR_FP32_MAX_ABS)


@pytest.mark.parametrize(
    ("equation", "axes", "lacks"),
    [("tio,io->t", "ii", "keeps none of its axes"), ("ti,io->tio", "bo", "contracts none")],
)
def test_a_product_that_is_no_projection_is_told(equation, axes, lacks):
    class Scores(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normals(6)(3, 5))

        def __call__(self, x):
            return jnp.einsum(equation, x, self.w[...])

    x = jnp.ones((2, 3, 5) if "tio," in equation else (2, 3))
    [row] = coverage(Scores(), x).weights
    assert row.how.startswith(f"the product that reads it, {axes}, {lacks}")


class Table(nnx.Module):
    def __init__(self):
        self.rows = nnx.Param(normals(1)(7, 5))

    def look_up(self, ids: jax.Array) -> jax.Array:
        return self.rows[...][ids]

    def score(self, x: jax.Array) -> jax.Array:
        return x @ self.rows[...].T


class Reader(nnx.Module):
    """Reads the table of its member, in which the reading of a call may be all or a part."""

    def __init__(self):
        self.table = Table()

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.score(self.table.look_up(ids))

    def score(self, x: jax.Array) -> jax.Array:
        return x @ self.table.rows[...].T


IDS, ROW = jnp.array([[1, 2, 5]]), normals(2)(1, 5)


@pytest.mark.parametrize(
    "method", [lambda table: table.look_up(IDS), lambda table: table.score(ROW)]
)
def test_methods_of_a_member_read_its_adapted_weight_without_their_parent(method):
    rule = DoRARule("table", 2, 3)
    adapted = train(apply_dora(Reader(), rule, rngs=nnx.Rngs(1), example=(IDS,)))
    merged = merge_dora(adapted)
    within(method(adapted.table), np.asarray(method(merged.table)), OPERATOR_FP32_MAX_ABS)


def test_reads_without_the_adapter_are_told():
    rule, example = DoRARule("table", 2, 3), lambda model: model.table.look_up(IDS)
    adapted = apply_dora(Reader(), rule, rngs=nnx.Rngs(1), example=example)
    [inside], [outside] = (coverage(adapted, call).weights for call in (example, lambda m: m(IDS)))
    assert inside.how == "read by its module's methods"
    assert "read without its adapter by others: call these too in example=" in outside.how


class Tables(nnx.Module):
    """An encoder with tables of 30 tokens, 12 positions and 5 relative distances."""

    def __init__(self, features: int) -> None:
        rngs = nnx.Rngs(0)
        self.tokens, self.positions = nnx.Embed(30, 8, rngs=rngs), nnx.Embed(12, 8, rngs=rngs)
        self.distances = nnx.Embed(5, 1, rngs=rngs)
        self.up, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, features, rngs=rngs)

    def __call__(self, ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        count = jnp.arange(ids.shape[1])
        places = jnp.broadcast_to(count if positions is None else positions, ids.shape)
        x = self.tokens(ids) + self.positions(places)
        bias = self.distances(jnp.clip(count[:, None] - count[None], 0, 4))[..., 0]
        return self.last(jnp.tanh(self.up(jnp.einsum("ts,bsd->btd", bias, x))))


TOKENS = jnp.arange(6).reshape(2, 3)


@pytest.mark.parametrize(("features", "is_head"), [(30, True), (12, False), (5, False), (8, False)])
@pytest.mark.parametrize(
    "example",
    [
        (TOKENS,),
        lambda model: model(TOKENS),
        lambda model: nnx.jit(nnx.remat(lambda model, ids: model(ids)))(model, TOKENS),
    ],
    ids=["arguments", "function", "compiled"],
)
def test_a_head_has_the_vocabulary_that_inputs_look_up(features, is_head, example):
    adapted = apply_dora(
        Tables(features), DoRARule("all-linear", 2, 3), rngs=nnx.Rngs(1), example=example
    )
    assert isinstance(adapted.up, jax_dora.DoRALinear)
    assert isinstance(adapted.last, jax_dora.DoRALinear) == (not is_head)


def test_as_many_features_as_rows_have_are_no_head():
    base = Tables(8)
    base.positions = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
    told = coverage(base, TOKENS, jnp.arange(3))
    assert [one.path for one in told.weights if one.is_linear] == ["up", "last"]


class Gathered(nnx.Module):
    """Takes an expert for each token."""

    def __init__(self):
        self.experts = nnx.Param(normals(4)(3, 5, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        each = self.experts[...][jnp.arange(x.shape[0]) % 3]
        return jnp.einsum("td,tdf->tf", x, each)


def test_gathered_experts_are_registered_as_experts(registrations):
    jax_dora.register(Gathered, param="experts", axes="bio")
    base, x = Gathered(), normals(5)(4, 5)
    [row] = coverage(base, x).weights
    assert (row.how, row.is_linear, row.merged_bytes) == ("registered, bio", True, 4 * 60)
    rule = DoRARule(".*", 2, 3)
    adapted = train(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,)))
    within(call(adapted, x), np.asarray(call(merge_dora(adapted), x)), OPERATOR_FP32_MAX_ABS)
    adapter = jax_dora.get_adapter(adapted)
    assert [one.is_lookup for one in adapter.weights] == [False]


def test_a_quantised_kernel_that_its_parent_reads_is_refused():
    class Parent(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return x @ self.inner.kernel[...]

    base, x = quantize(Parent(), "int8"), jnp.ones((2, 64))
    [row] = coverage(base, x).weights
    assert row.status == "not adaptable"
    with pytest.raises(TypeError, match=r"inner \(nnx.Linear\): it is quantised, .* quantize"):
        apply_dora(base, DoRARule(".*", 2, 3), rngs=nnx.Rngs(1), example=(x,))
