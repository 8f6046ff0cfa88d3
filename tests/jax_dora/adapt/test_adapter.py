"""Taking adapters out, putting them in, and one in another's place."""

import dataclasses
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dora import (
    Adapter,
    DoRALinear,
    DoRARule,
    apply_dora,
    get_adapter,
    merge_dora,
    norms,
    remove_dora,
    set_adapter,
    with_norms,
)
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.small_models import (
    ALL,
    UNLIKE,
    WIDTH,
    Block,
    Chain,
    Mixed,
    Stacked,
    call,
    identical,
    ids,
    train,
)
from tests.tables import thinned


@pytest.mark.parametrize("dtype", thinned([jnp.float32, jnp.bfloat16], [jnp.float32]))
def test_removing_gives_the_base_back_exactly(dtype):
    base = nnx.clone(Mixed(nnx.Rngs(0), dtype))
    adapted = train(apply_dora(base, ALL, rngs=nnx.Rngs(1)))
    removed = remove_dora(adapted)
    assert identical(removed, base)
    assert type(adapted.blocks[0]) is DoRALinear
    assert identical(remove_dora(base), base)
    with jax.numpy_dtype_promotion("standard"):
        assert jnp.array_equal(call(removed, ids()), call(base, ids()))


def test_removing_keeps_every_setting():
    base = nnx.Conv(
        4,
        6,
        (3, 3),
        strides=2,
        padding="CIRCULAR",
        feature_group_count=2,
        dtype=jnp.bfloat16,
        precision="highest",
        rngs=nnx.Rngs(0),
    )
    adapted = apply_dora(base, DoRARule("", 2, 4, dropout=0.1), rngs=nnx.Rngs(0))
    assert identical(remove_dora(adapted), nnx.clone(base))


@pytest.mark.parametrize("make", thinned([Mixed, Stacked], [Mixed]))
def test_an_adapter_taken_out_and_put_back_changes_no_bit(make):
    base = make(nnx.Rngs(0))
    rules = ALL if make is Mixed else DoRARule("blocks/.*", 2, 4, use_rslora=True)
    x = ids() if make is Mixed else jax.random.normal(jax.random.key(0), (3, WIDTH))
    adapted = train(apply_dora(base, rules, rngs=nnx.Rngs(1)))
    again = set_adapter(base, get_adapter(adapted))
    assert identical(again, adapted)
    assert jnp.array_equal(call(again, x), call(adapted, x))
    assert identical(set_adapter(adapted, None), nnx.clone(base))


def test_an_adapter_is_a_pytree_of_its_arrays():
    adapter = get_adapter(apply_dora(Block(nnx.Rngs(0)), DoRARule(".*", 2, 4), rngs=nnx.Rngs(1)))
    assert len(jax.tree.leaves(adapter)) == 6
    doubled = jax.tree.map(lambda array: 2 * array, adapter)
    assert isinstance(doubled, Adapter)
    assert doubled.rules == adapter.rules
    again = set_adapter(Block(nnx.Rngs(0)), doubled)
    assert jnp.array_equal(again.linear.magnitude[...], 2 * adapter.arrays["linear"]["magnitude"])


MAPPED = {
    "jit": jax.jit(lambda adapter: adapter),
    "reversed": lambda adapter: dataclasses.replace(
        adapter, arrays=dict(reversed(adapter.arrays.items()))
    ),
}


def test_magnitudes_of_bf16_are_fp32_in_a_model():
    base = Block(nnx.Rngs(0))
    adapter = get_adapter(train(apply_dora(base, DoRARule(".*", 2, 4), rngs=nnx.Rngs(1))))
    rounded = jax.tree.map(lambda array: array.astype(jnp.bfloat16), adapter)
    for path, arrays in get_adapter(set_adapter(base, rounded)).arrays.items():
        expected = rounded.arrays[path]["magnitude"]
        assert arrays["magnitude"].dtype == jnp.float32
        assert jnp.array_equal(arrays["magnitude"].astype(jnp.bfloat16), expected)
        assert arrays["lora_a"].dtype == jnp.bfloat16


def test_numpy_arrays_of_an_adapter_are_copied():
    base = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    adapter = get_adapter(apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(1)))
    restored = jax.tree.map(np.array, adapter)
    model = set_adapter(base, restored)
    for variable in (model.lora_a, model.lora_b, model.magnitude):
        assert isinstance(variable.get_value(), jax.Array)
        variable[...] += 1
    chex.assert_trees_all_equal(restored, jax.tree.map(np.array, adapter))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", thinned(MAPPED, ["reversed"]))
def test_arrays_in_any_order_find_their_layers(mapped):
    base = Chain(nnx.Rngs(0))
    trained = train(apply_dora(base, UNLIKE, rngs=nnx.Rngs(1)))
    adapter = get_adapter(trained)
    moved = MAPPED[mapped](adapter)
    assert list(moved.arrays) != list(adapter.arrays)
    x = jax.random.normal(jax.random.key(0), (3, WIDTH))
    again = set_adapter(base, moved)
    assert [block.scale for block in again.blocks] == [block.scale for block in trained.blocks]
    assert jnp.array_equal(call(again, x), call(trained, x))
    assert jnp.array_equal(
        call(merge_dora(base, adapters=[moved]), x), call(merge_dora(trained), x)
    )


def test_switching_compiles_once():
    base = Block(nnx.Rngs(0))
    one, other = (
        train(apply_dora(base, DoRARule(".*", 2, 4), rngs=nnx.Rngs(seed)), seed) for seed in (1, 2)
    )
    compiled = 0

    @nnx.jit
    def run(model, x):
        nonlocal compiled
        compiled += 1
        return model(x)

    x = jnp.ones((2, WIDTH))
    y = run(one, x)
    assert not jnp.array_equal(run(set_adapter(one, get_adapter(other)), x), y)
    assert jnp.array_equal(run(set_adapter(other, get_adapter(one)), x), y)
    assert compiled == 1


def modes(model: nnx.Module) -> dict[str, bool]:
    """By the path of each dropout, whether it is on."""
    return {
        "/".join(map(str, path)): not module.deterministic
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Dropout)
    }


class TestDropoutOfAnAdapterThatIsPutIn:
    """On or off as what it replaces, or else as the rest of the model."""

    rule = DoRARule(".*", 2, 4, dropout=0.5)

    def put_into(self, model: nnx.Module) -> dict[str, bool]:
        adapter = get_adapter(apply_dora(Block(nnx.Rngs(0)), self.rule, rngs=nnx.Rngs(1)))
        before = modes(model)
        found = modes(set_adapter(model, adapter, rngs=nnx.Rngs(0)))
        assert modes(model) == before
        return found

    def test_as_the_layer_that_it_replaces(self):
        model = apply_dora(Block(nnx.Rngs(0)), self.rule, rngs=nnx.Rngs(2))
        assert self.put_into(model) == {"linear/dropout": True, "heads/dropout": True}
        model.eval()
        assert self.put_into(model) == {"linear/dropout": False, "heads/dropout": False}
        model.heads.train()
        assert self.put_into(model) == {"linear/dropout": False, "heads/dropout": True}

    def test_else_as_the_rest_of_the_model_and_off_where_nothing_says(self):
        model = Block(nnx.Rngs(0))
        assert set(self.put_into(model).values()) == {False}
        model.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        assert set(self.put_into(model).values()) == {True}
        model.eval()
        assert set(self.put_into(model).values()) == {False}


@pytest.mark.ci
def test_an_adapter_of_one_device_in_a_sharded_model():
    base = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    trained = train(apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(1)), 1)
    adapter = jax.device_put(get_adapter(trained), jax.devices()[0])
    mesh = automatic(data=2, model=4)
    kernel = jax.device_put(base.kernel[...], NamedSharding(mesh, P("data", "model")))
    base.kernel.set_value(kernel)
    model = set_adapter(base, adapter)
    for array, spec in (
        (model.lora_a, P("data", None)),
        (model.lora_b, P(None, "model")),
        (model.magnitude, P("model")),
    ):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    x = jnp.ones((4, 16))
    for found in (model, merge_dora(base, adapters=[adapter])):
        chex.assert_trees_all_close(found(x), trained(x), rtol=1e-5)
    given = with_norms(model, jax.device_put(norms(trained), jax.devices()[0]))
    chex.assert_trees_all_close(given(x), trained(x), rtol=1e-5)


@pytest.mark.parametrize("axes", [automatic, explicit])
def test_an_adapter_of_a_mesh_in_a_model_that_is_committed_to_one_device(axes):
    base, mesh = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), axes(data=2, model=4)
    trained = train(apply_dora(base, DoRARule("", 2, 4), rngs=nnx.Rngs(1)), 1)
    adapter = jax.device_put(get_adapter(trained), NamedSharding(mesh, P()))
    device = jax.devices()[1]
    base.kernel.set_value(jax.device_put(base.kernel[...], device))
    model, x = set_adapter(base, adapter), jnp.ones((4, 16))
    for array in (model.lora_a, model.lora_b, model.magnitude):
        assert array.sharding.device_set == {device}
    for found in (model, merge_dora(base, adapters=[adapter])):
        chex.assert_trees_all_close(found(x), trained(x), rtol=1e-5)


@pytest.mark.ci
def test_norms_of_a_mesh_in_a_model_that_is_committed_to_one_device():
    def adapted(device):
        base = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
        base.kernel.set_value(jax.device_put(base.kernel[...], device))
        return apply_dora(base, DoRARule("", rank=4, alpha=8), rngs=nnx.Rngs(1))

    values = norms(adapted(NamedSharding(automatic(data=2), P("data"))))
    model, x = adapted(jax.devices()[0]), jnp.ones((3, 16))
    chex.assert_trees_all_close(with_norms(model, values)(x), model(x), rtol=1e-5)


def test_an_adapter_that_does_not_fit():
    base = Block(nnx.Rngs(0))
    adapter = get_adapter(apply_dora(base, DoRARule("linear", 2, 4), rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"a layer 'linear'; the model's layers .*\n  0"):
        set_adapter(nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))]), adapter)
    wide = nnx.Dict(linear=nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"lora_b \(2, 8\) for 'linear'.*expected \(2, 5\)"):
        set_adapter(wide, adapter)
    others = dataclasses.replace(adapter, arrays={"heads": adapter.arrays["linear"]})
    with pytest.raises(ValueError, match=r"only one of the two are:\n  heads\n  linear"):
        set_adapter(base, others)
    part = {name: adapter.arrays["linear"][name] for name in ("lora_a", "lora_b")}
    with pytest.raises(ValueError, match=r"has \['lora_a', 'lora_b'\] for 'linear'; .*'magnitude'"):
        set_adapter(base, dataclasses.replace(adapter, arrays={"linear": part}))
    dropped = apply_dora(base, DoRARule("linear", 2, 4, dropout=0.5), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="rngs is None and the adapter has dropout"):
        set_adapter(base, get_adapter(dropped))
    for path in ("folder", Path("folder")):
        with pytest.raises(TypeError, match=r"an Adapter from get_adapter: .* reads a folder"):
            set_adapter(base, path)
        with pytest.raises(TypeError, match=r"adapters\[1\] is a .*an Adapter from get_adapter: "):
            merge_dora(base, adapters=[adapter, path])
    with pytest.raises(TypeError, match="adapter is a dict; expected an Adapter"):
        set_adapter(base, adapter.arrays)
    with pytest.raises(ValueError, match="model holds no adapter"):
        get_adapter(base)
