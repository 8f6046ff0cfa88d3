"""Norms as values: what computes, sets, uses and keeps them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding

import jax_dora
from jax_dora import DoRARule
from tests.jax_dora.meshes import automatic, mesh_of
from tests.jax_dora.programs import equations
from tests.tables import thinned

WIDTH = 16


class Model(nnx.Module):
    """Every kind of layer, one of them twice, and a scanned and rematerialised stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.heads = nnx.LinearGeneral(WIDTH, (2, 8), rngs=rngs)
        self.one = self.other = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.stack = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.conv(self.embed(ids))
        x = self.other(jnp.tanh(self.one(self.heads(x).reshape(x.shape))))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(policy=jax_dora.remat_policy(), prevent_cse=False)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return run(x, self.stack)


PATHS = ["embed", "conv", "heads", "one", "stack"]
IDS = jax.random.randint(jax.random.key(1), (2, 4, 5), 0, 11)


@pytest.fixture(scope="module")
def model() -> Model:
    init = nnx.initializers.normal(0.1)
    rule = DoRARule(".*", 4, 8, lora_a_init=init, lora_b_init=init)
    model = jax_dora.apply_dora(Model(nnx.Rngs(0)), rule, rngs=nnx.Rngs(1))
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, jax_dora.DoRAParam):
            variable[...] *= 1.1
    return model


def loss_fn(model, ids):
    return jnp.mean(model(ids) ** 2)


@nnx.jit
def gradients(model, values, ids):
    """The mean over micro-batches, each of which uses `values`, or computes its own norms."""

    def loss_of(model, ids):
        return loss_fn(model if values is None else jax_dora.with_norms(model, values), ids)

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    loss, total = nnx.value_and_grad(loss_of, argnums=wrt)(model, ids[0])
    for one in ids[1:]:
        more = nnx.grad(loss_of, argnums=wrt)(model, one)
        total = jax.tree.map(jnp.add, total, more)
    return loss, total


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def count_norms(function, *args) -> int:
    """How many norms the program of `function` takes."""
    return sum(str(one.params.get("op")) == "norm" for one in equations(function, *args))


def call(model):
    graphdef, state = nnx.split(model)
    return (lambda state, ids: loss_fn(nnx.merge(graphdef, state), ids)), state, IDS[0]


@pytest.mark.slow
def test_accumulating_with_the_norms_of_the_step_changes_no_bit(model):
    values = nnx.jit(jax_dora.norms)(model)
    assert sorted(values) == sorted(PATHS)
    assert values["stack"].shape == (3, WIDTH)
    assert values["heads"].shape == (2, 8)
    assert {value.dtype for value in values.values()} == {jnp.dtype("float32")}
    found, expected = gradients(model, values, IDS), gradients(model, None, IDS)
    assert_same(*(nnx.to_pure_dict(one[1]) for one in (found, expected)))
    assert_same(found[0], expected[0])
    assert all(leaf.any() for leaf in jax.tree.leaves(found[1]))


@pytest.mark.ci
def test_what_is_given_is_what_is_used(model):
    """No layer computes a norm behind it."""
    assert count_norms(*call(model)) == 6  # the shared layer's is computed by both of its calls
    values = jax_dora.norms(model)
    given = jax_dora.with_norms(model, values)
    assert count_norms(*call(given)) == 0
    assert count_norms(*call(jax_dora.freeze(model))) == 0
    assert count_norms(*call(model)) == 6
    halved = jax_dora.with_norms(model, values | {"one": values["one"] / 2})
    doubled = nnx.clone(model)
    doubled.one.magnitude[...] *= 2
    np.testing.assert_allclose(
        nnx.jit(loss_fn)(halved, IDS[0]), nnx.jit(loss_fn)(doubled, IDS[0]), rtol=1e-5
    )


def test_a_copy_shares_the_variables_and_leaves_the_model_alone():
    layer = jax_dora.DoRALinear(4, 4, rank=2, alpha=4, dropout=0.5, rngs=nnx.Rngs(0))
    before = nnx.graphdef(layer)
    given = jax_dora.with_norms(layer, jax_dora.norms(layer))
    assert nnx.graphdef(layer) == before
    assert given.lora_a is layer.lora_a
    count = layer.dropout.rngs.count[...]
    given(jnp.ones((1, 4)))
    assert layer.dropout.rngs.count[...] == count + 1


@pytest.mark.ci
def test_a_scan_by_hand_over_a_stack(model):
    """Each layer sees its own norm."""
    x = jax.random.normal(jax.random.key(2), (5, WIDTH))
    given = jax_dora.with_norms(model.stack, jax_dora.norms(model.stack))
    graphdef, layers = nnx.split(given)
    found = lax.scan(lambda x, one: (nnx.merge(graphdef, one)(x), None), x, layers)[0]
    graphdef, layers = nnx.split(model.stack)
    for i in range(3):
        x = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], layers))(x)
    np.testing.assert_allclose(found, x, rtol=1e-5)


@pytest.mark.parametrize("copied", ["given", "frozen"])
def test_adapters_come_out_of_a_copy_without_its_norms(model, copied):
    model = nnx.Dict(one=model.one, stack=model.stack)
    stale = jax.tree.map(jnp.ones_like, jax_dora.norms(model))
    copy = jax_dora.with_norms(model, stale) if copied == "given" else jax_dora.freeze(model)
    arrays = [jax_dora.get_adapter(one).arrays for one in (copy, model)]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, arrays), strict=True))
    again = jax_dora.set_adapter(copy, jax_dora.get_adapter(copy))
    assert again.one.given_norm is None
    assert type(again.one.lora_a) is nnx.LoRAParam
    merged = [jax_dora.merge_dora(one.stack).kernel[...] for one in (copy, model)]
    assert_same(*merged)
    assert type(jax_dora.remove_dora(copy).stack) is nnx.Linear


def test_freeze_leaves_nothing_to_train(model):
    frozen = jax_dora.freeze(model)
    assert frozen.one.kernel[...] is model.one.kernel[...]
    assert_same(nnx.jit(loss_fn)(frozen, IDS[0]), nnx.jit(loss_fn)(model, IDS[0]))
    assert not jax.tree.leaves(nnx.state(frozen, nnx.LoRAParam))
    adapter = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    parameters = [len(jax.tree.leaves(nnx.state(one, nnx.Param))) for one in (frozen, model)]
    assert parameters[0] == parameters[1] - len(adapter)
    divisions = sum(one.primitive.name == "div" for one in equations(*call(frozen)))
    assert divisions == 1, "the mean's alone: g is not computed"


def test_a_frozen_model_and_its_model_change_apart():
    layer = jax_dora.DoRALinear(8, 8, rank=2, alpha=4, dropout=0.5, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    frozen = jax_dora.freeze(model)
    frozen.eval()
    before = frozen(x)
    for variable in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        variable.set_value(variable.get_value() + 1)
    model(x)
    assert jnp.array_equal(frozen(x), before)
    other: Any = model.layers[1]
    mean, count = other.mean[...], layer.dropout.rngs.count[...]
    frozen.train()
    frozen(x)
    assert jnp.array_equal(other.mean[...], mean)
    assert layer.dropout.rngs.count[...] == count


def test_a_frozen_model_drops_nothing_until_it_is_trained():
    layer = jax_dora.DoRALinear(8, 8, rank=2, alpha=4, dropout=0.5, rngs=nnx.Rngs(0))
    layer.lora_b[...] += 1
    model = nnx.Sequential(layer, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 8))
    frozen = jax_dora.freeze(model)
    assert jnp.array_equal(frozen.layers[0](x), frozen.layers[0](x))
    other: Any = frozen.layers[1]
    assert not other.deterministic
    assert not layer.dropout.deterministic
    frozen.train()
    assert not jnp.array_equal(frozen.layers[0](x), frozen.layers[0](x))


def sharded_layer(rngs, names=None, width=128):
    return jax_dora.DoRALinear(
        *(width, WIDTH),
        rank=4,
        alpha=8,
        lora_b_init=nnx.initializers.normal(0.1),
        kernel_metadata={"out_sharding": names} if names else {},
        rngs=rngs,
    )


@pytest.mark.slow
def test_a_frozen_sharded_stack_stays_where_it_is():
    """`nnx.vmap` alone does not tell the metadata of the layers' axis."""
    mesh = automatic(b=4)
    with jax.set_mesh(mesh):
        make = nnx.vmap(lambda rngs: sharded_layer(rngs, (None, "b"), width=8))
        stack = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))
        frozen = jax_dora.freeze(stack)
        for name in ("lora_a", "lora_b", "magnitude"):
            assert getattr(frozen, name)[...] is getattr(stack, name)[...]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kind"),
    thinned(
        itertools.product([("a", "b"), (None, "b")], [AxisType.Explicit, AxisType.Auto]),
        [(("a", "b"), AxisType.Explicit)],
    ),
)
def test_norms_on_a_mesh(names, kind):
    expected = jax_dora.norms(sharded_layer(nnx.Rngs(0)))[""]
    mesh = mesh_of(kind, a=2, b=2)
    with jax.set_mesh(mesh):
        layer = sharded_layer(nnx.Rngs(0), names)
        values = jax_dora.norms(layer)
        np.testing.assert_allclose(values[""], expected, rtol=1e-6)
        x = jax.device_put(jnp.ones((4, 128)), NamedSharding(mesh, jax.P()))
        out = jax.P(None, "b") if kind is AxisType.Explicit else None
        given = jax_dora.with_norms(layer, values)
        np.testing.assert_allclose(given(x, out), layer(x, out), rtol=1e-6)


class Traced(nnx.Module):
    """Experts and another weight that the module's own code reads."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.experts = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, 8)))
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("eto,oi->eti", jnp.einsum("ti,eio->eto", x, self.experts[...]), self.w)


ROWS = jax.random.normal(jax.random.key(2), (5, WIDTH))
LATER: dict[str, Any] = {
    "every layer": (Model, IDS[0]),
    "grouped convolution": (
        lambda rngs: nnx.Conv(WIDTH, 8, (3,), feature_group_count=2, rngs=rngs),
        jax.random.normal(jax.random.key(2), (2, 5, WIDTH)),
    ),
    "einsum": (lambda rngs: nnx.Einsum("ti,oi->to", (8, WIDTH), rngs=rngs), ROWS),
    "traced": (Traced, ROWS),
    "quantised": (
        lambda rngs: jax_dora.quantize(nnx.Linear(WIDTH, 8, rngs=rngs), "nf4", tile_size=8),
        ROWS,
    ),
}


def with_later_weights(kind: str) -> tuple[Any, Any, jax.Array]:
    """Returns a fresh adapter over weights that came after it, their plain model, and inputs."""
    make, x = LATER[kind]
    rule = DoRARule(".*", 2, 4)
    model = jax_dora.apply_dora(make(nnx.Rngs(0)), rule, rngs=nnx.Rngs(1), example=(x,))
    plain = make(nnx.Rngs(7))
    doubled = jax.tree.map(lambda a: 2 * a if a.dtype == jnp.float32 else a, nnx.state(plain))
    nnx.update(plain, doubled)
    nnx.update(model, nnx.state(plain))
    return model, plain, x


@pytest.mark.parametrize(
    "kind", thinned(LATER, ["traced"], [kind for kind in LATER if kind != "traced"])
)
@pytest.mark.ci
def test_a_fresh_adapter_of_weights_that_came_later_changes_nothing(kind):
    model, plain, x = with_later_weights(kind)
    want = plain(x)
    copies = [jax_dora.freeze(model), jax_dora.with_norms(model, jax_dora.norms(model))]
    assert jnp.abs(model(x) - want).max() > 0.01 * jnp.abs(want).max()
    for one in (model, *copies):
        assert jax_dora.reset_magnitudes(one) is None
        np.testing.assert_allclose(one(x), want, rtol=1e-5, atol=1e-5)


@nnx.jit
def reset(model):
    jax_dora.reset_magnitudes(model)


@pytest.mark.parametrize("function", [jax_dora.reset_magnitudes, reset])
def test_magnitudes_are_reset_to_the_norms_of_the_adapter_as_it_is(model, function):
    changed = nnx.clone(model)
    kinds = {path: type(variable) for path, variable in nnx.iter_graph(changed)}
    function(changed)
    linear, stack = changed.one, changed.stack
    for layer, index in [(linear, ...), *((stack, number) for number in range(3))]:
        parts = (layer.kernel, layer.lora_a, layer.lora_b)
        kernel, lora_a, lora_b = (np.asarray(part[index], np.float64) for part in parts)
        want = np.linalg.norm(kernel + 2 * lora_a @ lora_b, axis=0)
        np.testing.assert_allclose(layer.magnitude[index], want, rtol=1e-6)
    assert kinds == {path: type(variable) for path, variable in nnx.iter_graph(changed)}


@pytest.mark.ci
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_magnitudes_that_are_reset_stay_sharded(kind):
    """The weights that came later are whole on every device."""
    mesh = mesh_of(kind, a=2, b=2)
    with jax.set_mesh(mesh):
        layer = sharded_layer(nnx.Rngs(0), ("a", "b"))
        before = layer.magnitude[...]
        later = jax.device_put(2 * layer.kernel[...], NamedSharding(mesh, jax.P()))
        layer.kernel.set_value(later)
        jax_dora.reset_magnitudes(layer)
        assert layer.magnitude[...].sharding == before.sharding
        parts = (layer.kernel, layer.lora_a, layer.lora_b)
        kernel, lora_a, lora_b = (np.asarray(part[...], np.float64) for part in parts)
        want = np.linalg.norm(kernel + layer.scale * lora_a @ lora_b, axis=0)
        np.testing.assert_allclose(layer.magnitude[...], want, rtol=1e-6)


def test_values_that_do_not_fit(model):
    values = jax_dora.norms(model)
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    functions = [jax_dora.norms, jax_dora.reset_magnitudes, jax_dora.freeze]
    for function in (*functions, lambda m: jax_dora.with_norms(m, {})):
        with pytest.raises(ValueError, match="Linear has no DoRA layer"):
            function(linear)
        with pytest.raises(TypeError, match=r"model is a dict; expected an nnx\.Module"):
            function({"model": model})
    with pytest.raises(ValueError, match=r"norms for \['other layer'\].*\n  conv\n  embed"):
        jax_dora.with_norms(model, values | {"other layer": values["one"]})
    with pytest.raises(TypeError, match="values is a NoneType; expected the dict"):
        jax_dora.with_norms(model, None)
    missing = {path: value for path, value in values.items() if path != "conv"}
    with pytest.raises(ValueError, match="values has no norm for 'conv'"):
        jax_dora.with_norms(model, missing)
    with pytest.raises(ValueError, match=r"shape \(16,\) for 'stack'; expected \(3, 16\)"):
        jax_dora.with_norms(model, values | {"stack": values["stack"][0]})
    with pytest.raises(TypeError, match=r"dtype bfloat16 for 'stack'; expected float32"):
        jax_dora.with_norms(model, values | {"stack": values["stack"].astype(jnp.bfloat16)})


class TestRematPolicy:
    """What a rematerialised layer computes twice."""

    @staticmethod
    def gradients(policy, **options):
        layer = jax_dora.DoRALinear(8, WIDTH, rank=2, alpha=4, rngs=nnx.Rngs(0), **options)
        graphdef, adapter, rest = nnx.split(layer, nnx.LoRAParam, ...)

        def loss(adapter, x):
            function = jax.checkpoint(
                lambda adapter, x: nnx.merge(graphdef, adapter, rest)(x), policy=policy
            )
            return jnp.sum(jnp.sin(function(adapter, x)))

        return jax.grad(loss, argnums=(0, 1)), adapter, jnp.ones((3, 8))

    def test_it_keeps_inner_where_asked(self):
        def products(function, *args):
            return str(jax.make_jaxpr(function)(*args)).count("op=project\n")

        plain = self.gradients(jax_dora.remat_policy(), keep_inner=False)
        kept = self.gradients(jax_dora.remat_policy(), keep_inner=True)
        assert products(*kept) == products(*plain) - 1
        assert_same(kept[0](*kept[1:]), plain[0](*plain[1:]))

    def test_it_keeps_further_names(self):
        @functools.partial(jax.checkpoint, policy=jax_dora.remat_policy("attention"))
        def function(x):
            return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "attention"))

        assert str(jax.make_jaxpr(jax.grad(function))(1.0)).count("= sin ") == 2

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            (3, TypeError, "remat_policy got 3; expected names, as strings"),
            ("", ValueError, "remat_policy got ''"),
        ],
    )
    def test_it_refuses_what_no_array_is_called(self, name, error, message):
        with pytest.raises(error, match=message):
            jax_dora.remat_policy("other", name)


@pytest.mark.ci
def test_magnitudes_of_weights_that_came_later(model):
    """The base model's weights are put into an adapted model, by nnx.update and by assignment."""
    pretrained, late = Model(nnx.Rngs(7)), nnx.clone(model)
    nnx.update(late, nnx.state(pretrained, nnx.Param))
    for _, variable in nnx.iter_graph(late):
        if isinstance(variable, nnx.LoRAParam) and not isinstance(variable, jax_dora.DoRAParam):
            variable[...] *= 0
    assert not np.allclose(late(IDS), pretrained(IDS), rtol=0.05)
    kept = jax_dora.with_norms(late, jax_dora.norms(late))
    assert jax_dora.reset_magnitudes(kept) is None
    assert (kept(IDS) == pretrained(IDS)).all()
    assert (late(IDS) == pretrained(IDS)).all()  # the same variables
    # An adapter that is not zero becomes LoRA: g = 1.
    layer = nnx.clone(model).one
    jax_dora.reset_magnitudes(layer)
    weight = np.float64(layer.kernel[...])
    weight = weight + layer.scale * np.float64(layer.lora_a[...]) @ np.float64(layer.lora_b[...])
    np.testing.assert_allclose(layer.magnitude[...], np.linalg.norm(weight, axis=0), rtol=1e-6)
    frozen = jax_dora.freeze(model)
    frozen.one.kernel[...] = pretrained.one.kernel[...]
    jax_dora.reset_magnitudes(frozen)
    assert (frozen.one.given_g[...] == 1).all()
