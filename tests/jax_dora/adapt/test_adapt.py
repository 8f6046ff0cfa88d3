"""`apply_dora` on nnx models."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora import DoRALinear, DoRARule, apply_dora, get_adapter, set_adapter
from tests.jax_dora.meshes import automatic
from tests.jax_dora.small_models import ALL, LAYERS, WIDTH, Block, Mixed, Stacked, call, ids, train
from tests.tables import ci, thinned

FP8 = "float8_e4m3fn"


def arrays(model: nnx.Module) -> dict:
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize("dtype", thinned([jnp.float32, jnp.bfloat16], [jnp.float32]))
def test_every_layer_is_found_and_a_fresh_adapter_changes_no_bit(dtype):
    model = Mixed(nnx.Rngs(0), dtype)
    adapted = apply_dora(model, ALL, rngs=nnx.Rngs(1))
    assert type(adapted.embed) is jax_dora.DoRAEmbed
    assert type(adapted.conv) is jax_dora.DoRAConv
    assert type(adapted.attention.query) is jax_dora.DoRALinearGeneral
    assert type(adapted.attention.out) is jax_dora.DoRALinearGeneral
    assert type(adapted.blocks[0]) is DoRALinear
    assert type(adapted.named["gate"]) is jax_dora.DoRAEinsum
    assert type(adapted.pairs[0]["one"]) is DoRALinear
    assert type(adapted.norm) is nnx.LayerNorm
    with jax.numpy_dtype_promotion("standard"):  # nnx.LayerNorm in bf16 wants it
        y, expected = call(adapted, ids()), call(model, ids())
    assert y.dtype == dtype
    assert jnp.array_equal(y, expected)


@pytest.mark.parametrize(
    "quantised", [ci({}), {"qtype": "int8"}, {"qtype": FP8, "act_qtype": FP8, "bwd_qtype": FP8}]
)
@pytest.mark.ci
def test_an_empty_batch_has_an_empty_result_and_gradients_of_zero(quantised):
    """With and without dropout, of every kind of layer; and of no requests to a bank."""
    model = Block(nnx.Rngs(0)) if quantised else Mixed(nnx.Rngs(0))
    rules = [dataclasses.replace(rule, dropout=0.5) for rule in ALL[:1]]
    rules += [DoRARule("named/gate|attention/.*", 3, 4.0), *ALL[1:]]
    if quantised:
        model = jax_dora.quantize(model, **quantised)
        rules = [DoRARule("linear", 3, 4.0, dropout=0.5), DoRARule("heads", 3, 4.0)]
    x = jnp.zeros((0, 5, WIDTH)) if quantised else ids()[:0]
    adapted = apply_dora(model, rules, rngs=nnx.Rngs(1))
    grads = nnx.grad(lambda model: model(x).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(adapted)
    assert adapted(x).shape == model(x).shape == (0, 5, WIDTH)
    assert not any(jnp.any(grad) for grad in jax.tree.leaves(grads))
    bank = jax_dora.AdapterBank(model, 2, 4)
    assert jax_dora.with_bank(model, bank, np.zeros(0, np.int32))(x).shape == (0, 5, WIDTH)


def test_the_model_is_left_as_it_is_and_its_arrays_are_shared():
    model = Mixed(nnx.Rngs(0))
    before = arrays(model)
    adapted = apply_dora(model, ALL, rngs=nnx.Rngs(1))
    assert type(model.blocks[0]) is nnx.Linear
    after = arrays(adapted)
    assert all(after[path] is before[path] for path in before)
    train(adapted)
    adapted.blocks[0].kernel[...] += 1
    assert all(array is before[path] for path, array in arrays(model).items())


def test_a_shared_module_stays_shared_whichever_path_matches():
    adapted = apply_dora(Mixed(nnx.Rngs(0)), DoRARule("again", 2, 4), rngs=nnx.Rngs(1))
    assert type(adapted.again) is DoRALinear
    assert adapted.again is adapted.blocks[0]


def test_the_first_match_wins():
    rules = [DoRARule("blocks/0", 2, 4), DoRARule(r"blocks/\d|pairs/.*", 5, 4, use_rslora=True)]
    adapted = apply_dora(Mixed(nnx.Rngs(0)), rules, rngs=nnx.Rngs(1))
    assert adapted.blocks[0].rank == 2
    assert adapted.pairs[0]["one"].rank == 5
    assert adapted.pairs[0]["one"].scale == 4 / 5**0.5


def test_the_rule_reaches_the_layer():
    rule = DoRARule(
        "linear",
        3,
        6.0,
        dropout=0.25,
        dropout_mode="input",
        adapter_dtype=jnp.bfloat16,
        lora_a_init=nnx.initializers.ones,
        lora_b_init=nnx.initializers.normal(1.0),
        implementation="xla",
    )
    layer = apply_dora(Block(nnx.Rngs(0)), rule, rngs=nnx.Rngs(1)).linear
    assert (layer.rank, layer.scale, layer.implementation) == (3, 2.0, "xla")
    assert (layer.dropout.rate, layer.dropout_mode) == (0.25, "input")
    assert layer.lora_a.dtype == layer.lora_b.dtype == jnp.bfloat16
    assert jnp.all(layer.lora_a[...] == 1)
    assert jnp.any(layer.lora_b[...] != 0)


LINEAR = {
    "linear": lambda rngs: nnx.Linear(6, 4, rngs=rngs),
    "general": lambda rngs: nnx.LinearGeneral(6, (2, 2), rngs=rngs),
    "einsum": lambda rngs: nnx.Einsum("ti,io->to", (6, 4), rngs=rngs),
}
OTHERS = {
    "embed": lambda rngs: nnx.Embed(6, 4, rngs=rngs),
    "conv": lambda rngs: nnx.Conv(6, 4, (3,), rngs=rngs),
    "norm": lambda rngs: nnx.LayerNorm(6, rngs=rngs),
    "no projection": lambda rngs: nnx.Einsum("td,dt->t", (6, 4), rngs=rngs),
    "of its own": lambda rngs: Own(6, 4, rngs=rngs),
}


class Own(nnx.Linear):
    """Computes something else."""

    def __call__(self, inputs, out_sharding=None):
        return super().__call__(inputs) ** 2


def test_all_linear_adapts_every_projection_but_the_output_head():
    rngs = nnx.Rngs(0)
    layers = {name: make(rngs) for name, make in (LINEAR | OTHERS).items()}
    model = nnx.Dict(**layers, lm_head=LINEAR["linear"](rngs), inner=Block(rngs))
    model.inner.head = LINEAR["general"](rngs)
    adapted = apply_dora(model, DoRARule("all-linear", 2, 4), rngs=rngs)
    paths = {*LINEAR, "inner/linear", "inner/heads"}
    assert get_adapter(adapted).arrays.keys() == paths
    with pytest.raises(ValueError, match=r"one adapter at a time.*\n  einsum \(DoRAEinsum\)"):
        apply_dora(adapted, DoRARule("all-linear", 2, 4), rngs=rngs)
    with pytest.raises(ValueError, match="path 'all-linear', matches no layer"):
        apply_dora(nnx.Dict(head=LINEAR["linear"](rngs)), DoRARule("all-linear", 2, 4), rngs=rngs)


def test_exclude_leaves_layers_out():
    rngs = nnx.Rngs(0)
    model = nnx.Dict({name: make(rngs) for name, make in LINEAR.items()})
    rule = DoRARule("all-linear", 2, 4, exclude="lin.*")
    adapted = apply_dora(model, rule, rngs=rngs)
    assert get_adapter(adapted).arrays.keys() == {n for n in LINEAR if not n.startswith("lin")}
    with pytest.raises(ValueError, match=r"exclude 'lin', matches no layer"):
        apply_dora(model, DoRARule(".*", 2, 4, exclude="lin"), rngs=rngs)


@pytest.mark.parametrize("base", LINEAR.values(), ids=LINEAR)
def test_keep_inner_goes_with_the_adapter(base):
    model = nnx.Dict(layer=base(nnx.Rngs(0)))
    rule = DoRARule("layer", 2, 2, keep_inner=True)
    adapted = apply_dora(model, rule, rngs=nnx.Rngs(0))
    assert "name=dora_inner" in str(
        jax.make_jaxpr(nnx.grad(lambda adapted: jnp.sum(adapted["layer"](jnp.ones((3, 6))))))(
            adapted
        )
    )
    assert set_adapter(model, get_adapter(adapted))["layer"].keep_inner


@pytest.mark.parametrize("name", ["embed", "conv"])
def test_keep_inner_is_for_linear_layers(name):
    rule = DoRARule("layer", 2, 2, keep_inner=True)
    with pytest.raises(ValueError, match=r"keep_inner is True for an nnx\.(Embed|Conv)"):
        apply_dora(nnx.Dict(layer=OTHERS[name](nnx.Rngs(0))), rule, rngs=nnx.Rngs(0))


def test_a_layer_is_a_model_and_dots_match_everything_with_parameters():
    layer = apply_dora(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), DoRARule("", 2, 4), rngs=nnx.Rngs(1))
    assert type(layer) is DoRALinear
    block = apply_dora(Block(nnx.Rngs(0)), DoRARule(".*", 2, 4), rngs=nnx.Rngs(1))
    assert type(block.linear) is DoRALinear
    assert type(block.heads) is jax_dora.DoRALinearGeneral


class TestStacked:
    """Layers under `nnx.scan`."""

    x = jax.random.normal(jax.random.key(2), (4, WIDTH))

    def adapt(self, **options) -> tuple[Stacked, Stacked]:
        model = Stacked(nnx.Rngs(0))
        rule = DoRARule("blocks/.*", 2, 4, **options)
        return model, apply_dora(model, rule, rngs=nnx.Rngs(1))

    def test_a_fresh_adapter_changes_no_bit(self):
        model, adapted = self.adapt()
        assert adapted.blocks.linear.lora_a.shape == (LAYERS, WIDTH, 2)
        assert adapted.blocks.heads.lora_b.shape == (LAYERS, 2, 2, WIDTH // 2)
        assert adapted.blocks.linear.kernel[...] is model.blocks.linear.kernel[...]
        lora_a = adapted.blocks.linear.lora_a[...]
        assert not jnp.array_equal(lora_a[0], lora_a[1])
        assert jnp.array_equal(call(adapted, self.x), call(model, self.x))

    @pytest.mark.slow
    def test_it_trains_and_drops_inputs(self):
        _, adapted = self.adapt(dropout=0.3, lora_b_init=nnx.initializers.normal(0.1))
        assert not jnp.array_equal(adapted(self.x), adapted(self.x))
        adapted.eval()
        assert jnp.array_equal(adapted(self.x), adapted(self.x))
        adapted.train()
        optimizer = nnx.Optimizer(adapted, optax.sgd(0.02), wrt=nnx.LoRAParam)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return jnp.mean(model(self.x) ** 2)

            value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
            optimizer.update(model, grads)
            return value

        losses = [step(adapted, optimizer) for _ in range(5)]
        assert losses[-1] < losses[0]


class TestSharding:
    """On a mesh of several devices."""

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return automatic(data=2, model=4)

    def place(self, variable, *spec) -> None:
        sharding = NamedSharding(self.mesh, P(*spec))
        variable.set_value(jax.device_put(variable[...], sharding))

    def expect(self, layer, lead=()) -> None:
        for name, spec in {
            "kernel": ("data", "model"),
            "lora_a": ("data", None),
            "lora_b": (None, "model"),
            "magnitude": ("model",),
        }.items():
            array = getattr(layer, name)[...]
            expected = NamedSharding(self.mesh, P(*lead, *spec))
            assert array.sharding.is_equivalent_to(expected, array.ndim), name

    def test_metadata_is_kept_and_given_to_the_adapter(self):
        with jax.set_mesh(self.mesh):
            base = nnx.Linear(
                8, 8, kernel_metadata={"out_sharding": ("data", "model")}, rngs=nnx.Rngs(0)
            )
        layer = apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0))
        assert layer.kernel.get_metadata("out_sharding") == ("data", "model")
        assert layer.lora_a.get_metadata("out_sharding") == ("data", None)
        assert layer.lora_b.get_metadata("out_sharding") == (None, "model")
        assert layer.magnitude.get_metadata("out_sharding") == ("model",)
        self.expect(layer)

    @pytest.mark.slow
    def test_a_stack_keeps_the_name_of_its_axis(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return nnx.Linear(8, 8, kernel_metadata={"out_sharding": ("data", "model")}, rngs=rngs)

        with jax.set_mesh(self.mesh):
            base = make(nnx.Rngs(0))
        layer = apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0))
        assert layer.lora_b.get_metadata("out_sharding") == (None, None, "model")
        self.expect(layer, lead=(None,))

    def test_arrays_sharded_without_metadata(self):
        base = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.place(base.kernel, "data", "model")
        self.expect(apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0)))

    def test_a_layer_on_one_device_after_a_layer_on_the_mesh(self):
        """Both draw from the same `rngs`."""

        def draw(key, shape, dtype):  # on the key's devices, unlike the draws of NumPy
            return (jax.random.bits(key, shape) % 7).astype(dtype)

        first, second = (nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2))
        self.place(first.kernel, "data", "model")
        device = jax.devices()[1]
        second.kernel.set_value(jax.device_put(second.kernel[...], device))
        model = nnx.Dict(first=first, second=second)
        rule = DoRARule(".*", 2, 4, lora_a_init=draw)
        adapted = apply_dora(model, rule, rngs=nnx.Rngs(2))
        self.expect(adapted.first)
        layer, x = adapted.second, jnp.ones((2, 8))
        for array in (layer.lora_a, layer.lora_b, layer.magnitude):
            assert array.sharding.device_set == {device}
        assert jnp.array_equal(layer(x), second(x))

    @pytest.mark.parametrize("metadata", [{}, {"out_sharding": ("data", "model")}])
    @pytest.mark.ci
    def test_a_closed_over_model_in_a_jitted_function(self, metadata):
        with jax.set_mesh(self.mesh):
            base = nnx.Linear(8, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        self.place(base.kernel, "data", "model")

        def make():
            return apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0))

        want, abstract = make(), nnx.eval_shape(make)
        assert abstract.lora_a.shape == want.lora_a.shape
        adapter = get_adapter(want)
        x = jnp.ones((2, 8))
        for function in (lambda x: make()(x), lambda x: set_adapter(base, adapter)(x)):
            chex.assert_trees_all_close(jax.jit(function)(x), want(x), rtol=1e-5)

    @pytest.mark.slow
    def test_a_convolution(self):
        base = nnx.Conv(4, 8, (3,), rngs=nnx.Rngs(0))
        self.place(base.kernel, None, "data", "model")
        layer = apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(0))
        assert layer.lora_a[...].sharding.spec == P(None, "data", None)
        assert layer.magnitude[...].sharding.spec == P("model")


def test_abstractly():
    def make():
        return apply_dora(Stacked(nnx.Rngs(0)), DoRARule(".*", 2, 4), rngs=nnx.Rngs(1))

    abstract, concrete = nnx.eval_shape(make), make()
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        nnx.state(abstract),
        nnx.state(concrete),
    )


class TestRefusals:
    """Errors list what is there, and leave the model alone."""

    def refuse(self, model, rules, error, match, rngs=None) -> None:
        with pytest.raises(error, match=match):
            apply_dora(model, rules, rngs=rngs or nnx.Rngs(0))

    def test_an_abstract_model(self):
        abstract = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
        rule = DoRARule("linear", 2, 4)
        self.refuse(abstract, rule, ValueError, r"model is abstract.*inside of nnx\.eval_shape")

        def adapt(model):
            return apply_dora(model, rule, rngs=nnx.Rngs(1))

        found = nnx.eval_shape(adapt, abstract)
        assert nnx.graphdef(found) == nnx.graphdef(adapt(Block(nnx.Rngs(0))))

    def test_a_rule_that_matches_nothing(self):
        rules = [DoRARule("blocks/0", 2, 4), DoRARule("block", 2, 4)]
        match = r"rules\[1\], path 'block', matches no layer.*\n  again\n  attention/key\n"
        self.refuse(Mixed(nnx.Rngs(0)), rules, ValueError, match)

    def test_a_rule_that_others_leave_nothing_to(self):
        rules = [DoRARule(r"blocks/\d", 2, 4), DoRARule("blocks/0", 2, 4)]
        self.refuse(Mixed(nnx.Rngs(0)), rules, ValueError, r"rules\[1\].*earlier rules take")

    def test_a_module_that_cannot_be_adapted(self):
        match = (
            r"nnx\.Linear, .*nnx\.Conv.*\n  norm \(nnx\.LayerNorm\): it has no weight of two axes$"
        )
        self.refuse(Mixed(nnx.Rngs(0)), DoRARule(".*", 2, 4), TypeError, match)

    def test_a_subclass_that_computes_something_else(self):
        model = nnx.Sequential(Own(2, 3, rngs=nnx.Rngs(0)))
        match = r"layers/0 \(.*Own\): a Own, which computes something else than nnx.Linear"
        self.refuse(model, DoRARule(".*", 2, 4), TypeError, match)

    @pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
    @pytest.mark.parametrize("example", [None, (jnp.ones((2, WIDTH)),)])
    def test_a_layer_whose_kernel_is_written_by_what_is_around_it(self, wrapper, example):
        inner, last = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2))
        model = nnx.Sequential(wrapper(inner, rngs=nnx.Rngs(0)), last)
        rule = DoRARule("layers/0/layer_instance", 3, 4.0)
        match = (
            rf"layer_instance \(nnx.Linear\): nnx.{wrapper.__name__} overwrites it in every call"
        )
        with pytest.raises(TypeError, match=match):
            apply_dora(model, rule, rngs=nnx.Rngs(1), example=example)
        everything = DoRARule("all-linear", 3, 4.0)
        adapted = apply_dora(model, everything, rngs=nnx.Rngs(1), example=example)
        assert list(get_adapter(adapted).arrays) == ["layers/1"]
        with pytest.raises(TypeError, match="layer_instance"):
            jax_dora.quantize(model, "int8", path=rule.path)
        with pytest.raises(ValueError, match=rf"{wrapper.__name__} overwrites it in every call"):
            jax_dora.AdapterBank(model, 2, 4, path=rule.path)

    @pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
    def test_no_adapter_goes_into_a_layer_whose_kernel_is_written(self, wrapper, tmp_path):
        class Holder(nnx.Module):
            def __init__(self, layer, *, rngs):
                self.layer_instance = layer

        def model(around):
            return nnx.Sequential(around(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)))

        adapted = apply_dora(model(Holder), DoRARule(".*", 2, 4), rngs=nnx.Rngs(1))
        with pytest.raises(
            ValueError, match="'layers/0/layer_instance'; the model's layers that can"
        ):
            set_adapter(model(wrapper), get_adapter(adapted))
        jax_dora.peft.save_adapter(adapted, tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"0\.layer_instance\.lora_A\.weight finds no layer"):
            jax_dora.peft.load_adapter(model(wrapper), tmp_path / "adapter")

    def test_a_layer_with_an_adapter(self):
        adapted = apply_dora(Block(nnx.Rngs(0)), DoRARule("linear", 2, 4), rngs=nnx.Rngs(0))
        match = r"one adapter at a time.*\n  linear \(DoRALinear\)"
        self.refuse(adapted, DoRARule(".*", 2, 4), ValueError, match)

    def test_things_that_are_no_model_rules_or_rngs(self):
        block, rule = Block(nnx.Rngs(0)), DoRARule("linear", 2, 4)
        self.refuse([block], rule, TypeError, r"model is a list; expected an nnx\.Module")
        self.refuse(block, [], ValueError, "rules is empty")
        self.refuse(block, ["linear"], TypeError, r"rules\[0\] is a str; expected a DoRARule")
        self.refuse(block, None, TypeError, "rules is a NoneType; expected a DoRARule, or a list")
        self.refuse(block, rule, TypeError, r"rngs is a int; expected nnx\.Rngs", rngs=1)

    def test_streams_that_are_not_there(self):
        rule = DoRARule("linear", 2, 4, dropout=0.1)
        for stream, rngs in [("params", nnx.Rngs(dropout=0)), ("dropout", nnx.Rngs(params=0))]:
            match = f"'linear' cannot be adapted: rngs has no '{stream}' stream, only "
            self.refuse(Block(nnx.Rngs(0)), rule, ValueError, match, rngs=rngs)

    def test_a_path_that_is_empty_is_seen(self):
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.refuse(linear, DoRARule("linear", 2, 4), ValueError, r"parameters are:\n  ''$")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"keep_inner": 3}, TypeError, "keep_inner is 3; expected True or False"),
        ({"adapter_dtype": "bf16"}, TypeError, "adapter_dtype is 'bf16'; expected float16"),
        ({"lora_a_init": 3}, TypeError, "lora_a_init is 3; expected a function of key, shape"),
        (
            {"keep_inner": True, "dropout": 0.1, "dropout_mode": "input"},
            ValueError,
            "keep_inner is True with dropout_mode 'input'",
        ),
    ],
)
def test_a_rule_out_of_range(options, error, match):
    with pytest.raises(error, match=match):
        DoRARule(**({"path": "a", "rank": 2, "alpha": 4.0} | options))


def test_a_module_that_refers_to_its_parent():
    class Child(nnx.Module):
        def __init__(self, parent, rngs):
            self.parent = parent
            self.linear = nnx.Linear(2, 3, rngs=rngs)

    class Parent(nnx.Module):
        def __init__(self, rngs):
            self.child = Child(self, rngs)

    adapted = apply_dora(Parent(nnx.Rngs(0)), DoRARule("child/linear", 1, 1), rngs=nnx.Rngs(0))
    assert type(adapted.child.linear) is DoRALinear
    assert adapted.child.parent is adapted


class Named(nnx.Linear):
    """A subclass that computes what nnx.Linear does, with things of its own."""

    def __init__(self, width: int, *, label: str, rngs: nnx.Rngs) -> None:
        super().__init__(width, width, rngs=rngs)
        self.label = label
        self.temperature = nnx.Param(jnp.full((1,), 2.0))
        self.history = nnx.data([jnp.zeros(2)])

    def describe(self) -> str:
        return f"{self.label} of {self.out_features}"


@pytest.mark.parametrize("back", [jax_dora.remove_dora, jax_dora.merge_dora])
def test_a_subclass_comes_back_as_it_was(back):
    model = Named(WIDTH, label="gate", rngs=nnx.Rngs(0))
    adapted = apply_dora(model, DoRARule("", 2, 4), rngs=nnx.Rngs(1))
    assert adapted.temperature[...] is model.temperature[...]
    plain = back(adapted)
    assert type(plain) is Named
    assert plain.describe() == "gate of 8"
    assert nnx.graphdef(plain) == nnx.graphdef(nnx.clone(model))
    assert plain.temperature[...] is model.temperature[...]
    again = apply_dora(plain, DoRARule("", 2, 4), rngs=nnx.Rngs(1))
    x = jnp.ones((2, WIDTH))
    assert jnp.array_equal(call(again, x), call(model, x))


def test_an_attribute_by_an_adapters_name_is_refused():
    class Scaled(nnx.Linear):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(3, 4, rngs=rngs)
            self.scale = 2.0

    with pytest.raises(ValueError, match=r"Scaled.* has an attribute 'scale'.*the adapter needs"):
        apply_dora(Scaled(nnx.Rngs(0)), DoRARule("", 2, 4), rngs=nnx.Rngs(0))


TABLED = {
    "linear": (lambda rngs: nnx.Linear(4, 3, rngs=rngs), jnp.ones((2, 4))),
    "general": (lambda rngs: nnx.LinearGeneral(4, (2, 3), rngs=rngs), jnp.ones((2, 4))),
    "einsum": (lambda rngs: nnx.Einsum("bd,df->bf", (4, 3), rngs=rngs), jnp.ones((2, 4))),
    "embed": (lambda rngs: nnx.Embed(4, 3, rngs=rngs), jnp.ones((2,), jnp.int32)),
    "conv": (lambda rngs: nnx.Conv(4, 3, (3,), rngs=rngs), jnp.ones((2, 5, 4))),
}


@pytest.mark.parametrize("name", thinned(TABLED, ["linear", "einsum"]))
def test_tabulate_shows_one_row_for_a_layer(name):
    layer, x = TABLED[name]

    class One(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = layer(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    adapted = apply_dora(One(nnx.Rngs(0)), DoRARule("layer", 2, 4), rngs=nnx.Rngs(1))
    table = nnx.tabulate(adapted, x, console_kwargs={"force_terminal": False, "width": 200})
    (row,) = (line for line in table.splitlines() if "layer" in line)
    assert all(name in table for name in ("DoRAParam", "lora_a", "lora_b", "magnitude"))
    assert type(adapted.layer).__name__ in row


def test_without_jit():
    layer = nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0))
    with jax.disable_jit():
        adapted = apply_dora(layer, DoRARule("", 3, 4.0), rngs=nnx.Rngs(1))
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.grad(lambda model: model(jnp.ones((2, WIDTH))).sum(), argnums=wrt)(adapted)
    assert jnp.any(grads["lora_b"][...])


def test_a_module_of_another_framework_is_listed_with_the_reason():
    """Equinox's modules are dataclasses that are pytrees."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Linear:
        weight: jax.Array
        bias: jax.Array

    class Model(nnx.Module):
        def __init__(self):
            self.other = nnx.data(Linear(jnp.ones((4, 3)), jnp.ones(4)))

    told = [(one.path, one.status, one.how) for one in jax_dora.coverage(Model()).weights]
    [(path, status, how)] = told
    assert (path, status) == ("other/weight", "not adaptable")
    assert "Linear, which is no nnx module" in how
    with pytest.raises(ValueError, match=r"(?s)other/weight"):
        jax_dora.apply_dora(Model(), jax_dora.DoRARule("all-linear", 2, 4), rngs=nnx.Rngs(0))


def test_keras_variables_are_listed_with_the_reason():
    """With KERAS_NNX_ENABLED, Keras' layers are nnx modules, and their variables nnx variables."""
    variable = type("Variable", (nnx.Variable,), {"__module__": "keras.src.backend"})

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = variable(jnp.ones((4, 3)))

    model = Model()
    [weight] = jax_dora.coverage(model).weights
    assert (weight.path, weight.status) == ("kernel", "not adaptable")
    assert "variable of Keras" in weight.how
