"""What is done with a stack of layers along any axis: the same as with one along axis 0, and with
the layers in a list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora import DoRARule, apply_dora, get_adapter, ops
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.adapt.test_stacks import LAYERS, RULE, Block, Stack, inputs
from tests.jax_dora.small_models import train

WIDTH = 5
PROJECTIONS = DoRARule("blocks/(linear|heads)", 2, 3, lora_b_init=RULE.lora_b_init)
SLOW = [pytest.param(axis, marks=pytest.mark.slow) for axis in (0, 1, -1)]
AXES = [1, SLOW[0], SLOW[2]]


class Listed(nnx.Module):
    """The blocks of a stack, one after the other."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def listed(stacked: Stack, axis: int, rule: DoRARule | None = None) -> Listed:
    """The blocks of `stacked`, adapted by `rule` as those are, in a list."""
    model = Listed(nnx.Rngs(0))
    if rule is not None:
        path = rule.path.replace("blocks/", r"blocks/\d/")
        model = apply_dora(
            model, DoRARule(path, rule.rank, rule.alpha), rngs=nnx.Rngs(0), example=(inputs(WIDTH),)
        )
    arrays = nnx.to_pure_dict(nnx.state(stacked.blocks, nnx.Param))
    for index, block in enumerate(model.blocks):
        part = jax.tree.map(lambda array, index=index: jnp.take(array, index, axis), arrays)
        state = nnx.state(block, nnx.Param)
        nnx.replace_by_pure_dict(state, part)
        nnx.update(block, state)
    return model


def adapted_stack(axis: int, rule: DoRARule = RULE) -> Stack:
    model = Stack(axis, WIDTH)
    return train(apply_dora(model, rule, rngs=nnx.Rngs(1), example=(inputs(WIDTH),)))


@nnx.jit
def call(model: nnx.Module, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.jit
def gradients(model: Stack, x: jax.Array, norms: dict[str, jax.Array] | None) -> nnx.State:
    def loss(model: Stack) -> jax.Array:
        given = model if norms is None else jax_dora.with_norms(model, norms)
        return jnp.sum(jnp.sin(given(x)))

    return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)


def same(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, 0, OPERATOR_FP32_MAX_ABS)


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_norms_are_given_and_frozen(axis):
    x, model = inputs(WIDTH), adapted_stack(axis)
    wanted = call(model, x)
    same(wanted, call(listed(model, axis, RULE), x))
    values = jax_dora.norms(model)
    # They are used, and not computed again.
    twice = jax_dora.with_norms(model, {path: 2 * value for path, value in values.items()})
    assert jnp.max(jnp.abs(call(twice, x) - wanted)) > 0.01

    frozen = jax_dora.freeze(model)
    same(call(frozen, x), wanted)
    assert not jax.tree.leaves(nnx.state(frozen, nnx.LoRAParam))
    assert str(jax_dora.coverage(frozen)) == str(jax_dora.coverage(model))
    same(call(jax_dora.merge_dora(frozen), x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, -1])
def test_gradients_with_given_norms_are_those_without(axis):
    x, model = inputs(WIDTH), adapted_stack(axis)
    given, computed = (gradients(model, x, one) for one in (jax_dora.norms(model), None))
    jax.tree.map(same, given, computed)


@pytest.mark.ci
@pytest.mark.parametrize(
    "freeze", [jax_dora.freeze, lambda m: jax_dora.with_norms(m, jax_dora.norms(m))]
)
def test_constants_lie_along_the_axis_that_a_whole_scan_names(freeze):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(out_axes=1)
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    @nnx.scan(in_axes=(1, nnx.Carry), out_axes=nnx.Carry)
    def run(layer: nnx.Linear, x: jax.Array) -> jax.Array:
        return jnp.tanh(layer(x))

    model = train(apply_dora(make(nnx.Rngs(0)), DoRARule("", 2, 3), rngs=nnx.Rngs(1)))
    same(run(freeze(model), inputs(WIDTH)), run(model, inputs(WIDTH)))


@pytest.mark.parametrize("axis", SLOW)
def test_kernels_are_quantised(axis):
    x, base = inputs(WIDTH), Stack(axis, WIDTH)
    options = {"path": "blocks/.*(linear|heads)", "tile_size": WIDTH}
    quantised, plain = jax_dora.quantize(base, "nf4", **options), listed(base, axis)
    wanted = jax_dora.quantize(plain, "nf4", **options)
    for index, block in enumerate(wanted.blocks):
        for name in ("linear", "heads"):
            stacked, one = (getattr(b, name).kernel.get_value() for b in (quantised.blocks, block))
            assert jnp.array_equal(jnp.take(stacked.scale, index, axis), one.scale)
            codes = jnp.take(stacked.qvalue.astype(jnp.int8), index, axis)
            assert jnp.array_equal(codes, one.qvalue.astype(jnp.int8))
    same(call(quantised, x), call(wanted, x))
    adapted = apply_dora(quantised, PROJECTIONS, rngs=nnx.Rngs(1))
    later = jax_dora.quantize(apply_dora(base, PROJECTIONS, rngs=nnx.Rngs(1)), "nf4", **options)
    jax.tree.map(lambda a, b: same(a, b), get_adapter(adapted).arrays, get_adapter(later).arrays)
    train(adapted)
    dense = nnx.clone(base)
    for name in ("linear", "heads"):
        kernel = getattr(quantised.blocks, name).kernel.get_value()
        getattr(dense.blocks, name).kernel.set_value(ops.quantised.dense(kernel, jnp.float32))
    other = jax_dora.set_adapter(dense, get_adapter(adapted))
    same(call(adapted, x), call(other, x))
    merged, wanted = jax_dora.merge_dora(adapted), jax_dora.merge_dora(other)
    for name in ("linear", "heads"):
        found, kernel = (getattr(one.blocks, name).kernel[...] for one in (merged, wanted))
        assert jnp.array_equal(found, kernel.astype(jnp.bfloat16))


@pytest.mark.ci
@pytest.mark.parametrize("axis", AXES)
def test_folders_are_those_of_a_list(axis, tmp_path):
    x, model = inputs(WIDTH), adapted_stack(axis)
    in_list = listed(model, axis, RULE)
    for name, one in (("stack", model), ("list", in_list)):
        jax_dora.peft.save_adapter(one, tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "stack" / file).read_bytes() == (tmp_path / "list" / file).read_bytes()
    loaded = jax_dora.peft.load_adapter(model, tmp_path / "list")
    assert jnp.array_equal(call(loaded, x), call(model, x))


@pytest.mark.parametrize("axis", SLOW)
def test_a_bank_holds_its_adapters(axis, tmp_path):
    x, base, model = inputs(WIDTH), Stack(axis, WIDTH), adapted_stack(axis, PROJECTIONS)
    jax_dora.peft.save_adapter(model, tmp_path)
    bank = jax_dora.AdapterBank(base, 2, 2, path=PROJECTIONS.path)
    bank = bank.load(0, get_adapter(model)).load(1, tmp_path)
    mixed = call(jax_dora.with_bank(base, bank, [1, -1, 0, 1]), x)
    same(mixed[1], call(base, x)[1])
    rows = np.array([0, 2, 3])
    same(mixed[rows], call(model, x)[rows])
    loaded = jax_dora.peft.load_adapter(base, tmp_path)
    assert jnp.array_equal(call(loaded, x), call(model, x))
