"""Training with wrt=nnx.Param changes the base model, which no adapter stores: a warning."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
from jax_dora.peft import load_adapter, save_adapter
from tests.jax_dora.meshes import automatic, explicit

RULE = jax_dora.DoRARule(".*up", rank=2, alpha=4)
X = jax.random.normal(jax.random.key(0), (5, 6))


class Block(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.up, self.down = nnx.Linear(6, 12, rngs=rngs), nnx.Linear(12, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(12, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.gelu(self.up(x))))


def adapted(seed: int = 0) -> Block:
    return jax_dora.apply_dora(Block(seed), RULE, rngs=nnx.Rngs(1))


def loss_fn(model, x):
    return jnp.square(model(x)).mean()


@nnx.jit
def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_fn)(model, x))


def train(model, wrt):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    step(model, optimizer, X)
    return model


def train_split(model, wrt):
    graphdef, trained, frozen = nnx.split(model, wrt, ...)

    @jax.jit
    def step(trained, frozen, x):
        grads = jax.grad(lambda one: loss_fn(nnx.merge(graphdef, one, frozen, copy=True), x))
        return jax.tree.map(lambda one, grad: one - 0.1 * grad, trained, grads(trained))

    return nnx.merge(graphdef, step(trained, frozen, X), frozen)


@pytest.mark.parametrize("train", [train, train_split])
def test_a_trained_base_is_named(train, tmp_path, caplog):
    save_adapter(train(adapted(), nnx.LoRAParam), tmp_path / "adapter")
    assert not caplog.messages

    model = train(adapted(), nnx.Param)
    save_adapter(model, tmp_path / "both")
    [message] = caplog.messages
    assert message.startswith("save_adapter leaves out the base model, 6 of whose parameters")
    assert "down/bias, down/kernel, norm/bias, norm/scale, up/bias and 1 more" in message
    assert "wrt=nnx.LoRAParam" in message
    assert "modules_to_save" in message

    caplog.clear()
    jax_dora.get_adapter(model)
    assert "get_adapter leaves out" in caplog.text


def test_what_is_stored_is_not_named(tmp_path, caplog):
    model = train(adapted(), nnx.Param)
    save_adapter(model, tmp_path / "most", modules_to_save=["down"], bias="all")
    assert "2 of whose parameters" in caplog.text
    assert ": norm/scale, up/kernel." in caplog.text


def test_bases_that_nobody_trained_are_not_named(tmp_path, caplog):
    first, second = adapted(0), adapted(1)
    assert not jnp.array_equal(first.up.kernel[...], second.up.kernel[...])
    save_adapter(first, tmp_path / "first")
    save_adapter(second, tmp_path / "second")
    third = jax_dora.set_adapter(Block(2), jax_dora.get_adapter(first))
    save_adapter(third, tmp_path / "third")
    fourth = load_adapter(Block(3), tmp_path / "first")
    save_adapter(fourth, tmp_path / "fourth")
    # The shapes of this base are known, and its values are loaded late, as docs/adapting.md says.
    nnx.update(first, nnx.state(Block(4), nnx.Param))
    jax_dora.reset_magnitudes(first)
    save_adapter(first, tmp_path / "later")
    assert "leaves out" not in caplog.text


def test_a_switched_adapter_hides_no_trained_base(tmp_path, caplog):
    model = adapted()
    other = jax_dora.get_adapter(model)
    save_adapter(jax_dora.set_adapter(train(model, nnx.Param), other), tmp_path / "adapter")
    assert "6 of whose parameters" in caplog.text


def test_a_base_that_is_sharded_later_is_the_same(tmp_path, caplog):
    model = adapted()
    sharding = NamedSharding(automatic(x=2), P("x", None))
    model.down.kernel.set_value(jax.device_put(model.down.kernel[...], sharding))
    save_adapter(model, tmp_path / "adapter")
    assert "leaves out" not in caplog.text
    train(model, nnx.Param)
    save_adapter(model, tmp_path / "both")
    assert "down/kernel" in caplog.text


@pytest.mark.parametrize("mesh", [automatic, explicit])
def test_the_current_mesh_is_not_that_of_the_corners(mesh, tmp_path, caplog):
    with jax.set_mesh(mesh(x=2)):
        model = adapted()
        save_adapter(model, tmp_path / "adapter")
    assert "leaves out" not in caplog.text
    train(model, nnx.Param)
    with jax.set_mesh(mesh(x=2)):
        save_adapter(model, tmp_path / "both")
    assert "6 of whose parameters" in caplog.text


def test_a_base_that_a_trace_only_reads(caplog):
    base = Block(5)
    jax.jit(lambda: jax_dora.apply_dora(base, RULE, rngs=nnx.Rngs(1)).up.lora_b[...])()
    assert not caplog.messages


def test_traced_models_are_left_alone(caplog):
    make = nnx.jit(lambda: jax_dora.get_adapter(adapted()).arrays)
    assert make()["up"]["lora_a"].shape == (6, 2)
    nnx.eval_shape(lambda: adapted())
    assert not caplog.messages
