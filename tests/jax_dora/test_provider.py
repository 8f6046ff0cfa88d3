"""`DoRAProvider` in `qwix.apply_lora_to_model`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import linen as nn
from flax import nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.provider import DoRAProvider

# qwix calls methods that Flax has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = jax.random.normal(jax.random.key(0), (3, 8))


class Block(nnx.Module):
    """A layer of Flax and a parameter that its own code reads."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return jax.nn.silu(self.up(x)) @ self.down[...]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(5, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.encode(self.table(ids)))


class Reader(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (16, 2, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("td,dnh->tnh", x, self.weight[...])


IDS = jnp.array([[1, 4, 2]])


def adapted(base, *args, methods=("__call__",), **options):
    provider = DoRAProvider(**{"module_path": "blocks/.*", "rank": 2, "alpha": 6} | options)
    inputs = args or (IDS,)
    return qwix.apply_lora_to_model(base, provider, *inputs, methods=methods, rngs=nnx.Rngs(1))


def moved(model):
    """Trains `model` a step, in place, from an adapter that is not fresh."""
    for number, (_, one) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
        noise = jax.random.normal(jax.random.key(number), one.shape) / 5
        one[...] = one[...] * (1 + noise) + noise
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    grads = nnx.grad(
        lambda model: jnp.sum(jnp.sin(model(IDS))), argnums=nnx.DiffState(0, nnx.LoRAParam)
    )(model)
    assert all(jnp.any(one != 0) for one in jax.tree.leaves(grads))
    optimizer.update(model, grads)
    return model


def wide(array):
    return np.asarray(array, np.float64)


def merged_weight(kernel, layer, prefix=""):
    a, b, magnitude = (wide(getattr(layer, prefix + name)) for name in ADAPTER)
    weight = wide(kernel) + 3 * a @ b
    return magnitude * weight / np.linalg.norm(weight, axis=0)


ADAPTER = ("lora_a", "lora_b", "magnitude")


def test_the_model_is_apply_doras():
    base = Model(nnx.Rngs(0))
    model = adapted(base)
    assert {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(base))} == {
        path
        for path in ("/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model)))
        if not path.endswith(ADAPTER)
    }
    wanted = jax_dora.apply_dora(
        base, DoRARule("blocks/.*", 2, 6), rngs=nnx.Rngs(1), example=(IDS,)
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(wanted))
    assert type(model) is Model
    assert isinstance(model.blocks[0].up, jax_dora.DoRALinear)
    assert isinstance(model.blocks[0].down_magnitude, jax_dora.DoRAParam)
    assert not any("qwix_path" in vars(module) for _, module in nnx.iter_modules(model))
    # qwix calls the model once, which must not change the state of the result.
    assert int(model.blocks[0].calls[...]) == 0


def check_equation(model, base):
    """Compares `model` with the materialised weights of both projections in fp64."""
    found = nnx.jit(lambda model: model(IDS))(model)
    x = wide(base.table.embedding)[np.asarray(IDS)]
    for block in model.blocks:
        kernel = block.up.kernel.get_value()
        kernel = qwix.dequantize(kernel) if isinstance(kernel, qwix.QArray) else kernel
        x = x @ merged_weight(kernel, block.up) + wide(block.up.bias)
        x = x / (1 + np.exp(-x))
        is_adapted = hasattr(block, "down_lora_a")
        down = block.down.get_value()
        down = qwix.dequantize(down) if isinstance(down, qwix.QArray) else down
        x = x @ (merged_weight(down, block, "down_") if is_adapted else wide(down))
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + base.norm.epsilon)
    wanted = x @ wide(base.head.kernel)
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert np.abs(found - base(IDS)).max() > 0.1


@pytest.mark.ci
def test_a_trained_model_computes_the_equation():
    base = Model(nnx.Rngs(0))
    check_equation(moved(adapted(base)), base)


def test_rules_apply_in_order_and_a_plain_rule_leaves_out():
    rules = [
        qwix.QuantizationRule(module_path="blocks/1.*"),
        qwix.LoraRule(module_path=r"blocks/.*/up", rank=3, alpha=1),
        qwix.LoraRule(module_path=".*", rank=2, alpha=1, dropout=0.5),
        qwix.LoraRule(module_path="absent", rank=2, alpha=1),
    ]
    provider = DoRAProvider(rules)
    model = qwix.apply_lora_to_model(Model(nnx.Rngs(0)), provider, IDS, rngs=nnx.Rngs(1))
    ranks = {path: one["lora_a"].shape for path, one in jax_dora.get_adapter(model).arrays.items()}
    assert ranks == {"blocks/0/up": (8, 3), "blocks/0": (16, 2), "head": (8, 2)}
    assert model.head.dropout.rate == 0.5
    assert [rule.module_path for rule in provider.get_unused_rules()] == ["absent"]


def test_a_method_other_than_call_is_adapted():
    model = adapted(Model(nnx.Rngs(0)), X, methods=("encode",))
    assert jax_dora.get_adapter(model).arrays.keys() == {
        f"blocks/{at}{name}" for at in range(2) for name in ("", "/up")
    }


def test_a_model_that_is_a_layer_and_initializers():
    zeros = nnx.initializers.zeros
    base = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    model = adapted(base, X, module_path=".*", lora_a_initializer=zeros)
    assert isinstance(model, jax_dora.DoRALinear)
    assert not model.lora_a[...].any()
    np.testing.assert_allclose(model(X), base(X), rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("qtype", ["nf4", jnp.int8])
def test_a_weight_qtype_gives_qdora(qtype):
    base = Model(nnx.Rngs(0))
    model = adapted(base, module_path=".*up", weight_qtype=qtype, tile_size=4)
    name = qtype if isinstance(qtype, str) else "int8"
    wanted = jax_dora.apply_dora(
        jax_dora.quantize(base, name, path=".*up", tile_size=4),
        DoRARule(".*up", 2, 6),
        rngs=nnx.Rngs(1),
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(wanted))
    assert isinstance(model.blocks[1].up.kernel.get_value(), qwix.QArray)
    check_equation(moved(model), base)
    # Without a tile size all input features share a scale, as in qwix.
    whole = adapted(base, module_path=".*up", weight_qtype=qtype)
    lora = qwix.apply_lora_to_model(
        base,
        qwix.LoraProvider(module_path=".*up", rank=2, alpha=6, weight_qtype=qtype),
        IDS,
        rngs=nnx.Rngs(1),
    )
    theirs, ours = lora.blocks[0].up.kernel.array, whole.blocks[0].up.kernel.get_value()
    # The ends of int8's range are halfway between two codes.
    difference = np.abs(qwix.dequantize(ours) - qwix.dequantize(theirs))
    assert np.all(difference <= 1.01 * ours.scale)
    assert np.mean(difference > 0) <= 0.05


@pytest.mark.ci
def test_a_weight_qtype_quantises_what_a_modules_code_reads():
    base = Model(nnx.Rngs(0))
    model = adapted(base, weight_qtype="nf4", tile_size=4)
    assert isinstance(model.blocks[0].down.get_value(), qwix.QArray)
    dense = jax_dora.remove_dora(model)
    assert dense.blocks[0].down.dtype == jnp.float32
    # A fresh adapter scales nothing: g is exactly 1.
    x = jax.random.normal(jax.random.key(3), (3, 16))
    alone = adapted(Reader(nnx.Rngs(0)), x, module_path="", weight_qtype="int8")
    plain = jax_dora.remove_dora(alone)
    np.testing.assert_allclose(alone(x), plain(x), rtol=2e-6, atol=2e-6)
    [norm] = jax_dora.norms(alone).values()
    np.testing.assert_array_equal(norm, alone.weight_magnitude[...])
    check_equation(moved(model), base)
    jax_dora.reset_magnitudes(model)
    merged = jax_dora.merge_dora(model)
    assert type(merged) is Model
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(merged(IDS), model(IDS), atol=0.1)
    with pytest.raises(ValueError, match="cannot be merged: requantize is True"):
        jax_dora.merge_dora(model, requantize=True, return_report=True)
    half = Reader(nnx.Rngs(0))
    half.weight.set_value(half.weight[...].astype(jnp.float16))
    with pytest.raises(ValueError, match="its weight has dtype float16"):
        adapted(half, x.astype(jnp.float16), module_path="", weight_qtype="int8")


def test_weights_loaded_later_need_reset_magnitudes():
    base, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(5))
    model = adapted(base)
    loaded = nnx.state(other)
    nnx.update(model, loaded)
    assert np.abs(model(IDS) - other(IDS)).max() > 0.01
    jax_dora.reset_magnitudes(model)
    np.testing.assert_allclose(model(IDS), other(IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_a_folder_for_peft_is_saved_and_loaded(tmp_path):
    base = Model(nnx.Rngs(0))
    model = moved(adapted(base, module_path="blocks/.*up|head"))
    jax_dora.peft.save_adapter(model, tmp_path)
    loaded = jax_dora.peft.load_adapter(base, tmp_path)
    np.testing.assert_array_equal(loaded(IDS), model(IDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_calibration_method": "minmax"}, "act_calibration_method is 'minmax'"),
        ({"weight_calibration_method": "rms,7"}, "weight_calibration_method is 'rms,7'"),
        ({"op_names": ("einsum",)}, r"op_names is \('einsum',\)"),
        ({"tile_size": 4}, "tile_size is 4 without weight_qtype"),
        ({"act_qtype": "int8"}, "act_qtype is 'int8' without weight_qtype"),
        ({"weight_qtype": "nf4", "tile_size": 0.25}, "tile_size is 0.25"),
        ({"disable_jit": True}, "disable_jit is True"),
        ({"rank": 0}, "rank is 0"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"module_path": "("}, r"path is '\('"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DoRAProvider(**{"module_path": ".*up", "rank": 2, "alpha": 6} | options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"module_path": "absent"}, ValueError, "'absent' matches no module(.|\n)*blocks/0/up"),
        ({"module_path": "table"}, ValueError, "'table' matches no module"),
        ({"module_path": ".*up", "weight_qtype": "mxfp4"}, ValueError, "qtype is 'mxfp4'"),
        (
            {"module_path": ".*up", "weight_qtype": "nf4", "tile_size": 3},
            ValueError,
            "'blocks/0/up' cannot be quantised",
        ),
    ],
)
def test_rules_that_do_not_fit_the_model_are_named(options, error, message):
    with pytest.raises(error, match=message):
        adapted(Model(nnx.Rngs(0)), **options)


def test_calls_that_cannot_be_adapted_are_named():
    base = Model(nnx.Rngs(0))
    with pytest.raises(ValueError, match="one already"):
        adapted(adapted(base))
    provider = DoRAProvider(module_path=".*up", rank=2, alpha=6)
    late = qwix.apply_lora_to_model(base, provider, IDS, rngs=nnx.Rngs(1), skip_nnx_init=True)
    with pytest.raises(ValueError, match="skip_nnx_init"):
        late(IDS)
    dense = qwix.apply_lora_to_model(nn.Dense(4), provider)
    with pytest.raises(TypeError, match=r"jax_dora\.linen\.apply_dora"):
        dense.init(jax.random.key(0), X)
