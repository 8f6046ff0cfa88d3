"""Models of layers that their authors wrote themselves, adapted by what reads each weight."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora import (
    DoRARule,
    apply_dora,
    coverage,
    freeze,
    get_adapter,
    merge_dora,
    remove_dora,
    set_adapter,
)
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.small_models import Mixed, call, train
from tests.jax_dora.small_models import ids as mixed_ids
from tests.jax_dora.tracing.own_layers import WIDTH, Block, Einsum, Embedder, Model, drawn, ids

RULES = [DoRARule("all-linear", 2, 3), DoRARule("embedder|odd", 3, 5)]
ADAPTED = {
    *("embedder", "odd", "plain", "experts/gate", "experts/up", "experts/down"),
    *(f"blocks/{n}{name}" for n in (0, 1) for name in ("", "/heads", "/out")),
}


@pytest.fixture(autouse=True)
def _registered(registrations):
    jax_dora.register(Model, param="odd", axes="io")


@pytest.fixture
def base() -> Model:
    return Model(nnx.Rngs(0))


@pytest.fixture
def adapted(base) -> Model:
    return train(apply_dora(base, RULES, rngs=nnx.Rngs(1), example=(ids(),)))


def close(found, expected, factor=1.0) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        bound = factor * OPERATOR_FP32_MAX_ABS * max(1.0, float(jnp.abs(other).max()))
        assert float(jnp.abs(one - other).max()) <= bound


@pytest.mark.ci
def test_a_fresh_adapter_changes_nothing_and_the_class_stays(base):
    adapted = apply_dora(base, RULES, rngs=nnx.Rngs(1), example=(ids(),))
    assert get_adapter(adapted).arrays.keys() == ADAPTED
    close(call(adapted, ids()), call(base, ids()), 0.1)
    assert isinstance(adapted.blocks[0].heads, Einsum)
    assert isinstance(adapted.embedder, Embedder)
    assert adapted.blocks[0].heads.equation == "btd,dnh->btnh"
    assert adapted.blocks[0].heads.w.get_value() is base.blocks[0].heads.w.get_value()
    params = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    paths = [set(dict(nnx.to_flat_state(nnx.state(one, params)))) for one in (base, adapted)]
    assert paths[0] == paths[1]
    shapes = {path: part["lora_a"].shape for path, part in get_adapter(adapted).arrays.items()}
    assert shapes["experts/gate"] == (3, 5, 2)
    assert shapes["blocks/0/out"] == (2, 3, 2)


@pytest.mark.ci
def test_a_trained_adapter_computes_what_its_merged_model_does(adapted):
    found = adapted(ids())
    merged, report = merge_dora(adapted, return_report=True)
    close(found, call(merged, ids()))
    close(call(adapted, ids()), found)
    assert {layer.path for layer in report.layers} == ADAPTED
    assert min(layer.change for layer in report.layers) > 0.01
    assert type(merged) is Model
    assert type(merged.blocks[1].heads) is Einsum
    far = jnp.abs(found["last"] - call(remove_dora(adapted), ids())["last"]).max()
    assert far > 0.1


def test_removing_gives_the_base_back(base):
    adapted = apply_dora(base, RULES, rngs=nnx.Rngs(1), example=(ids(),))
    plain = remove_dora(adapted)
    assert nnx.graphdef(plain) == nnx.graphdef(nnx.clone(base))
    for one, other in zip(*map(jax.tree.leaves, map(nnx.state, (plain, base))), strict=True):
        assert one is other


@pytest.mark.ci
def test_the_gradient_is_that_of_the_merged_weights_with_the_norm_held(adapted):
    @nnx.jit
    def loss(model):
        return jnp.sum(jnp.sin(model(ids())["logits"]))

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = dict(nnx.to_flat_state(nnx.jit(nnx.grad(loss, argnums=wrt))(adapted)))
    assert all(bool(jnp.any(one[...] != 0)) for one in grads.values())
    assert len(grads) == 3 * len(ADAPTED)
    # Along one direction at a time, by differences of the model with its norms given.
    held = jax_dora.with_norms(adapted, jax_dora.norms(adapted))
    for path in (("blocks", 0, "mix_magnitude"), ("experts", "down_lora_b"), ("odd_lora_a",)):
        variable = held
        for key in path:
            variable = variable[key] if isinstance(key, int) else getattr(variable, key)
        value = variable.get_value()
        direction = np.random.default_rng(5).standard_normal(value.shape, np.float32)
        direction = jnp.asarray(direction / np.linalg.norm(direction))
        ends = []
        for step in (1e-3, -1e-3):
            variable.set_value(value + step * direction)
            ends.append(loss(held))
        variable.set_value(value)
        expected = float(ends[0] - ends[1]) / 2e-3
        found = float(jnp.vdot(grads[path][...], direction))
        assert found == pytest.approx(expected, rel=0.05, abs=0.05)


@pytest.mark.ci
def test_what_a_call_changes_in_the_model_is_changed(adapted):
    adapted(ids())
    adapted(ids())
    assert int(adapted.calls[...]) == 2
    assert adapted.last.shape == (2, 4, WIDTH)
    nnx.jit(lambda model: model(ids()))(adapted)
    assert int(adapted.calls[...]) == 3
    assert not any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(adapted))
    )


@pytest.mark.ci
def test_it_can_be_pickled_copied_split_and_put_into_another_base(adapted):
    # Not compiled as a whole, and the same operations each time.
    expected = adapted(ids())
    for other in (
        pickle.loads(pickle.dumps(adapted)),
        copy.deepcopy(adapted),
        nnx.merge(*nnx.split(adapted)),
        jax_dora.set_adapter(remove_dora(adapted), get_adapter(adapted)),
        jax_dora.with_norms(adapted, jax_dora.norms(adapted)),
        jax_dora.freeze(adapted),
    ):
        assert type(other) is type(adapted)
        close(other(ids()), expected, 0)


@pytest.mark.ci
def test_a_base_that_a_loss_holds(adapted):
    """As `nnx.split` for a function of the adapters alone is used."""
    graphdef, adapters, rest = nnx.split(adapted.blocks[0], nnx.LoRAParam, ...)

    def loss(adapters, rest):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, adapters, rest).inner(jnp.ones((2, WIDTH)))))

    expected = jax.jit(jax.grad(loss))(adapters, rest)
    found = jax.jit(jax.grad(lambda adapters: loss(adapters, rest)))(adapters)
    close(found, expected, 0.1)  # XLA folds what is constant, and rounds it so


@pytest.mark.ci
def test_under_vmap(adapted):
    x = jnp.ones((2, 3, WIDTH))
    graphdef, state = nnx.split(adapted.blocks[0])
    states = jax.tree.map(lambda leaf: jnp.stack([2 * leaf, leaf]), state)
    found = jax.jit(jax.vmap(lambda state: nnx.merge(graphdef, state)(x)))(states)
    close(found[1], adapted.blocks[0](x))


@pytest.mark.ci
def test_dropout_drops_what_lora_a_reads(base):
    rule = DoRARule(r"blocks/\d+/heads|experts", 2, 3, dropout=0.5)
    adapted = apply_dora(base, rule, rngs=nnx.Rngs(1), example=(ids(),))
    train(adapted)
    one, other = adapted(ids())["last"], adapted(ids())["last"]
    assert float(jnp.abs(one - other).max()) > 1e-3
    adapted.eval()
    close(call(adapted, ids()), call(merge_dora(adapted), ids()))


def test_a_registration_of_another_name_is_told():
    class Misspelt(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((WIDTH, 3)))

    jax_dora.register(Misspelt, param="wieght", axes="io")
    told = [one.how for one in coverage(Misspelt()).weights]
    assert told == ["its class has wieght registered, but not this parameter"]


def test_a_plain_model_without_a_place_for_a_folder_says_how_to_make_one(tmp_path):
    class Bare(nnx.Module):
        def __init__(self):
            self.heads = nnx.Param(jnp.ones((WIDTH, 3)))

        def __call__(self, x):
            return x @ self.heads[...]

    base, x, rule = Bare(), jnp.ones((2, WIDTH)), DoRARule("heads", 2, 3)
    model = apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,))
    jax_dora.peft.save_adapter(model, tmp_path)
    message = r"heads\.lora_A\.weight is of a weight .*pass load_adapter example=, inputs to call"
    with pytest.raises(ValueError, match=message):
        jax_dora.peft.load_adapter(base, tmp_path)
    close(call(jax_dora.peft.load_adapter(base, tmp_path, example=(x,)), x), call(model, x))


def test_a_folder_of_weights_that_a_parent_reads_is_loaded_into_a_plain_model(tmp_path):
    class Parent(nnx.Module):
        def __init__(self):
            self.read, self.called = (nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(n)) for n in (0, 1))

        def __call__(self, x):
            return x @ self.read.kernel[...] + self.called(x)

    base, x = Parent(), jnp.ones((2, WIDTH))
    adapted = train(apply_dora(base, DoRARule(".*", 2, 3), rngs=nnx.Rngs(1), example=(x,)))
    jax_dora.peft.save_adapter(adapted, tmp_path)
    loaded = jax_dora.peft.load_adapter(base, tmp_path, example=(x,))
    close(call(loaded, x), call(adapted, x))
    assert get_adapter(loaded).weights == get_adapter(adapted).weights


def test_an_embedding_of_its_own_is_refused_by_name_in_a_peft_folder(adapted, tmp_path):
    match = r"^embedder: .*embeddings that are no nnx\.Embed.*merge_dora"
    with pytest.raises(NotImplementedError, match=match):
        jax_dora.peft.save_adapter(adapted, tmp_path / "adapter")


class TestRegister:
    def test_a_class_in_one_line(self):
        jax_dora.register(Einsum, axes=lambda module: jax_dora.einsum_axes(module.equation))
        block, x = Block(nnx.Rngs(0)), jnp.ones((2, 4, WIDTH))
        adapted = apply_dora(block, DoRARule("all-linear", 2, 3), rngs=nnx.Rngs(1))
        assert get_adapter(adapted).arrays.keys() == {"heads", "out"}
        close(train(adapted)(x), merge_dora(adapted)(x))

    def test_a_class_by_its_name(self):
        name = f"{Embedder.__module__}.Embedder"
        jax_dora.register(name, param="table", axes="io", linear=False)
        model = Embedder(nnx.Rngs(0))
        adapted = train(apply_dora(model, DoRARule("table", 2, 3), rngs=nnx.Rngs(1)))
        merged = merge_dora(adapted)
        close(adapted.encode(ids()), merged.encode(ids()))
        x = jnp.ones((3, WIDTH))
        close(adapted.decode(x), merged.decode(x))
        with pytest.raises(ValueError, match="matches no layer"):
            apply_dora(model, DoRARule("all-linear", 2, 3), rngs=nnx.Rngs(1))

    @pytest.mark.parametrize("by_example", [True, False])
    def test_variables_of_any_type_are_weights_that_are_known_by_name(self, by_example):
        class Frozen(nnx.Variable):
            pass

        jax_dora.register(Einsum, axes="io")
        model, x = OneArray(nnx.Rngs(0)), jnp.ones((2, WIDTH))
        model.first.w = Frozen(model.first.w[...])
        model.second = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        model.second.kernel = Frozen(model.second.kernel[...])
        example = (x,) if by_example else None
        assert coverage(model, *(example or ())).count("adaptable") == 2
        rule = DoRARule(".*", 2, 3)
        adapted = train(apply_dora(model, rule, rngs=nnx.Rngs(1), example=example))
        assert get_adapter(adapted).arrays.keys() == {"first", "second"}
        merged = merge_dora(adapted)
        close(adapted(x), merged(x))
        assert type(merged.first.w) is type(merged.second.kernel) is Frozen

    def test_what_is_wrong_is_told(self):
        with pytest.raises(ValueError, match="axes is 'ix'; expected one letter for each axis"):
            jax_dora.register(Einsum, axes="ix")
        with pytest.raises(ValueError, match="with at least one 'i' and one 'o'"):
            jax_dora.register(Einsum, axes="bo")
        with pytest.raises(
            TypeError, match=r"module_type is 3; expected a subclass of nnx\.Module"
        ):
            jax_dora.register(3, axes="io")
        with pytest.raises(TypeError, match="param is 3; expected the name"):
            jax_dora.register(Einsum, param=3, axes="io")

    def test_the_axes_of_an_einsum(self):
        assert jax_dora.einsum_axes("BTD,SNDH->SBTNH") == "ooio"
        assert jax_dora.einsum_axes("...TM,MD->...TD") == "io"
        assert jax_dora.einsum_axes("ted,edf->tef") == "bio"
        assert jax_dora.einsum_axes("ab,ab->a") is None


class TestRefusals:
    def test_a_weight_out_of_reach_is_named_with_its_class_and_the_way_in(self, base):
        name = f"{Einsum.__module__}.Einsum".replace(".", r"\.")
        match = (
            rf"jax_dora\.register, or pass .* as example=.*\n  blocks/0/heads \({name}\): a class"
        )
        with pytest.raises(TypeError, match=match):
            apply_dora(base, DoRARule("blocks/0/heads", 2, 3), rngs=nnx.Rngs(1))

    def test_a_weight_that_the_call_does_not_read(self, base):
        with pytest.raises(TypeError, match=r"unused \(.*Model\): no operation of this call reads"):
            apply_dora(base, DoRARule("unused", 2, 3), rngs=nnx.Rngs(1), example=(ids(),))

    def test_an_attribute_by_the_name_of_the_adapter(self, base):
        base.blocks[0].heads.w_lora_a = 3
        with pytest.raises(ValueError, match=r"'blocks/0/heads' cannot be adapted: .*'w_lora_a'"):
            apply_dora(base, DoRARule("blocks/0/heads", 2, 3), rngs=nnx.Rngs(1), example=(ids(),))

    def test_an_example_that_is_none(self, base):
        with pytest.raises(TypeError, match="example is a int; expected a tuple of arguments"):
            apply_dora(base, RULES, rngs=nnx.Rngs(1), example=3)


class TestCoverage:
    def test_each_weight_by_what_reads_it(self, base):
        table = coverage(base, ids())
        told = {one.path: (one.status, one.how) for one in table.weights}
        assert told["embedder"] == (
            "adaptable",
            "looked up and tied to a product, io, the output head",
        )
        assert told["unused"] == ("not adaptable", "no operation of this call reads it")
        assert told["experts/gate"] == ("adaptable", "read by a product, bio")
        assert told["blocks/0"] == ("adaptable", "read by a product, io")
        assert told["plain"] == ("adaptable", "nnx.Linear")
        odd = next(one for one in table.weights if one.path == "odd")
        assert (odd.status, odd.merged_bytes) == ("adaptable", 4 * WIDTH * WIDTH)
        assert table.count("not adaptable") == 1
        assert table.share("adapted", "adaptable") == pytest.approx(1 - 25 / 615)

    def test_a_table_that_is_looked_up_twice_is_tied_to_no_product(self):
        class Twice(nnx.Module):
            def __init__(self):
                self.table = nnx.Param(jnp.ones((7, WIDTH)))

            def __call__(self, ids):
                return self.table[...][ids] + self.table[...][ids[::-1]]

        assert [one.how for one in coverage(Twice(), ids()).weights] == ["looked up, io"]

    def test_it_is_printed_with_shares(self, base, adapted):
        lines = str(coverage(adapted)).splitlines()
        assert lines[0].split() == ["path", "shape", "elements", "share", "status", "how"]
        assert lines[-1].startswith("13 weights: 12 adapted (95.9% of the elements), 0 adaptable")
        assert "registered" not in str(coverage(Block(nnx.Rngs(0))))

    def test_classes_alone_say_less(self, base):
        table = coverage(base)
        assert table.count("adaptable") == 2

    def test_one_line_is_logged(self, base, caplog):
        with caplog.at_level("INFO", "jax_dora"):
            apply_dora(base, DoRARule("plain", 2, 3), rngs=nnx.Rngs(1))
        assert "13 weights: 1 adapted (4.1% of the elements)" in caplog.text

    def test_known_layers_stay_layers(self):
        table = coverage(Mixed(nnx.Rngs(0)), lambda model: model(mixed_ids()))
        told = {one.path: one.how for one in table.weights}
        assert told["attention/out"] == "nnx.LinearGeneral"
        assert told["conv"] == "nnx.Conv"
        assert told["attention/key/bias"] == "no product reads it, only add"
        assert not table.count("adapted")

    @pytest.mark.parametrize("example", [(), (lambda model: model(mixed_ids()),)])
    def test_an_adapted_model_has_the_weights_of_its_base(self, example):
        base = nnx.clone(Mixed(nnx.Rngs(0)))
        adapted = apply_dora(base, DoRARule("attention/.*", 2, 3), rngs=nnx.Rngs(1))
        of_base, of_adapted = coverage(base, *example), coverage(adapted, *example)
        assert {one.path for one in of_adapted.weights} == {one.path for one in of_base.weights}
        assert of_adapted.count("not adaptable") == of_base.count("not adaptable") > 0

    def test_an_adapted_layer_whose_kernel_others_read_is_told(self):
        class Reader(nnx.Module):
            def __init__(self):
                self.called, self.read = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in "ab")

            def __call__(self, x):
                return self.called(x) @ self.read.kernel[...]

        adapted = apply_dora(Reader(), DoRARule(".*", 2, 3), rngs=nnx.Rngs(1))
        told = {one.path: one.how for one in coverage(adapted, jnp.ones((2, WIDTH))).weights}
        assert told["called"] == "nnx.Linear"
        assert told["read"].endswith("read without its adapter outside of its calls: pass example=")

    def test_a_parameter_that_holds_a_dict_is_no_obstacle(self):
        class WithDict(nnx.Module):
            def __init__(self):
                self.held = nnx.Param({"scale": jnp.ones(())})
                self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return self.out(x * self.held.get_value()["scale"])

        model, x = WithDict(), jnp.ones((2, WIDTH))
        assert [one.path for one in coverage(model, x).weights] == ["out"]


class Held(nnx.Module):
    """Weights in a dict over which its module iterates."""

    def __init__(self, kind):
        names = ("a", "b")
        self.held = kind({name: drawn(nnx.Rngs(0), WIDTH, WIDTH) for name in names})
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        for name in self.held:
            x = jnp.tanh(x @ self.held[name][...])
        return self.out(x)


class TestWeightsInContainers:
    x = jnp.ones((2, WIDTH))

    def test_an_nnx_dict_has_the_keys_that_it_had(self):
        base = Held(nnx.Dict)
        model = apply_dora(base, DoRARule("held/.", 2, 3), rngs=nnx.Rngs(1), example=(self.x,))
        assert list(model.held) == list(base.held) == ["a", "b"]
        model.held.a_magnitude[...] *= 2
        assert jnp.allclose(model(self.x), merge_dora(model)(self.x), atol=1e-6)
        assert not jnp.allclose(model(self.x), base(self.x), atol=1e-2)

    @pytest.mark.parametrize("example", [None, (x,)])
    def test_those_in_a_plain_dict_are_told_and_refused(self, example):
        base = Held(nnx.data)
        table = coverage(base, *(example or ()))
        told = {one.path: (one.status, one.how) for one in table.weights}
        assert set(told) == {"held/a", "held/b", "out"}
        assert told["held/a"][0] == "not adaptable"
        assert "make it an attribute of a module" in told["held/a"][1]
        with pytest.raises(TypeError, match=r"held/b .*: it is inside a list, tuple or dict"):
            apply_dora(base, DoRARule("held/b", 2, 3), rngs=nnx.Rngs(1), example=example)

    @pytest.mark.parametrize("example", [None, (x,)])
    def test_those_that_one_parameter_holds_are_told_and_refused(self, example, tmp_path):
        class Together(nnx.Module):
            def __init__(self):
                self.held = nnx.Param({"a": jnp.ones((WIDTH, 3)), "b": jnp.ones(3)})
                self.out = nnx.Linear(3, WIDTH, rngs=nnx.Rngs(1))

            def __call__(self, x):
                held = self.held.get_value()
                return self.out(x @ held["a"] + held["b"][None])

        base = Together()
        told = {one.path: one.how for one in coverage(base, *(example or ())).weights}
        assert told.keys() == {"held/a", "out"}
        assert "make each a separate parameter" in told["held/a"]
        with pytest.raises(TypeError, match=r"held/a .*: its parameter holds several arrays"):
            apply_dora(base, DoRARule("held/a", 2, 3), rngs=nnx.Rngs(1), example=example)
        model = apply_dora(base, DoRARule("out", 2, 3), rngs=nnx.Rngs(1), example=example)
        jax_dora.peft.save_adapter(model, tmp_path)
        assert (jax_dora.peft.load_adapter(base, tmp_path)(self.x) == model(self.x)).all()

    def test_those_in_an_nnx_list_are_refused(self):
        class Listed(nnx.Module):
            def __init__(self):
                self.held = nnx.List([drawn(nnx.Rngs(0), WIDTH, WIDTH)])

            def __call__(self, x):
                return x @ self.held[0][...]

        with pytest.raises(TypeError, match=r"held.*: it is inside an nnx\.List"):
            apply_dora(Listed(), DoRARule("all-linear", 2, 3), rngs=nnx.Rngs(1), example=(self.x,))


def test_private_methods_and_properties_read_the_adapted_weight():
    class Private(nnx.Module):
        def __init__(self):
            self.w = drawn(nnx.Rngs(0), WIDTH, WIDTH)

        def _project(self, x):
            return x @ self.w[...]

        @property
        def doubled(self):
            return 2 * self.w[...]

        def __call__(self, x):
            return self._project(x)

    x = jnp.ones((2, WIDTH))
    model = apply_dora(Private(), DoRARule("", 2, 3), rngs=nnx.Rngs(1), example=(x,))
    train(model)
    merged = merge_dora(model)
    assert not jnp.allclose(merged(x), remove_dora(model)(x), atol=1e-3)
    assert jnp.allclose(model._project(x), merged._project(x), atol=1e-6)
    assert jnp.allclose(model.doubled, merged.doubled, atol=1e-6)


class TestAnEnsemble:
    """Models that `nnx.vmap` calls at once."""

    x = jnp.linspace(-1, 1, 3 * 2 * WIDTH).reshape(3, 2, WIDTH)

    @staticmethod
    def call(models, x):
        return nnx.vmap(lambda model, x: model(x))(models, x)

    @pytest.mark.ci
    def test_of_adapted_models(self):
        equation, rule = "bd,df->bf", DoRARule("", 2, 3)
        members = []
        for seed in range(3):
            base = Einsum(equation, (WIDTH, WIDTH), nnx.Rngs(seed))
            model = apply_dora(base, rule, rngs=nnx.Rngs(seed), example=(self.x[0],))
            train(model)
            members.append(model)
        states = [nnx.state(model) for model in members]
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
        ensemble = nnx.merge(nnx.graphdef(members[0]), stacked)
        expected = jnp.stack([model(x) for model, x in zip(members, self.x, strict=True)])
        again = set_adapter(remove_dora(ensemble), get_adapter(ensemble))
        for one in (ensemble, again, freeze(ensemble), merge_dora(ensemble)):
            assert jnp.allclose(self.call(one, self.x), expected, atol=1e-6)

    @pytest.mark.ci
    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("is_shared", [False, True])
    def test_adapted_whole(self, axis, is_shared):
        """Along any axis; an input that all share makes the models look like heads."""

        @functools.partial(nnx.vmap, out_axes=axis)
        def make(rngs):
            return Einsum("bd,df->bf", (WIDTH, WIDTH), rngs)

        @functools.partial(nnx.vmap, in_axes=(axis, None if is_shared else 0))
        def call(model, x):
            return model(x)

        base, x = make(nnx.Rngs(0).split(3)), self.x[0] if is_shared else self.x
        example = functools.partial(call, x=x)
        model = apply_dora(base, DoRARule("", 2, 3), rngs=nnx.Rngs(1), example=example)
        train(model)
        found, merged, frozen = (call(one, x) for one in (model, merge_dora(model), freeze(model)))
        assert jnp.allclose(found, merged, atol=1e-6)
        assert jnp.allclose(found, frozen, atol=1e-6)
        assert not jnp.allclose(found, call(base, x), atol=1e-3)


class OneArray(nnx.Module):
    """Two modules that hold one parameter."""

    def __init__(self, rngs):
        self.first = Einsum("bd,df->bf", (WIDTH, WIDTH), rngs)
        self.second = Einsum("bd,df->bf", (WIDTH, WIDTH), rngs)
        self.second.w = self.first.w

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("rule", [".*", "first"])
@pytest.mark.parametrize("by_example", [True, False])
def test_modules_that_share_a_parameter_are_merged_each_into_an_array_of_its_own(rule, by_example):
    jax_dora.register(Einsum, axes="io")
    model, x = OneArray(nnx.Rngs(0)), jnp.ones((2, WIDTH))
    example = (x,) if by_example else None
    adapted = train(apply_dora(model, DoRARule(rule, 2, 3), rngs=nnx.Rngs(1), example=example))
    assert len(get_adapter(adapted).arrays) == (2 if rule == ".*" else 1)
    adapted.first.w_lora_b[...] += 0.3
    merged = merge_dora(adapted)
    close(adapted(x), merged(x))
    assert merged.first.w is not merged.second.w
    assert float(jnp.abs(adapted(x) - model(x)).max()) > 0.01


class HoldsTwice(nnx.Module):
    """Reads itself the parameters of two members, by attributes of its own."""

    def __init__(self, rngs):
        self.encoder = Einsum("bd,df->bf", (WIDTH, WIDTH), rngs)
        self.encoder_w = self.encoder.w
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.linear_kernel = self.linear.kernel

    def __call__(self, x):
        x = jnp.tanh(self.encoder(x)) @ self.encoder_w[...].T
        return jnp.tanh(self.linear(x)) @ self.linear_kernel[...].T


@pytest.mark.parametrize("rule", [".*", "encoder|linear", "encoder_w|linear_kernel"])
def test_a_parameter_that_a_parent_holds_too_has_an_adapter_for_each_attribute(rule):
    model, x = HoldsTwice(nnx.Rngs(0)), jnp.ones((2, WIDTH))
    rngs = nnx.Rngs(1)
    adapted = train(apply_dora(model, DoRARule(rule, 2, 3), rngs=rngs, example=(x,)))
    assert len(get_adapter(adapted).arrays) == (4 if rule == ".*" else 2)
    found = adapted(x)
    close(found, merge_dora(adapted)(x))
    close(found, freeze(adapted)(x))
    is_adapter = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))), argnums=is_adapter)(adapted)
    assert all(jnp.any(grad) for grad in jax.tree.leaves(grads))
    base = remove_dora(adapted)
    assert base.encoder_w is base.encoder.w
    assert base.linear_kernel is base.linear.kernel


class Loop(nnx.Module):
    """Carries a layer through a loop, whose body reads a weight, as its condition does."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.w = nnx.Param(0.2 * rngs.normal((WIDTH, WIDTH)))

    def __call__(self, x):
        def goes_on(carry):
            return (carry[0] < 3) & ((x @ self.w[...]).max() < 99)

        def step(carry):
            count, x, layer = carry
            return count + 1, jnp.tanh(layer(x) @ self.w[...]), layer

        return nnx.while_loop(goes_on, step, (0, x, self.layer))[1]


def test_what_a_while_loop_carries_and_reads_is_adapted():
    model, x = Loop(nnx.Rngs(0)), jnp.ones((2, WIDTH))
    rule = DoRARule("layer|w|", 2, 3)
    adapted = train(apply_dora(model, rule, rngs=nnx.Rngs(1), example=(x,)))
    assert [one.how for one in coverage(adapted, x).weights] == [
        "read by its module's methods",
        "nnx.Linear",
    ]
    close(adapted(x), merge_dora(adapted)(x))
    assert float(jnp.abs(adapted(x) - model(x)).max()) > 0.01


class ScaledEmbed(nnx.Embed):
    """As in Gemma: an embedding times the root of its features."""

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        return super().__call__(inputs, out_sharding) * jnp.sqrt(jnp.float32(self.features))


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.embed = ScaledEmbed(7, WIDTH, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(jnp.tanh(self.embed(ids)))


@pytest.mark.ci
def test_a_scaled_embedding_that_is_the_head_too():
    model, tokens = Scaled(nnx.Rngs(0)), jnp.array([1, 6])
    rule = DoRARule("embed", 2, 3)
    assert coverage(model).count("not adaptable") == 1
    assert coverage(model, tokens).count("adaptable") == 1
    with pytest.raises(TypeError, match=r"a ScaledEmbed, which computes something else.*example="):
        apply_dora(model, rule, rngs=nnx.Rngs(1))
    adapted = apply_dora(model, rule, rngs=nnx.Rngs(1), example=(tokens,))
    close(adapted(tokens), model(tokens), 0.1)
    train(adapted)
    merged = merge_dora(adapted)
    assert type(merged.embed) is ScaledEmbed
    close(adapted(tokens), merged(tokens))
    assert float(jnp.abs(adapted(tokens) - model(tokens)).max()) > 0.01


class ScaledHead(nnx.Embed):
    """Its call is `nnx.Embed`'s, but its head is not."""

    def attend(self, query: jax.Array, out_sharding=None) -> jax.Array:
        return super().attend(query, out_sharding) / self.features


def test_an_embedding_with_its_own_attend_keeps_it():
    model, query, rule = ScaledHead(7, WIDTH, rngs=nnx.Rngs(0)), jnp.eye(WIDTH), DoRARule("", 2, 3)
    with pytest.raises(TypeError, match=r"a ScaledHead, which computes something else.*example="):
        apply_dora(model, rule, rngs=nnx.Rngs(1))
    with pytest.raises(TypeError, match=r"a ScaledHead, which computes something else.*example="):
        jax_dora.DoRAEmbed(model, rank=2, alpha=3, rngs=nnx.Rngs(1))

    def run(model: ScaledHead) -> tuple[jax.Array, jax.Array]:
        return model.attend(query), model(jnp.arange(7))

    adapted = apply_dora(model, rule, rngs=nnx.Rngs(1), example=run)
    for found, wanted in zip(run(adapted), run(model), strict=True):
        close(found, wanted)
    train(adapted)
    for found, wanted in zip(run(adapted), run(merge_dora(adapted)), strict=True):
        close(found, wanted)


class Reversible(nnx.Linear):
    """A layer of Flax with a method of its own."""

    def back(self, y: jax.Array) -> jax.Array:
        return y @ self.kernel[...].T


class Autoencoder(nnx.Module):
    def __init__(self, rngs):
        self.layer = Reversible(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        assert isinstance(self.layer, Reversible)
        return self.layer.back(jnp.tanh(self.layer(x)))


def test_a_subclass_keeps_its_class_and_methods_if_the_call_is_known():
    model, x = Autoencoder(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (5, WIDTH))
    adapted = apply_dora(model, DoRARule("layer", 2, 3), rngs=nnx.Rngs(1), example=(x,))
    close(adapted(x), model(x))
    train(adapted)
    close(adapted(x), merge_dora(adapted)(x))


def test_a_registered_subclass_of_a_layer_needs_no_inputs():
    class Squared(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            return super().__call__(inputs, out_sharding) ** 2

    jax_dora.register(Squared, param="kernel", axes="io")
    model, x = Squared(WIDTH, 3, rngs=nnx.Rngs(0)), jnp.ones((2, WIDTH))
    assert [one.how for one in coverage(model).weights] == ["registered, io"]
    adapted = apply_dora(model, DoRARule("all-linear", 2, 3), rngs=nnx.Rngs(1))
    close(adapted(x), model(x))
    train(adapted)
    close(adapted(x), merge_dora(adapted)(x))


class Tied(nnx.Module):
    """A model that reads a layer's parameter by itself."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.embed.embedding[...][ids]) @ self.embed.embedding[...].T


def test_an_adapter_that_nothing_computes_with_is_told_of_when_it_is_merged(caplog):
    adapted = apply_dora(Tied(nnx.Rngs(0)), DoRARule(".*", 2, 3), rngs=nnx.Rngs(1))
    merge_dora(adapted)
    assert not caplog.text  # of a fresh adapter nothing is known
    adapted.linear.lora_b[...] += 0.1
    adapted.embed.magnitude[...] *= 0.9  # by weight decay
    merge_dora(adapted)
    assert "never calls its layer" in caplog.text
    assert caplog.text.rstrip().endswith("\n  embed")


def test_of_several_adapters_each_is_looked_at_and_named_once(caplog):
    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=layer, b=layer, c=nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(1)))
    adapted = apply_dora(model, DoRARule(".*", 2, 3), rngs=nnx.Rngs(2))
    adapted.c.lora_b[...] += 0.1
    half = get_adapter(adapted)
    adapted.a.lora_b[...] += 0.1
    merge_dora(model, adapters=[get_adapter(adapted), half])
    [message] = caplog.messages
    assert message.startswith("adapters[1]: lora_a or lora_b is still zero")
    assert message.endswith("The adapters are:\n  a")


def test_a_layer_whose_kernel_another_module_reads_is_adapted_there():
    model, tokens = Tied(nnx.Rngs(0)), jnp.array([1, 6])
    rules = [DoRARule("all-linear", 2, 3), DoRARule("embed", 2, 3)]
    adapted = apply_dora(model, rules, rngs=nnx.Rngs(1), example=(tokens,))
    close(adapted(tokens), model(tokens), 0.1)
    train(adapted)
    assert type(adapted.embed).__mro__[1] is nnx.Embed
    close(adapted(tokens), merge_dora(adapted)(tokens))
    assert np.abs(adapted(tokens) - model(tokens)).max() > 0.01
