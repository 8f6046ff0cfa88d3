"""`jax_dora.linen.apply_dora`: the module transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

import jax_dora
from jax_dora import DoRARule
from jax_dora.linen import apply_dora, merge_dora, split_adapters
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.drawn import drawn_variables
from tests.jax_dora.linen.linen_models import adapted_and_merged, scanned, train
from tests.tables import thinned

WIDTH, VOCABULARY, LAYERS = 8, 13, 3
RULES = [DoRARule("conv", 2, 4.0), DoRARule("embed|out|head|blocks/(mlp|attention/.*)", 3, 4.0)]


class Block(nn.Module):
    """One layer of a stack."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(h)
        return x + nn.Dense(WIDTH, use_bias=False, name="mlp")(x), None


class Model(nn.Module):
    """Every layer that can be adapted; a scanned and rematerialised stack; a method besides."""

    def setup(self) -> None:
        self.embed = nn.Embed(VOCABULARY, WIDTH)
        self.conv = nn.Conv(WIDTH, (3,), feature_group_count=2)
        stack = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        self.blocks = stack()
        self.out = nn.Einsum((WIDTH, 5), "...d,df->...f")
        self.head = nn.Dense(WIDTH)

    def __call__(self, ids):
        x, _ = self.blocks(self.conv(self.embed(ids)), None)
        return self.out(self.head(x)), self.embed.attend(self.head(x))


class Loop(nn.Module):
    """Calls a layer in a loop, where no parameter can be created."""

    def setup(self) -> None:
        self.dense = nn.Dense(WIDTH)

    def __call__(self, x):
        if self.is_initializing():
            return self.dense(x)
        return nn.while_loop(
            lambda _, carry: carry[0] < 3,
            lambda model, carry: (carry[0] + 1, model.dense(carry[1])),
            self,
            (0, x),
        )[1]


MODEL = Model()
IDS = jax.random.randint(jax.random.key(0), (2, 5), 0, VOCABULARY)
KEY = jax.random.key(1)

close = functools.partial(np.testing.assert_allclose, rtol=0, atol=OPERATOR_FP32_MAX_ABS)


@pytest.fixture(scope="module")
def base():
    return drawn_variables(MODEL.init, IDS)


def adapt(base, rules, run=lambda add, base: jax.jit(add)(base), **options):
    """(the adapted module, its variables over those of `base`)."""
    adapted = apply_dora(MODEL, rules, **options)

    def add(variables):
        return adapted.apply(
            variables, IDS, rngs={"params": KEY, "dropout": KEY}, mutable=["params"]
        )

    return adapted, run(add, base)[1]


@pytest.fixture(scope="module")
def everything(base):
    """The model with every layer adapted, and its variables."""
    return adapt(base, RULES)


@pytest.mark.slow
def test_a_fresh_adapter_changes_no_bit(base, everything):
    adapted, variables = everything
    _, kept = split_adapters(variables["params"])
    jax.tree.map(np.testing.assert_array_equal, kept, dict(base["params"]))
    params = variables["params"]
    assert params["blocks"]["mlp"]["lora_a"].shape == (LAYERS, WIDTH, 3)
    assert params["blocks"]["attention"]["query"]["lora_b"].shape == (LAYERS, 3, 2, WIDTH // 2)
    assert params["conv"]["lora_b"].shape == (1, WIDTH)
    found, expected = jax.jit(adapted.apply)(variables, IDS), jax.jit(MODEL.apply)(base, IDS)
    assert jnp.array_equal(found[0], expected[0])
    # attend multiplies by an embedding scaled by g = 1, after a detour.
    close(found[1], expected[1])


@pytest.mark.ci
def test_init_makes_everything(everything):
    adapted, variables = everything
    made = jax.eval_shape(adapted.init, KEY, IDS)
    assert jax.tree.structure(made) == jax.tree.structure(variables)


@pytest.mark.ci
def test_merging_computes_the_same(base, everything):
    adapted, variables = everything
    variables = train(variables)
    before = jax.tree.leaves(variables)
    merged = merge_dora(adapted, variables, IDS)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert all(a is b for a, b in zip(jax.tree.leaves(variables), before, strict=True))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(adapted.apply)(variables, IDS)
        found = jax.jit(MODEL.apply)(merged, IDS)
    for one, other, plain in zip(found, expected, jax.jit(MODEL.apply)(base, IDS), strict=True):
        close(one, other)
        assert not np.allclose(plain, other, atol=1e-2)


def test_an_adapter_that_is_not_finite_is_not_merged():
    x = jnp.ones((3, 4))
    adapted = apply_dora(nn.Dense(5), DoRARule("", 2, 4))
    params = adapted.init(KEY, x)["params"]
    params = params | {"magnitude": params["magnitude"].at[1].set(jnp.nan)}
    with pytest.raises(ValueError, match="magnitude of '' holds NaN or infinity, in 1 of 5 el"):
        merge_dora(adapted, {"params": params}, x)


def test_merging_takes_a_call_that_updates_other_collections():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(5)(x))
            self.variable("cache", "calls", jnp.zeros, ()).value += 1
            return x

    model, x = Model(), jax.random.normal(KEY, (3, 4))
    adapted = apply_dora(model, DoRARule("all-linear", 2, 4))
    variables = adapted.init(KEY, x)
    variables |= train(variables)
    merged = merge_dora(adapted, variables, x)
    assert merged["cache"] == variables["cache"]
    found, _ = model.apply(merged, x, mutable=["batch_stats", "cache"])
    expected, _ = adapted.apply(variables, x, mutable=["batch_stats", "cache"])
    close(found, expected)


@pytest.mark.slow
def test_merging_says_what_it_changed(everything):
    adapted, variables = everything
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), train(variables))
    with jax.numpy_dtype_promotion("standard"):  # nn.LayerNorm in bf16 wants it
        merged, report = merge_dora(adapted, variables, IDS, return_report=True)
        jax.tree.map(np.testing.assert_array_equal, merged, merge_dora(adapted, variables, IDS))
    paths = {"embed", "conv", "out", "head", "blocks/mlp"}
    paths |= {f"blocks/attention/{name}" for name in ("query", "key", "value", "out")}
    assert {row.path for row in report.layers} == paths
    for row in report.layers:
        before, after = (
            functools.reduce(lambda tree, key: tree[key], row.path.split("/"), one["params"])
            for one in (variables, merged)
        )
        name = "embedding" if row.path == "embed" else "kernel"
        old, new = (np.asarray(one[name], np.float64) for one in (before, after))
        assert row.dtype == "bfloat16"
        # The rounding is in the difference too, and small beside it here.
        change = np.linalg.norm(new - old) / np.linalg.norm(old)
        np.testing.assert_allclose(row.change, change, rtol=0.1)
        assert 2.0**-12 < row.rounding < 2.0**-8
        np.testing.assert_allclose(row.lost, row.rounding / row.change, rtol=0.3)
        assert 0 < row.max_abs <= 2.0**-8 * np.abs(new).max()


def test_attend_may_leave_a_tied_head_as_it_was():
    class Tied(nn.Module):
        def setup(self) -> None:
            self.embed = nn.Embed(VOCABULARY, WIDTH)

        def __call__(self, x):
            return self.embed(IDS), self.embed.attend(x)

    x = jax.random.normal(KEY, (2, WIDTH))
    base = Tied().init(KEY, x)
    adapted = apply_dora(Tied(), DoRARule("embed", 3, 4.0, adapt_attend=False))
    _, variables = adapted.apply(base, x, rngs={"params": KEY}, mutable=["params"])
    found, expected = adapted.apply(train(variables), x), Tied().apply(base, x)
    assert jnp.array_equal(found[1], expected[1])
    assert not jnp.allclose(found[0], expected[0], atol=1e-2)


@pytest.mark.slow
def test_dropout(base):
    rule = DoRARule("head", 2, 4, dropout=0.5)
    with pytest.raises(ValueError, match="deterministic is None and a rule has dropout"):
        apply_dora(MODEL, rule)
    training, variables = adapt(base, rule, deterministic=False)
    variables = train(variables)
    one, other = (
        training.apply(variables, IDS, rngs={"dropout": jax.random.key(k)}) for k in (1, 2)
    )
    assert not jnp.array_equal(one[0], other[0])
    evaluating = apply_dora(MODEL, rule, deterministic=True)
    plain = apply_dora(MODEL, DoRARule("head", 2, 4))
    assert jnp.array_equal(evaluating.apply(variables, IDS)[0], plain.apply(variables, IDS)[0])


def test_partitioned_parameters_stay_so():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
    model = nn.Dense(6, kernel_init=init)
    x = jnp.ones((2, 4))
    adapted = apply_dora(model, DoRARule("", 2, 4))
    params = adapted.init(KEY, x)["params"]
    assert params["kernel"].names == ("data", "model")
    assert params["lora_a"].names == ("data", None)
    assert params["lora_b"].names == (None, "model")
    assert params["magnitude"].names == ("model",)
    assert jnp.array_equal(adapted.apply({"params": params}, x), model.apply({"params": params}, x))
    merged = merge_dora(adapted, {"params": params}, x)["params"]
    assert merged["kernel"].names == ("data", "model")


def test_a_kernel_with_fewer_names_than_axes():
    """As in Flax's lm1b, where a projection into heads is ("embed", "kv")."""
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "kv"))
    x = jnp.ones((2, 4))
    model = nn.DenseGeneral((2, 3), kernel_init=init)
    adapted = apply_dora(model, DoRARule("", 2, 4))
    params = adapted.init(KEY, x)["params"]
    assert params["lora_a"].names == ("embed", None)
    assert params["lora_b"].names == (None, "kv", None)
    assert params["magnitude"].names == ("kv", None)
    assert params["magnitude"].value.shape == (2, 3)
    assert jnp.array_equal(adapted.apply({"params": params}, x), model.apply({"params": params}, x))


def test_all_linear_leaves_out_embedding_and_head(base):
    _, variables = adapt(base, DoRARule("all-linear", 2, 4), jax.eval_shape)
    adapters, _ = split_adapters(variables["params"])
    assert adapters.keys() == {"out", "blocks"}
    assert adapters["blocks"].keys() == {"mlp", "attention"}


@pytest.mark.ci
def test_dense_general_with_batch_axes():
    model = nn.DenseGeneral((2, 3), axis=(1,), batch_dims=(0,))
    x = jax.random.normal(KEY, (3, 5, 4))
    adapted = apply_dora(model, DoRARule("", 2, 4))
    variables = jax.jit(adapted.init)(KEY, x)
    base = {"params": split_adapters(variables["params"])[1]}
    one, other = jax.jit(adapted.apply)(variables, x), jax.jit(model.apply)(base, x)
    close(one, other)
    close(*adapted_and_merged(model, adapted, variables, x))


class Around(nn.Module):
    """Calls a module that it is given, under a name that a wrapper may have too."""

    model: nn.Module

    def __call__(self, x):
        return nn.remat(lambda model, x: model(x))(self.model, x)


@pytest.mark.parametrize("path", ["model", "model/layers_0", "model/layers_1/model"])
@pytest.mark.parametrize("example", [None, "x"])
def test_modules_that_are_handed_over_have_their_own_paths(path, example):
    layers = [nn.Dense(WIDTH), Around(nn.Dense(WIDTH))]
    model = Around(nn.Dense(WIDTH) if path == "model" else nn.Sequential(layers))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, WIDTH)), jnp.float32)
    base = drawn_variables(model.init, x)
    adapted = apply_dora(model, DoRARule(path, 3, 4.0), example=example and (x,))
    variables = drawn_variables(adapted.init, x, seed=1)
    made, frozen = split_adapters(variables["params"])
    assert ["/".join(one[:-1]) for one in flatten_dict(made)] == [path] * 3
    assert jax.tree.map(jnp.shape, frozen) == jax.tree.map(jnp.shape, base["params"])
    y, expected = adapted_and_merged(model, adapted, variables, x)
    np.testing.assert_allclose(expected, y, atol=OPERATOR_FP32_MAX_ABS)
    assert not np.allclose(model.apply({"params": frozen}, x), y, atol=0.1)


def doubled(params):
    return jax.tree.map(lambda value: 2 * value, params)


@pytest.mark.parametrize("example", [None, "x"])
def test_merging_refuses_layers_whose_parameters_are_mapped(example):
    def twice(layer, x):
        return nn.map_variables(nn.Dense.__call__, "params", doubled, mutable=True)(layer, x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x @ self.param("w", nn.initializers.ones, (WIDTH, WIDTH))
            layer = nn.Dense(6)
            layer(x)
            return twice(layer, x)

    model, x = Model(), jnp.ones((3, WIDTH))
    rules = [DoRARule("Dense_0", 3, 4.0), *([DoRARule("w|", 3, 4.0)] if example else [])]
    adapted = apply_dora(model, rules, example=example and (x,))
    variables = drawn_variables(adapted.init, x)
    with pytest.raises(NotImplementedError, match=r"These are:\n  Dense_0$"):
        merge_dora(adapted, variables, x)


@pytest.mark.parametrize("example", [None, "x"])
def test_making_adapters_keeps_parameters_that_are_mapped_in_every_call(example):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            twice = nn.map_variables(nn.Dense, "params", doubled, init=True)
            x = x @ self.param("w", nn.initializers.ones, (WIDTH, WIDTH))
            return nn.Dense(5)(twice(WIDTH, name="twice")(x))

    model, x = Model(), jnp.ones((3, WIDTH))
    base = drawn_variables(model.init, x)
    rules = [DoRARule("Dense_0", 3, 4.0), *([DoRARule("w|", 3, 4.0)] if example else [])]
    adapted = apply_dora(model, rules, example=example and (x,))
    y, variables = adapted.apply(base, x, rngs={"params": KEY}, mutable=["params"])
    assert jnp.array_equal(y, model.apply(base, x))
    jax.tree.map(
        np.testing.assert_array_equal, split_adapters(variables["params"])[1], base["params"]
    )
    close(*adapted_and_merged(model, adapted, drawn_variables(adapted.init, x), x))
    both = apply_dora(model, [*rules, DoRARule("twice", 3, 4.0)], example=example and (x,))
    with pytest.raises(NotImplementedError, match=r"nn\.map_variables computes.*'twice'"):
        both.apply(base, x, rngs={"params": KEY}, mutable=["params"])


class InItsPlace(nn.Module):
    """Has the scope of a layer that it calls."""

    layer: nn.Module

    def setup(self):
        nn.share_scope(self, self.layer)

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("rule", [".*", "all-linear"])
@pytest.mark.parametrize("example", [None, "x"])
def test_what_shares_the_scope_of_a_layer_is_no_obstacle(example, rule):
    model, x = nn.Sequential([InItsPlace(nn.Dense(5))]), jnp.ones((3, WIDTH))
    variables = drawn_variables(model.init, x)
    adapted = apply_dora(model, DoRARule(rule, 3, 4.0), example=example and (x,))
    y, made = adapted.apply(variables, x, rngs={"params": KEY}, mutable=["params"])
    assert jnp.array_equal(y, model.apply(variables, x))
    assert set(made["params"]["layers_0"]) == {"kernel", "bias", "lora_a", "lora_b", "magnitude"}


@pytest.mark.parametrize("writer", [nn.WeightNorm, nn.SpectralNorm])
def test_a_layer_whose_kernel_is_computed_around_it(writer):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"update_stats": False} if writer is nn.SpectralNorm else {}
            return nn.Dense(5)(writer(nn.Dense(6))(x, **options))

    model, x = Model(), jnp.ones((3, WIDTH))
    adapted = apply_dora(model, DoRARule("all-linear", 3, 4.0))
    params = jax.eval_shape(adapted.init, KEY, x)["params"]
    assert [path[0] for path in flatten_dict(split_adapters(params)[0])] == ["Dense_0"] * 3
    with pytest.raises(
        TypeError, match=rf"nn\.{writer.__name__} computes.*does not match 'Dense_1'"
    ):
        jax.eval_shape(apply_dora(model, DoRARule("Dense_1", 3, 4.0)).init, KEY, x)


class TestTransforms:
    """What Flax's lifted transforms do with an adapted model."""

    def test_jit_of_a_method_traces_once_and_never_for_another_adapter(self):
        class Jitted(nn.Module):
            @nn.jit
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3, name="dense")(x)

        model, x = Jitted(), jnp.ones((2, 4))
        adapted = apply_dora(model, DoRARule("dense", 2, 4.0))
        variables = train(adapted.init(KEY, x))
        first, second = adapted.apply(variables, x), adapted.apply(variables, x)
        assert jnp.array_equal(first, second)
        # Of the same parameters under another scale: nn.jit must not take the trace above.
        other = apply_dora(model, DoRARule("dense", 2, 40.0)).apply(variables, x)
        assert not np.allclose(other, first, rtol=1e-2)
        for _ in range(2):
            close(*adapted_and_merged(model, adapted, variables, x))
        with pytest.raises(ValueError, match=r"matches no layer.*\n  dense"):
            apply_dora(model, DoRARule("sense", 2, 4)).apply(variables, x)

    @pytest.mark.slow
    @pytest.mark.parametrize("axis", thinned([0, 1, -1], [-1]))
    def test_a_scan_over_any_axis_is_merged(self, axis):
        """As many layers as features, so that no shape tells the axis."""

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.DenseGeneral((3,), name="dense")(x)
                return nn.Einsum((3, 3), "...d,df->...f", name="einsum")(x), None

        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, x):
                return scanned(Layer, axis, 3)(name="layers")(x, None)[0]

        model, x = Scanned(), jax.random.normal(KEY, (2, 3))
        adapted = apply_dora(model, DoRARule("layers/.*", 3, 4.0))
        variables = jax.jit(adapted.init)(KEY, x)
        found, expected = adapted_and_merged(model, adapted, variables, x)
        close(found, expected)
        assert not np.allclose(found, adapted.apply(variables, x), atol=1e-2)

    @pytest.mark.ci
    def test_stacks_in_stacks_along_different_axes_are_merged(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(3, name="dense")(x), None

        class Middle(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return scanned(Layer, 1, 3)(name="inner")(x, None)[0], None

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return scanned(Middle, 2, 2)(name="outer")(x, None)[0]

        model, x = Outer(), jax.random.normal(KEY, (2, 3))
        adapted = apply_dora(model, DoRARule(".*/dense", 3, 4.0))
        close(*adapted_and_merged(model, adapted, jax.jit(adapted.init)(KEY, x), x))

    @pytest.mark.parametrize("named", thinned([True, False], [True]))
    def test_methods_besides_call(self, named):
        class Coder(nn.Module):
            def setup(self) -> None:
                self.encoder, self.decoder = nn.Dense(3), nn.Dense(4)

            def __call__(self, x):
                return self.decoder(self.encode(x))

            def encode(self, x):
                return nn.tanh(self.encoder(x))

        model, x = Coder(), jax.random.normal(KEY, (2, 4))
        method = "encode" if named else Coder.encode
        adapted = apply_dora(model, DoRARule("encoder", 2, 4.0))
        variables = adapted.init(KEY, x)
        assert adapted.init(KEY, x, method=method)["params"].keys() == {"encoder"}
        found, expected = adapted_and_merged(model, adapted, variables, x, method=method)
        close(found, expected)
        assert not np.allclose(found, model.apply(variables, x, method=method), atol=1e-2)
        both = apply_dora(model, DoRARule(".*coder", 2, 4.0))
        variables = both.init(KEY, x)
        with pytest.raises(ValueError, match=r"does not reach all adapters.*\n  decoder/lora_a$"):
            merge_dora(both, variables, x, method=method)


class TestRefusals:
    """Errors of the transform and of the call."""

    def refuse(self, rules, error, match) -> None:
        with pytest.raises(error, match=match):
            jax.eval_shape(apply_dora(MODEL, rules).init, KEY, IDS)

    def test_a_rule_that_adapts_nothing(self):
        rules = [DoRARule("embed", 2, 4), DoRARule("block", 2, 4)]
        match = r"rules\[1\], path 'block', matches no layer.*\n  blocks/attention/key\n"
        self.refuse(rules, ValueError, match)
        self.refuse(
            [rules[0], DoRARule("embed", 3, 4)], ValueError, r"rules\[1\].*earlier rules take"
        )

    def test_a_module_that_cannot_be_adapted(self):
        rule = DoRARule("blocks/norm", 2, 4)
        match = r"expected Dense, DenseGeneral.*\n  blocks/norm \(LayerNorm\)"
        self.refuse(rule, TypeError, match)

    def test_a_setting_that_would_not_be_honoured(self):
        model = nn.Dense(3, dot_general_cls=lambda: jax.lax.dot_general)
        with pytest.raises(NotImplementedError, match="'' cannot be adapted: dot_general_cls is"):
            apply_dora(model, DoRARule("", 2, 4)).init(KEY, jnp.ones((2, 4)))

    def test_a_layer_that_an_adapted_model_has_adapted(self):
        inner = apply_dora(MODEL, DoRARule("head", 2, 4))
        variables = jax.eval_shape(inner.init, KEY, IDS)
        again = apply_dora(inner, DoRARule("head", 2, 8))
        with pytest.raises(ValueError, match="rule 'head' matches 'head', which has an adapter"):
            jax.eval_shape(again.apply, variables, IDS)
        more = apply_dora(inner, DoRARule("out", 3, 4))
        params = jax.eval_shape(more.init, KEY, IDS)["params"]
        assert all("lora_a" in params[name] for name in ("head", "out"))

    def test_a_missing_adapter_and_one_of_another_rank(self, base):
        adapted = apply_dora(MODEL, RULES)
        with pytest.raises(ValueError, match="params has no lora_a for 'embed'"):
            jax.eval_shape(adapted.apply, base, IDS)
        two = apply_dora(MODEL, DoRARule("head", 2, 4))
        variables = jax.eval_shape(two.init, KEY, IDS)
        with pytest.raises(
            ValueError, match=r"'head' cannot be.*lora_a has shape \(8, 2\).*expects \(8, 3\)"
        ):
            jax.eval_shape(apply_dora(MODEL, DoRARule("head", 3, 4)).apply, variables, IDS)

    def test_a_missing_adapter_in_a_while_loop(self):
        adapted = apply_dora(Loop(), DoRARule("dense", 2, 4))
        x = jnp.ones((2, WIDTH))
        base = jax.eval_shape(Loop().init, KEY, x)
        create = functools.partial(adapted.apply, rngs={"params": KEY}, mutable=["params"])
        match = r"no lora_a for 'dense'.*method=…\) with a method that calls.* outside of nn\.while"
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(create, base, x)
        create = functools.partial(create, method=lambda model, x: model.dense(x))
        _, variables = jax.eval_shape(create, base, x)
        assert jax.eval_shape(adapted.apply, variables, x).shape == x.shape

    def test_things_that_are_no_module(self):
        with pytest.raises(TypeError, match=r"model is a dict; expected a linen nn\.Module"):
            apply_dora({}, RULES)
        with pytest.raises(
            TypeError, match="adapted is a Model; expected the result of apply_dora"
        ):
            merge_dora(MODEL, {}, IDS)

    def test_variables_without_params(self, base):
        adapted, variables = adapt(base, DoRARule("head", 2, 4))
        match = r"no collection 'params', only \['block.*pass \{'params': params\}"
        with pytest.raises(ValueError, match=match):
            merge_dora(adapted, variables["params"], IDS)

    @pytest.mark.parametrize(
        ("function", "counterpart"),
        [
            (lambda: jax_dora.apply_dora(MODEL, RULES, rngs=nnx.Rngs(0)), "apply_dora"),
            (lambda: jax_dora.merge_dora(MODEL), "merge_dora"),
            (lambda: jax_dora.get_adapter(MODEL), "split_adapters"),
            (lambda: jax_dora.set_adapter(MODEL, None), "join_adapters"),
            (lambda: jax_dora.remove_dora(MODEL), "split_adapters"),
            (lambda: jax_dora.coverage(MODEL), "coverage"),
        ],
    )
    def test_functions_for_nnx_say_what_linen_has_instead(self, function, counterpart):
        match = rf"model is a Model; .* for Flax linen there is jax_dora\.linen\.{counterpart}$"
        with pytest.raises(TypeError, match=match):
            function()

    @pytest.mark.parametrize(
        "function",
        [
            jax_dora.norms,
            lambda model: jax_dora.with_norms(model, {}),
            jax_dora.freeze,
            lambda model: jax_dora.peft.save_adapter(model, "unused"),
            lambda model: jax_dora.peft.load_adapter(model, "unused"),
        ],
    )
    def test_functions_for_nnx_say_that_linen_has_no_such_thing(self, function):
        with pytest.raises(TypeError, match=r"no counterpart for Flax linen.*in nnx to use"):
            function(MODEL)
