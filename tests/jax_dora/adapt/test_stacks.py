"""Layers that `nnx.vmap` has stacked along any axis, run by `nnx.scan` along the same one."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora import (
    DoRALinear,
    DoRARule,
    apply_dora,
    get_adapter,
    merge_dora,
    ops,
    remove_dora,
    set_adapter,
)
from parity import oracle
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.small_models import train

LAYERS = 3
RULE = DoRARule("blocks/.*", 2, 3, lora_b_init=nnx.initializers.normal(0.5))


class Own(nnx.Module):
    """A class of a user's own."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (width, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, *, use_bias: bool = True) -> None:
        options = {"use_bias": use_bias, "rngs": rngs}
        self.linear = nnx.Linear(width, width, **options)
        self.heads = nnx.LinearGeneral(width, (2, width), **options)
        self.own = Own(width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.linear(x))
        return self.own(jnp.tanh(self.heads(x)).sum(-2))


class Stacks(nnx.Module):
    """Blocks in stacks of these sizes, outermost first, each along an axis of every parameter."""

    def __init__(
        self, axes: tuple[int, ...], sizes: tuple[int, ...], width: int, *, use_bias: bool = True
    ) -> None:
        self.axes = [nnx.StateAxes({nnx.Param: axis, ...: 0}) for axis in axes]

        def make(rngs: nnx.Rngs) -> Block:
            return Block(width, rngs, use_bias=use_bias)

        for axis, size in zip(reversed(self.axes), reversed(sizes), strict=True):
            make = nnx.split_rngs(splits=size)(nnx.vmap(make, out_axes=axis))
        self.blocks = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        for axis in reversed(self.axes):
            run = nnx.scan(run, in_axes=(axis, nnx.Carry), out_axes=nnx.Carry)
        return run(self.blocks, x)


class Stack(Stacks):
    """One stack; of square blocks where `width` is their number."""

    def __init__(self, axis: int, width: int, *, use_bias: bool = True) -> None:
        super().__init__((axis,), (LAYERS,), width, use_bias=use_bias)


def inputs(width: int) -> jax.Array:
    return jax.random.normal(jax.random.key(5), (4, width))


def expected(
    model: Stacks, axes: tuple[int, ...], sizes: tuple[int, ...], x: jax.Array
) -> np.ndarray:
    """What the layers compute one after the other, in fp64."""
    blocks: dict = nnx.to_pure_dict(nnx.state(model.blocks, nnx.Param))
    y = oracle.fp64(x)
    for indices in np.ndindex(*sizes):

        def part(array, indices=indices):
            for index, axis in zip(indices, axes, strict=True):
                array = np.take(np.asarray(array), index, axis)
            return array

        linear, heads, own = (jax.tree.map(part, blocks[n]) for n in ("linear", "heads", "own"))
        own = {name.removeprefix("w_"): value for name, value in own.items()} | {"kernel": own["w"]}
        merged = []
        for one in (linear, heads, own):
            kernel, lora_b = (one[n].reshape(one[n].shape[0], -1) for n in ("kernel", "lora_b"))
            arrays = oracle.from_flax(kernel, one["lora_a"], lora_b)
            magnitude = one["magnitude"].reshape(-1)
            merged.append(oracle.merged_weight(*arrays, magnitude, RULE.scale).T)
        y = np.tanh(y @ merged[0] + linear["bias"])
        y = np.tanh(y @ merged[1] + heads["bias"].reshape(-1))
        y = y.reshape(len(y), 2, -1).sum(1) @ merged[2]
    return y


CASES = [((1,), (LAYERS,), LAYERS), ((-1,), (LAYERS,), 5), ((1, 0), (2, 3), 5)]
SLOW_CASES = [
    ((1,), (1,), 5),
    *(((axis,), (LAYERS,), width) for axis, width in [(0, 3), (-1, 3), (1, 5)]),
    *(((axis,), (1,), 5) for axis in (0, -1)),
    *((axes, (2, 3), 5) for axes in [(0, 0), (0, 1), (1, 1), (-1, 0), (0, -1), (-1, -1)]),
    ((1, 1), (3, 3), 3),  # the shapes do not tell
    ((1, 1), (2, 1), 5),
    ((1, 0, 1), (2, 1, 2), 5),
]


@pytest.mark.parametrize(
    ("axes", "sizes", "width"),
    CASES + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_CASES],
)
@pytest.mark.ci
def test_it_computes_what_its_layers_compute(axes, sizes, width):
    base, x = Stacks(axes, sizes, width), inputs(width)
    adapted = train(apply_dora(base, RULE, rngs=nnx.Rngs(1), example=(x,)))
    for one, other in [
        (remove_dora(adapted), base),
        (set_adapter(base, get_adapter(adapted)), adapted),
    ]:
        leaves = zip(*(jax.tree.leaves(nnx.state(model)) for model in (one, other)), strict=True)
        assert all(a is b for a, b in leaves)

    def loss(model):
        y = model(x)
        return jnp.sum(jnp.sin(y)), y

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads, found = nnx.grad(loss, argnums=wrt, has_aux=True)(adapted)
    assert all(bool(jnp.any(one != 0)) for one in jax.tree.leaves(grads))
    np.testing.assert_allclose(found, expected(adapted, axes, sizes, x), 0, OPERATOR_FP32_MAX_ABS)
    merged = merge_dora(adapted)
    assert type(merged.blocks.linear) is nnx.Linear
    assert type(merged.blocks.own) is Own
    np.testing.assert_allclose(found, merged(x), 0, OPERATOR_FP32_MAX_ABS)


def test_equal_stacks_are_traced_once(monkeypatch):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> DoRALinear:
        return DoRALinear(5, 7, rank=2, alpha=1.75, rngs=rngs)

    stacks = [make(nnx.Rngs(seed)) for seed in (0, 1)]
    factored_norm = Mock(wraps=ops.factored_norm)
    monkeypatch.setattr(ops, "factored_norm", factored_norm)
    for compute in (DoRALinear.norm, merge_dora):
        factored_norm.reset_mock()
        for layers in stacks:
            compute(layers)
        assert factored_norm.call_count == 1


@pytest.mark.ci
def test_shapes_tell_the_axis_where_they_can():
    base, x = Stack(1, 5), inputs(5)
    adapted = apply_dora(base, DoRARule("blocks/(linear|heads)", 2, 3), rngs=nnx.Rngs(1))
    assert adapted.blocks.linear.lora_a.shape == (5, LAYERS, 2)
    assert adapted.blocks.heads.magnitude.shape == (2, LAYERS, 5)
    assert jnp.array_equal(adapted(x), base(x))


def test_shapes_that_do_not_tell_are_refused():
    match = (
        r"'blocks/linear' .*\(3, 3, 3\).*along axis 0 or 1 or 2; expected .*example=.*param_scan"
    )
    with pytest.raises(ValueError, match=match):
        apply_dora(Stack(0, LAYERS), DoRARule("blocks/linear", 2, 3), rngs=nnx.Rngs(1))


@pytest.mark.ci
def test_a_leading_stack_whose_shapes_do_not_tell_is_loaded_again(tmp_path, caplog):
    base, x = Stack(0, LAYERS, use_bias=False), inputs(LAYERS)
    rule = DoRARule("blocks/linear", 2, 3)
    adapted = train(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,)))
    jax_dora.peft.save_adapter(adapted, tmp_path)
    for model in (base, adapted):
        loaded = jax_dora.peft.load_adapter(model, tmp_path)
        assert jnp.array_equal(loaded(x), adapted(x))
    for make in (lambda: jax_dora.AdapterBank(base, 2, 2), lambda: jax_dora.quantize(base, "int8")):
        caplog.clear()
        make()
        # It may be another stack, which would be computed wrongly.
        assert "axis 0 or 1 or 2. Axis 0 is assumed" in caplog.text
    # An adapted model knows.
    other = apply_dora(Stack(1, LAYERS, use_bias=False), rule, rngs=nnx.Rngs(1), example=(x,))
    loaded = jax_dora.peft.load_adapter(other, tmp_path)
    np.testing.assert_allclose(loaded(x), adapted(x), 0, OPERATOR_FP32_MAX_ABS)


def test_metadata_tells_where_shapes_do_not(caplog):
    base, x = Stack(1, LAYERS, use_bias=False), inputs(LAYERS)
    rule = DoRARule("blocks/linear", 2, 3)
    adapted = train(apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,)))
    bank = jax_dora.AdapterBank(base, 2, 2, path=rule.path)
    match = r"along axis 1 of the kernel; expected axis 0, .*param_scan_axis"
    with pytest.raises(ValueError, match=match):
        bank.load(0, get_adapter(adapted))
    caplog.clear()
    base.blocks.linear.kernel.set_metadata(param_scan_axis=1)
    bank = jax_dora.AdapterBank(base, 2, 2, path=rule.path).load(0, get_adapter(adapted))
    y = jax_dora.with_bank(base, bank, [0] * len(x))(x)
    np.testing.assert_allclose(y, adapted(x), 0, OPERATOR_FP32_MAX_ABS)
    assert not caplog.text


def test_a_bias_tells_where_the_kernel_does_not():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(out_axes=1)
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(LAYERS, 5, rngs=rngs)

    scale = jax_dora.quantize(make(nnx.Rngs(0)), "int8").kernel.get_value().scale
    assert scale.shape == (1, LAYERS, 5)


def test_a_registration_says_it(registrations):
    jax_dora.register(Own, param="w", axes="iso")
    base, x = Stack(1, LAYERS), inputs(LAYERS)
    adapted = apply_dora(base, DoRARule("blocks/own", 2, 3), rngs=nnx.Rngs(1))
    assert jnp.array_equal(adapted(x), base(x))
    train(adapted)
    np.testing.assert_allclose(adapted(x), merge_dora(adapted)(x), 0, OPERATOR_FP32_MAX_ABS)


def stacked_dense(heads: int, **metadata) -> nnx.Module:
    """Layers as MaxText's, along axis 1."""

    class DenseGeneral(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.in_features_shape, self.out_features_shape = (5,), (heads, 4)
            kernel = jax.random.normal(rngs.params(), (5, heads, 4))
            self.kernel = nnx.Param(kernel, **metadata)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.einsum("bd,dnh->bnh", x, self.kernel[...])

    DenseGeneral.__module__, DenseGeneral.__qualname__ = "maxtext.layers.linears", "DenseGeneral"
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(DenseGeneral, out_axes=1))
    return make(nnx.Rngs(0))


@pytest.mark.parametrize(("heads", "metadata"), [(2, {}), (LAYERS, {"param_scan_axis": 1})])
@pytest.mark.ci
def test_a_dense_general_of_maxtext_tells_it_by_its_shapes_or_metadata(heads, metadata):
    base = stacked_dense(heads, **metadata)
    adapted = apply_dora(base, DoRARule("", 2, 3), rngs=nnx.Rngs(1))
    assert get_adapter(adapted).weights[0].axes == "isoo"
    assert adapted.lora_a.shape == (5, LAYERS, 2)
    assert adapted.magnitude.shape == (heads, LAYERS, 4)


def test_a_dense_general_whose_shapes_do_not_tell_is_refused():
    with pytest.raises(TypeError, match="its registration has no axes for this module"):
        apply_dora(stacked_dense(LAYERS), DoRARule("", 2, 3), rngs=nnx.Rngs(1))


def test_a_registration_of_a_layer_goes_by_the_metadata_of_maxtexts_scan():
    registration = jax_dora.tracing.registry.Registration("w", "bio", linear=True)
    own = Own(2, nnx.Rngs(0))
    own.w = nnx.Param(jnp.ones((3, 2, 4, 5)), param_scan_axis=1)
    assert registration.axes_of(own) == "bsio"
    assert registration.axes_of(own, (0,)) == "sbio"


@pytest.mark.ci
def test_dropout_and_sharding_metadata_lie_along_their_axes():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(out_axes=1, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        metadata = {"out_sharding": ("rows", "columns")}
        return nnx.Linear(5, 7, use_bias=False, kernel_metadata=metadata, rngs=rngs)

    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("rows", "layers", "columns"))):
        base = make(nnx.Rngs(0))
        adapted = apply_dora(base, DoRARule("", 2, 3, dropout=0.5), rngs=nnx.Rngs(1, dropout=2))
    assert adapted.dropout.rngs.count.shape == (LAYERS,)
    assert adapted.lora_a.get_metadata("out_sharding") == ("rows", "layers", None)
    assert adapted.lora_b.get_metadata("out_sharding") == (None, "layers", "columns")
    assert adapted.magnitude.get_metadata("out_sharding") == ("columns", "layers")


def test_all_metadata_of_the_kernels_axes_are_carried_on():
    metadata = {"out_sharding": ("rows", "out", "columns"), "eager_sharding": False}
    kernel = nnx.Param(jnp.ones((5, 2, 4)), **metadata, partition_name="out", param_scan_axis=1)
    kernel.set_metadata(kernel_axes=metadata["out_sharding"], about="not its axes")
    own = Own(1, nnx.Rngs(0))
    own.w = kernel
    rule = DoRARule("", 3, 3)
    spec = jax_dora.adapt.weight.AdaptableWeight(("",), ("",), "w", axes="iso", rule=rule)
    adapter = jax_dora.adapt.adapted_class.add_adapter(own, spec, own, ())
    init = nnx.with_partitioning(nnx.initializers.zeros, ("mine", None))
    adapter.create_arrays(DoRARule("", 3, 3, lora_b_init=init), nnx.Rngs(0))
    for name, axes in [("lora_a", ("rows", "out", None)), ("magnitude", ("columns", "out"))]:
        found = getattr(adapter, name).get_metadata()
        assert found["out_sharding"] == found["kernel_axes"] == axes
        assert not found["eager_sharding"]
        assert "about" not in found
    for name in ("lora_a", "lora_b", "magnitude"):
        found = getattr(adapter, name).get_metadata()
        assert (found["partition_name"], found["param_scan_axis"]) == ("out", 1)
    assert adapter.lora_b.get_metadata("out_sharding") == ("mine", "out", None)


def test_an_axis_that_the_magnitude_lacks_is_refused():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(out_axes=2)
    def make(rngs: nnx.Rngs) -> nnx.Conv:
        return nnx.Conv(4, 6, (2,), use_bias=False, rngs=rngs)

    match = r"stacked along axis 2 of 4, and a single layer's magnitude has 1 axes"
    with pytest.raises(NotImplementedError, match=match):
        apply_dora(make(nnx.Rngs(0)), DoRARule("", 2, 4), rngs=nnx.Rngs(0))
