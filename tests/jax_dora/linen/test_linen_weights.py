"""`jax_dora.linen.apply_dora` with an example: parameters that a linen model's own code reads."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, traverse_util

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora import DoRARule
from jax_dora.linen import (
    adapter_labels,
    apply_dora,
    coverage,
    join_adapters,
    merge_dora,
    reset_magnitudes,
    split_adapters,
)
from parity.oracle import fp64
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.drawn import drawn_variables
from tests.jax_dora.linen.linen_models import (
    VOCABULARY,
    WIDTH,
    DenseGeneral,
    Embedder,
    Model,
    adapted_and_merged,
    scanned,
    train,
)
from tests.tables import ci

KEY = jax.random.key(2)
IDS = jax.random.randint(KEY, (2, 4), 0, VOCABULARY)
MODEL = Model()
RULES = [DoRARule("all-linear", 2, 3.0), DoRARule("embedder", 3, 5.0)]
HOW = {
    "embedder": "looked up and tied to a product, io, the output head",
    "experts/down": "read by a product, bio",
    "experts/up": "read by a product, bio",
    "layers/heads": "read by a product, iboo",
    "layers/out": "read by a product, ibio",
    "mlp/gating_einsum": "read by a product, oio",
    "mlp/linear": "read by a product, io",
    "odd": "no product reads it, only abs",
    "plain": "linen.Dense",
}


@pytest.fixture(scope="module")
def base():
    return drawn_variables(MODEL.init, IDS)


@pytest.fixture(scope="module")
def adapted():
    return apply_dora(MODEL, RULES, example=(IDS,))


@pytest.fixture(scope="module")
def fresh(adapted, base):
    def add(base):
        return adapted.apply(base, IDS, rngs={"params": KEY}, mutable=["params"])[1]

    return jax.jit(add)(base)


@pytest.fixture(scope="module")
def trained(fresh):
    return train(fresh)


def run(model, variables, *args):
    with jax.default_matmul_precision("highest"):
        return jax.jit(model.apply)(variables, *args)


def close(found, expected) -> None:
    peak = max(1.0, float(jnp.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=OPERATOR_FP32_MAX_ABS * peak)


def test_coverage_names_every_weight_and_what_reads_it(adapted):
    table = coverage(MODEL, IDS)
    assert {one.path: one.how for one in table.weights} == HOW
    assert table.count("adaptable") == len(HOW) - 1
    assert {one.path for one in table.weights if not one.is_linear} == {"embedder", "odd"}
    of_adapted = coverage(adapted, IDS)
    assert {one.path for one in of_adapted.weights if one.status == "adapted"} == set(HOW) - {"odd"}
    of_encode = coverage(MODEL, lambda model: model.encode(IDS))
    assert of_encode.count("adaptable") == 3


@pytest.mark.slow
def test_a_fresh_adapter_changes_nothing(adapted, base, fresh):
    adapters, kept = split_adapters(fresh["params"])
    jax.tree.map(np.testing.assert_array_equal, kept, dict(base["params"]))
    assert len(jax.tree.leaves(adapters)) == 3 * (len(HOW) - 1)
    assert adapters["experts"]["up_lora_a"].shape == (3, WIDTH, 2)
    assert adapters["layers"]["out"]["magnitude"].value.shape == (2, WIDTH)
    assert adapters["layers"]["heads"]["lora_b"].names == ("layers", None, "heads", "kv")
    assert kept["layers"]["heads"]["kernel"].names == ("embed", "layers", "heads", "kv")
    close(run(adapted, fresh, IDS), run(MODEL, base, IDS))
    labels = adapter_labels(fresh["params"])
    assert labels["mlp"]["linear_magnitude"] == "adapter"
    assert labels["mlp"]["linear"] == "frozen"


@pytest.mark.ci
def test_init_makes_everything(adapted, fresh):
    made = jax.eval_shape(adapted.init, KEY, IDS)
    assert jax.tree.structure(made) == jax.tree.structure(fresh)


def test_exclude_leaves_weights_and_layers_out(base):
    rule = DoRARule("all-linear", 2, 3.0, exclude=r"experts/up|layers/.*|plain")
    adapted = apply_dora(MODEL, rule, example=(IDS,))
    variables = jax.eval_shape(adapted.init, KEY, IDS)
    names = {"/".join(path) for path in traverse_util.flatten_dict(variables["params"])}
    weights = {"experts/down_", "mlp/gating_einsum_", "mlp/linear_"}
    added = names - {"/".join(path) for path in traverse_util.flatten_dict(base["params"])}
    assert added == {f"{weight}{name}" for weight in weights for name in ADAPTER_NAMES}
    with pytest.raises(ValueError, match=r"exclude 'experts/u', matches no layer"):
        apply_dora(MODEL, DoRARule("all-linear", 2, 3.0, exclude="experts/u"), example=(IDS,))


@pytest.mark.ci
def test_a_trained_adapter_computes_what_its_merged_model_does(adapted, base, trained):
    merged, report = merge_dora(adapted, trained, IDS, return_report=True)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    found = run(adapted, trained, IDS)
    close(found, run(MODEL, merged, IDS))
    assert not np.allclose(found, run(MODEL, base, IDS), atol=0.1)
    assert {layer.path for layer in report.layers} == set(HOW) - {"odd"}


@pytest.mark.parametrize(
    ("path", "name", "product", "summed", "scale"),
    [
        (("embedder",), "input_embedding", "vr,rd->vd", (0,), 5 / 3),
        (("experts",), "down", "ehr,erd->ehd", (1,), 3 / 2),
        (("layers", "out"), "kernel", "lhkr,lrd->hlkd", (0, 2), 3 / 2),
        (("mlp",), "gating_einsum", "fr,rnh->nfh", (1,), 3 / 2),
    ],
)
@pytest.mark.ci
def test_the_merged_weight_is_that_of_the_paper(
    adapted, trained, path, name, product, summed, scale
):
    """In fp64: m·(W + sAB)/‖W + sAB‖, the norm over the contracted axes."""
    merged = merge_dora(adapted, trained, IDS)["params"]
    params = trained["params"]
    for key in path:
        merged, params = merged[key], params[key]
    prefix = "" if name == "kernel" else f"{name}_"
    arrays = {one: fp64(nn.unbox(params[prefix + one])) for one in ("lora_a", "lora_b")}
    weight = fp64(nn.unbox(params[name])) + scale * np.einsum(product, *arrays.values())
    norm = np.sqrt((weight**2).sum(summed, keepdims=True))
    magnitude = fp64(nn.unbox(params[f"{prefix}magnitude"])).reshape(norm.shape)
    np.testing.assert_allclose(nn.unbox(merged[name]), weight / norm * magnitude, atol=2e-6)


@pytest.mark.slow
def test_every_adapter_has_a_gradient_and_nothing_else_is_needed(adapted, trained):
    adapters, frozen = split_adapters(trained["params"])

    @jax.jit
    def gradient(adapters):
        def loss(adapters):
            variables = {"params": join_adapters(adapters, frozen)}
            return jnp.sum(jnp.sin(adapted.apply(variables, IDS)))

        return jax.grad(loss)(adapters)

    assert all(np.any(one) for one in jax.tree.leaves(gradient(adapters)))


def test_a_weight_that_no_product_reads_is_given_whole():
    """Once another reader is a product."""

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(1.0), (4, 3))
            return x @ w, jnp.abs(w).sum()

    model, x = Both(), jax.random.normal(KEY, (2, 4))
    [one] = coverage(model, x).weights
    assert one.merged_bytes == 4 * 3 * 4
    adapted = apply_dora(model, DoRARule("w", 2, 4.0), example=(x,))
    results = adapted_and_merged(model, adapted, adapted.init(KEY, x), x)
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@pytest.mark.ci
def test_an_embedding_that_its_parent_reads_is_adapted_in_the_parent_too():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
            return embed(ids) @ embed.embedding.T

    [one] = coverage(Tied(), IDS).weights
    assert one.how == "looked up and tied to a product, io, the output head"
    adapted = apply_dora(Tied(), DoRARule("embed", 2, 4.0), example=(IDS,))
    close(*adapted_and_merged(Tied(), adapted, adapted.init(KEY, IDS), IDS))


@pytest.mark.ci
def test_an_nnx_module_in_a_scan_along_axis_1_is_adapted():
    """As in MaxText, whose decoder is linen and whose layers are nnx."""

    class Own(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(x @ self.kernel[...])

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nnx.bridge.to_linen(Own, name="own")(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scanned(Step, 1, 3)(name="steps")(x, None)[0]

    model, x = Scanned(), jax.random.normal(KEY, (2, WIDTH))
    adapted = apply_dora(model, DoRARule("all-linear", 2, 4.0), example=(x,))
    variables = jax.jit(adapted.init)(KEY, x)
    assert variables["params"]["steps"]["own"]["lora_a"].shape == (3, WIDTH, 2)
    found, expected = adapted_and_merged(model, adapted, variables, x)
    close(found, expected)
    _, base = split_adapters(variables["params"])
    assert not np.allclose(found, run(model, {"params": base}, x), atol=1e-2)


def test_the_stacked_bias_of_a_layer_is_no_weight_that_a_rule_matches():
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(WIDTH, name="dense")(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scanned(Step, 1, 3)(name="steps")(x, None)[0]

    x = jnp.ones((2, WIDTH))
    adapted = apply_dora(Scanned(), DoRARule("steps/dense", 2, 4.0), example=(x,))
    params = jax.eval_shape(adapted.init, KEY, x)["params"]["steps"]["dense"]
    assert params["lora_a"].shape == (WIDTH, 3, 2)
    assert params.keys() == {"kernel", "bias", "lora_a", "lora_b", "magnitude"}


@pytest.mark.slow
def test_dropout_draws_a_mask_for_each_key_and_none_when_it_is_off():
    rule = DoRARule("mlp/.*", 2, 4.0, dropout=0.5)
    training = apply_dora(MODEL, rule, deterministic=False, example=lambda one: one.encode(IDS))
    evaluating = apply_dora(MODEL, rule, deterministic=True, example=lambda one: one.encode(IDS))
    variables = train(evaluating.init(KEY, IDS, method="encode"))
    dropped = [
        training.apply(variables, IDS, method="encode", rngs={"dropout": jax.random.key(seed)})
        for seed in (1, 1, 2)
    ]
    assert jnp.array_equal(dropped[0], dropped[1])
    assert not jnp.array_equal(dropped[0], dropped[2])
    close(*adapted_and_merged(MODEL, evaluating, variables, IDS, method="encode"))


def test_other_initial_values_of_lora_b_are_used_at_once():
    model, x = DenseGeneral((4, 3), ("a", "b"), 1), jax.random.normal(KEY, (2, 4))
    rule = DoRARule("kernel", 2, 4.0, lora_b_init=nn.initializers.normal(1.0))
    adapted = apply_dora(model, rule, example=(x,))
    found, variables = adapted.init_with_output(KEY, x)
    close(found, adapted.apply(variables, x))
    _, base = split_adapters(variables["params"])
    assert not np.allclose(found, model.apply({"params": base}, x), atol=1e-2)


class Two(nn.Module):
    """Two weights of one module."""

    @nn.compact
    def __call__(self, x):
        x = x @ self.param("a", nn.initializers.normal(1.0), (4, 5))
        return x @ self.param("b", nn.initializers.normal(1.0), (5, 3))


def test_a_call_that_makes_some_adapters_computes_with_those_that_are_there():
    model, x = Two(), jax.random.normal(KEY, (2, 4))
    one = apply_dora(model, DoRARule("a", 2, 3.0), example=(x,))
    both = apply_dora(model, DoRARule("a|b", 2, 3.0), example=(x,))
    trained = train(one.init(KEY, x))
    found, made = both.apply(trained, x, rngs={"params": KEY}, mutable=["params"])
    close(found, one.apply(trained, x))
    close(found, both.apply(made, x))
    assert not np.allclose(found, model.apply(trained, x), atol=0.1)


def test_a_call_that_makes_some_adapters_counts_once():
    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("counts", "calls", lambda: jnp.zeros(()))
            count.value += 1
            x = x @ self.param("a", nn.initializers.normal(1.0), (4, 5))
            return x @ self.param("b", nn.initializers.normal(1.0), (5, 3))

    x = jax.random.normal(KEY, (2, 4))
    one = apply_dora(Counted(), DoRARule("a", 2, 3.0), example=(x,))
    both = apply_dora(Counted(), DoRARule("a|b", 2, 3.0), example=(x,))
    variables = one.init(KEY, x)
    _, made = both.apply(variables, x, rngs={"params": KEY}, mutable=["params", "counts"])
    assert made["counts"]["calls"] == variables["counts"]["calls"] + 1


def test_one_line_of_coverage_is_logged(caplog):
    with caplog.at_level(logging.INFO, "jax_dora"):
        apply_dora(MODEL, DoRARule("mlp/.*", 2, 4.0), example={"ids": IDS})
    [record] = caplog.records
    assert record.message.startswith("9 weights: 2 adapted")


class TestRefusals:
    """What cannot be adapted, and what is missing."""

    def test_without_an_example_the_way_in_is_named(self):
        match = r"pass inputs for the model as example=.*\n  embedder \(Embedder\)"
        with pytest.raises(TypeError, match=match):
            jax.eval_shape(apply_dora(MODEL, DoRARule("embedder", 2, 4)).init, KEY, IDS)

    def test_a_weight_without_products_says_what_reads_it(self):
        match = r"narrow the rules' paths.*\n  odd \(.*Model\): no product reads it, only abs"
        with pytest.raises(TypeError, match=match):
            apply_dora(MODEL, DoRARule("odd", 2, 4), example=(IDS,))

    def test_a_rule_that_adapts_nothing(self):
        with pytest.raises(ValueError, match=r"'mpl', matches no layer(.|\n)*\n  mlp/linear"):
            apply_dora(MODEL, DoRARule("mpl", 2, 4), example=(IDS,))

    def test_params_without_the_adapter(self, adapted, base):
        match = r"params has no adapter.*\n  embedder\n  experts/down"
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(adapted.apply, base, IDS)

    def test_an_adapter_that_the_module_does_not_know(self):
        model, x = Two(), jax.random.normal(KEY, (2, 4))
        both = apply_dora(model, DoRARule("a|b", 2, 4), example=(x,)).init(KEY, x)
        with pytest.raises(ValueError, match=r"does not reach all adapters.*:\n  b_lora_a$"):
            merge_dora(apply_dora(model, DoRARule("a", 2, 4), example=(x,)), both, x)

    @pytest.mark.parametrize("example", [3, None])
    def test_things_that_are_no_example_and_no_module(self, example):
        if example is None:
            with pytest.raises(TypeError, match=r"model is a dict.*jax_dora\.coverage"):
                coverage({}, IDS)
        else:
            with pytest.raises(TypeError, match="example is a int; expected a tuple"):
                apply_dora(Embedder(), DoRARule("", 2, 4), example=example)


@pytest.mark.ci
@pytest.mark.parametrize("example", [ci(None), (jnp.ones((3, WIDTH)),)])
def test_magnitudes_of_weights_that_came_later(example):
    """Pretrained weights are put into the parameters of an adapted model, layers of a scan too."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            w = self.param("w", nn.initializers.normal(0.3), (WIDTH, WIDTH))
            return x + nn.Dense(WIDTH, name="d")(jnp.tanh(x)) @ w, None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Block, length=3, **split)(name="s")(x, None)
            return nn.Dense(5, name="out")(x)

    x, model = jnp.ones((3, WIDTH)), Stack()
    first, pretrained = (model.init(jax.random.key(n), x) for n in (0, 1))
    adapted = apply_dora(model, DoRARule("all-linear", 2, 3.0), example=example)
    _, made = adapted.apply(first, x, rngs={"params": KEY}, mutable=["params"])
    adapters, _ = split_adapters(made["params"])
    stale = {"params": join_adapters(adapters, pretrained["params"])}
    wanted = model.apply(pretrained, x)
    assert not np.allclose(adapted.apply(stale, x), wanted, rtol=0.05)
    reset = reset_magnitudes(adapted, stale, x)
    assert (adapted.apply(reset, x) == wanted).all()
    with pytest.raises(ValueError, match="no magnitude in params"):
        reset_magnitudes(adapted, pretrained, x)
    # An adapter that is not zero becomes LoRA: g = 1.
    changed = jax.tree.map(lambda leaf: leaf + 0.1, stale)
    params = reset_magnitudes(adapted, changed, x)["params"]
    layers = [(params["out"], "kernel", "", ...)]
    layers += [(params["s"]["d"], "kernel", "", number) for number in range(3)]
    layers += [(params["s"], "w", "w_", number) for number in range(3) if example]
    for layer, kernel, prefix, index in layers:
        names = [kernel, *(f"{prefix}{name}" for name in ("lora_a", "lora_b"))]
        w, a, b = (np.float64(layer[name])[index] for name in names)
        norm = np.linalg.norm(w + 1.5 * a @ b, axis=0)
        np.testing.assert_allclose(layer[f"{prefix}magnitude"][index], norm, rtol=1e-6)


def test_magnitudes_of_a_model_that_updates_other_collections():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(x))

    x, adapted = jnp.ones((3, WIDTH)), apply_dora(Normed(), DoRARule("Dense_0", 2, 3.0))
    variables = adapted.init(KEY, x)
    dense = variables["params"]["Dense_0"]
    later = dense | {"kernel": 2 * dense["kernel"]}
    params = variables["params"] | {"Dense_0": later}
    reset = reset_magnitudes(adapted, {**variables, "params": params}, x)
    assert jnp.allclose(reset["params"]["Dense_0"]["magnitude"], 2 * dense["magnitude"])
    assert reset["batch_stats"] is variables["batch_stats"]


class OwnLoRA(nn.Module):
    """A weight with LoRA of the model's own, named as openpi names it."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.5)
        w = self.param("w", normal, (WIDTH, 6))
        a, b = self.param("w_lora_a", normal, (WIDTH, 2)), self.param("w_lora_b", normal, (2, 6))
        return nn.Dense(4)(x @ w + (x @ a) @ b)


class BesideDense(nn.Module):
    """LoRA of the model's own in the scope of a layer that can be adapted."""

    is_first: bool

    @nn.compact
    def __call__(self, x):
        dense, normal = nn.Dense(6), nn.initializers.normal(0.5)
        nn.share_scope(self, dense)
        y = None if self.is_first else dense(x)
        a, b = self.param("lora_a", normal, (WIDTH, 2)), self.param("lora_b", normal, (2, 6))
        return (dense(x) if y is None else y) + (x @ a) @ b


class OwnDoRA(nn.Module):
    """An adapter of the model's own, with all the names."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.5)
        a, b = self.param("lora_a", normal, (WIDTH, 2)), self.param("lora_b", normal, (2, WIDTH))
        return x + (x @ a) @ b * self.param("magnitude", normal, (1, WIDTH))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("example", [None, (jnp.ones((3, WIDTH)),)])
def test_lora_of_the_models_own_in_the_scope_of_a_layer_is_refused(is_first, example):
    x, model, rule = jnp.ones((3, WIDTH)), BesideDense(is_first), DoRARule("", 2, 3.0)
    pretrained = model.init(KEY, x)
    more = {"rngs": {"params": KEY}, "mutable": ["params"]}
    with pytest.raises(ValueError, match=r"of its own.*: rename the parameter"):
        apply_dora(model, rule, example=example).apply(pretrained, x, **more)
    with pytest.raises(ValueError, match=r"of its own.*: rename the parameter"):
        apply_dora(model, rule, example=example).init(KEY, x)


@pytest.mark.parametrize("example", [None, (jnp.ones((3, WIDTH)),)])
def test_arrays_of_the_models_own_that_look_like_an_adapter_are_refused(example):
    model = nn.Sequential([OwnDoRA(), nn.Dense(3)])
    adapted = apply_dora(model, DoRARule("layers_1", 2, 3.0), example=example)
    with pytest.raises(
        ValueError, match=r"at 'layers_0' .*: lora_a, lora_b, magnitude; expected other"
    ):
        adapted.init(KEY, jnp.ones((3, WIDTH)))


@pytest.mark.parametrize("rank", [2, 3])
def test_lora_of_the_models_own_stays_its_own(rank):
    x, model = jnp.ones((3, WIDTH)), OwnLoRA()
    for rule in (DoRARule("w", rank, 3.0), DoRARule("all-linear", rank, 3.0)):
        with pytest.raises(ValueError, match=r"'w' cannot be adapted: its module has .*'w_lora_a'"):
            apply_dora(model, rule, example=(x,))
    adapted = apply_dora(model, DoRARule("Dense_0", rank, 3.0), example=(x,))
    params = adapted.init(KEY, x)["params"]
    adapters, base = split_adapters(params)
    assert adapters.keys() == {"Dense_0"}
    told = {one.path: one.status for one in coverage(adapted, x).weights}
    assert told.pop("Dense_0") == "adapted"
    assert told == dict.fromkeys(("w", "w_lora_a", "w_lora_b"), "adaptable")
    assert base.keys() == {"w", "w_lora_a", "w_lora_b", "Dense_0"}
    labels = adapter_labels(params)
    assert labels["w_lora_a"] == "frozen"
    assert labels["Dense_0"]["lora_a"] == "adapter"


def test_a_parameter_that_is_a_dict_is_adapted_and_refused_by_its_modules_name():
    class Tree(nn.Module):
        @nn.compact
        def __call__(self, x):
            tree = self.param("tree", lambda _: {"w": jnp.ones((4, 4)), "unread": jnp.ones((3, 3))})
            return x @ tree["w"]

    x = jnp.ones((2, 4))
    assert {one.path: one.how for one in coverage(Tree(), x).weights} == {
        "tree/unread": "no operation of this call reads it",
        "tree/w": "read by a product, io",
    }
    adapted = apply_dora(Tree(), DoRARule("tree/w", 2, 2), example=(x,))
    assert {"w_lora_a", "w_lora_b", "w_magnitude"} <= {
        *adapted.init(jax.random.key(0), x)["params"]["tree"]
    }
    with pytest.raises(TypeError, match=r"tree/unread \(.*Tree\): no operation"):
        apply_dora(Tree(), DoRARule("tree/unread", 2, 2), example=(x,))
