import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import jax_dora
from jax_dora.reuse import DoRANorm, _digest


class Model(nnx.Module):
    """A projection, three scanned layers of one stack, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        def layer(rngs, n_in=16, n_out=16):
            layer = jax_dora.DoRALinear(
                n_in, n_out, rank=4, alpha=8, lora_b_init=nnx.initializers.normal(0.1), rngs=rngs
            )
            layer.magnitude[...] *= 1.1
            return layer

        self.first = layer(rngs, 8, 16)
        stacked = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: layer(rngs)))
        self.stack = stacked(rngs)
        self.head = layer(rngs, 16, 4)

    def __call__(self, x):
        @nnx.remat(policy=jax_dora.remat_policy())
        def one(layer, x):
            return jnp.tanh(layer(x))

        x = self.first(x)
        x = nnx.scan(lambda x, layer: one(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stack
        )
        return self.head(x)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def batches(n):
    return jax.random.normal(jax.random.key(1), (n, 5, 8))


@nnx.jit
def loss_and_grads(model, x):
    return nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)


def square_roots(model):
    """How many square roots, one a norm, a call of `model` takes."""
    graphdef, state = nnx.split(model)
    x = batches(1)[0]
    return str(jax.make_jaxpr(lambda s: loss_fn(nnx.merge(graphdef, s), x))(state)).count("= sqrt")


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_kept_norm_changes_no_bit():
    model = Model(nnx.Rngs(0))
    fresh = loss_and_grads(model, batches(1)[0])
    jax_dora.keep_norms(model)
    kept = loss_and_grads(model, batches(1)[0])
    assert_same(fresh[0], kept[0])
    assert_same(nnx.to_pure_dict(fresh[1]), nnx.to_pure_dict(kept[1]))


def test_a_kept_norm_is_not_computed_again():
    model = Model(nnx.Rngs(0))
    assert square_roots(model) == 3
    jax_dora.keep_norms(model)
    assert square_roots(model) == 0
    jax_dora.drop_norms(model)
    assert square_roots(model) == 3


def train(keep, steps=6):
    model = Model(nnx.Rngs(0))
    if keep:
        jax_dora.keep_norms(model)
    tx = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, x):
        if keep:
            jax_dora.refresh_norms(model)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, x)) for x in batches(steps)]
    return losses, nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))


def test_accumulating_with_refreshed_norms_is_the_same_training():
    # optax's own bias correction mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        check_training()


def check_training():
    losses, adapters = train(keep=False)
    kept_losses, kept_adapters = train(keep=True)
    assert kept_losses == losses
    assert_same(kept_adapters, adapters)


@pytest.mark.parametrize("name", ["lora_a", "lora_b", "kernel"])
@pytest.mark.parametrize("which", ["first", "stack"])
def test_a_stale_norm_is_detected_and_refreshed(which, name):
    model = Model(nnx.Rngs(0))
    jax_dora.keep_norms(model)
    parameter = getattr(getattr(model, which), name)
    parameter[...] = parameter[...].at[..., 0, 1].add(1e-6)
    x = batches(1)[0]
    assert np.isnan(nnx.jit(loss_fn)(model, x))
    if which == "first":
        with pytest.raises(RuntimeError, match="kept norm of a DoRALinear is stale"):
            model(x)
    nnx.jit(jax_dora.refresh_norms)(model)
    refreshed = nnx.jit(loss_fn)(model, x)
    jax_dora.drop_norms(model)
    assert_same(refreshed, nnx.jit(loss_fn)(model, x))


def exchanged(array, one, other):
    return array.at[one].set(array[other]).at[other].set(array[one])


CHANGES = {
    "rows reversed": lambda a: a[::-1],
    "columns reversed": lambda a: a[:, ::-1],
    "both reversed": lambda a: a[::-1, ::-1],
    "a square transposed": lambda a: a.at[: a.shape[1]].set(a[: a.shape[1]].T),
    "all negated": lambda a: -a,
    "two negated": lambda a: a.at[0, :2].multiply(-1),
    "two negated in a column": lambda a: a.at[:2, 0].multiply(-1),
    "two exchanged": lambda a: exchanged(a, (0, 0), (0, 1)),
    "one moved by the least": lambda a: a.at[3, 1].set(jnp.nextafter(a[3, 1], jnp.inf)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_an_adapter_is_noticed(change, dtype):
    model = Model(nnx.Rngs(0))
    model.first.lora_a.set_value(model.first.lora_a[...].astype(dtype))
    jax_dora.keep_norms(model)
    a = model.first.lora_a
    a[...] = change(a[...])
    assert np.isnan(nnx.jit(loss_fn)(model, batches(1)[0]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(128, 512), (4096, 384), (2, 64, 256)])
def test_a_digest_tells_apart_what_is_regular(shape, dtype):
    ones = jnp.ones(shape, dtype)
    apart = (*(0,) * (len(shape) - 1), 128)
    one, other = ones.at[apart].set(2), ones.at[(0,) * len(shape)].set(2)
    digests = [_digest(array) for array in (ones, -ones, 2 * ones, one, other)]
    assert len({tuple(digest.tolist()) for digest in digests}) == len(digests)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_digest_tells_apart_the_same_bits_elsewhere(dtype):
    """Signs are as many of each kind in every row and column."""
    signs = 1.0 - 2.0 * (np.indices((4, 40)).sum(0) % 2)
    start = (signs * (jax.random.uniform(jax.random.key(0), (4, 40)) + 0.5)).astype(dtype)
    others = [start[::-1], start[:, ::-1], start[::-1, ::-1], jnp.roll(start, 1, 1), -start]
    others += [start.at[:2].mul(-1), start.at[:2, :2].mul(-1)]
    digests = {tuple(_digest(array).tolist()) for array in (start, *others)}
    assert len(digests) == 1 + len(others)


class CheckedOnce(Model):
    """The same model, which compares its kept norms outside of the scan."""

    def __call__(self, x):
        return Model.__call__(jax_dora.checked_norms(self), x)


def test_norms_checked_once_change_no_bit():
    plain, checked = Model(nnx.Rngs(0)), CheckedOnce(nnx.Rngs(0))
    jax_dora.keep_norms(plain)
    jax_dora.keep_norms(checked)
    x = batches(1)[0]
    (loss, gradients), (other_loss, others) = loss_and_grads(plain, x), loss_and_grads(checked, x)
    assert_same(loss, other_loss)
    assert_same(nnx.to_pure_dict(gradients), nnx.to_pure_dict(others))
    assert any(leaf.any() for leaf in jax.tree.leaves(others))


def digests_in_scans(model):
    """How many arrays a step of the forward pass's scan reads the bits of."""
    graphdef, state = nnx.split(model)
    x = batches(1)[0]
    jaxpr = jax.make_jaxpr(lambda s: nnx.merge(graphdef, s)(x))(state)
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert scans
    return str(scans[-1].params["jaxpr"]).count("bitcast_convert_type")


def test_norms_are_checked_outside_of_the_scan():
    plain, checked = Model(nnx.Rngs(0)), CheckedOnce(nnx.Rngs(0))
    for model in (plain, checked):
        jax_dora.keep_norms(model)
    assert digests_in_scans(plain) == 3
    assert digests_in_scans(checked) == 0


@pytest.mark.parametrize("which", ["first", "stack"])
@pytest.mark.parametrize("name", ["lora_a", "lora_b", "kernel"])
def test_a_stale_norm_is_detected_when_checked_once(which, name):
    model = Model(nnx.Rngs(0))
    jax_dora.keep_norms(model)
    parameter = getattr(getattr(model, which), name)
    parameter[...] = parameter[...].at[(1,) * (parameter.ndim - 2) + (0, 1)].add(1e-6)
    with pytest.raises(RuntimeError, match="kept norm of a DoRALinear is stale"):
        jax_dora.checked_norms(model)
    checked = nnx.jit(jax_dora.checked_norms)(model)
    kept = getattr(model, which).kept_norm[...]
    found = getattr(checked, which).kept_norm[...]
    if which == "first":
        assert np.isnan(found).all()
    else:
        # Of the stack, only the layer that was changed.
        assert np.isnan(found[1]).all()
        assert_same(found[np.array([0, 2])], kept[np.array([0, 2])])
    assert not np.isnan(kept).any()


def test_checked_norms_leave_the_model_alone():
    model = Model(nnx.Rngs(0))
    assert jax_dora.checked_norms(model) is model
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert jax_dora.checked_norms(linear) is linear
    frozen = jax_dora.freeze(model)
    assert jax_dora.checked_norms(frozen) is frozen
    jax_dora.keep_norms(model)
    before = nnx.graphdef(model)
    checked = jax_dora.checked_norms(model)
    assert nnx.graphdef(model) == before
    assert not jax.tree.leaves(nnx.state(checked, nnx.LoRAParam))
    assert checked.stack.lora_a[...] is model.stack.lora_a[...]


def test_a_scan_as_in_the_docstring():
    stack = Model(nnx.Rngs(0)).stack
    jax_dora.keep_norms(stack)
    x = jax.random.normal(jax.random.key(2), (5, 16))
    graphdef, layers = nnx.split(jax_dora.checked_norms(stack))
    found = lax.scan(lambda x, one: (nnx.merge(graphdef, one)(x), None), x, layers)[0]
    graphdef, layers = nnx.split(stack)
    for i in range(3):
        x = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], layers))(x)
    np.testing.assert_allclose(found, x, rtol=1e-6)


def sharded_layer(rngs, names=None):
    return jax_dora.DoRALinear(
        *(128, 16),
        rank=4,
        alpha=8,
        lora_b_init=nnx.initializers.normal(0.1),
        kernel_metadata={"out_sharding": names} if names else {},
        rngs=rngs,
    )


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("copied", [jax_dora.checked_norms, jax_dora.freeze])
def test_a_sharded_stack_stays_where_it_is(copied, layers):
    """`nnx.vmap` alone does not tell the metadata of the layers' axis."""
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        make = nnx.vmap(lambda rngs: sharded_layer(rngs, (None, "b")))
        stack = nnx.split_rngs(splits=layers)(make)(nnx.Rngs(0))
        jax_dora.keep_norms(stack)
        copy = copied(stack)
        for name in ("lora_a", "lora_b", "magnitude"):
            assert getattr(copy, name)[...] is getattr(stack, name)[...]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("names", [("a", "b"), ("a", None), (None, "b")])
def test_norms_are_kept_on_a_mesh(names, kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        layer = sharded_layer(nnx.Rngs(0), names)
        jax_dora.keep_norms(layer)
        kept = jax_dora.checked_norms(layer).kept_norm[...]
        layer.kernel[...] = 2 * layer.kernel[...]
        with pytest.raises(RuntimeError, match="stale"):
            jax_dora.checked_norms(layer)
    alone = sharded_layer(nnx.Rngs(0))
    jax_dora.keep_norms(alone)
    np.testing.assert_allclose(kept, alone.kept_norm[...], rtol=1e-6)


def test_a_frozen_model_drops_nothing_until_it_is_trained():
    layer = jax_dora.DoRALinear(8, 8, rank=2, alpha=4, dropout=0.5, rngs=nnx.Rngs(0))
    layer.lora_b[...] += 1
    model = nnx.Sequential(layer, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 8))
    frozen = jax_dora.freeze(model)
    assert jnp.array_equal(frozen.layers[0](x), frozen.layers[0](x))
    assert not frozen.layers[1].deterministic
    assert not layer.dropout.deterministic
    frozen.train()
    assert not jnp.array_equal(frozen.layers[0](x), frozen.layers[0](x))


def test_dropout_goes_on_counting_through_checked_norms():
    layer = jax_dora.DoRALinear(8, 8, rank=2, alpha=4, dropout=0.5, rngs=nnx.Rngs(0))
    jax_dora.keep_norms(layer)
    count = layer.dropout.rngs.count[...]
    jax_dora.checked_norms(layer)(jnp.ones((3, 8)))
    assert layer.dropout.rngs.count[...] == count + 1


def test_freeze_keeps_norms_and_leaves_nothing_to_train():
    model = Model(nnx.Rngs(0))
    frozen = jax_dora.freeze(model)
    x = batches(1)[0]
    assert_same(nnx.jit(loss_fn)(frozen, x), nnx.jit(loss_fn)(model, x))
    assert not jax.tree.leaves(nnx.state(frozen, nnx.LoRAParam))
    assert jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert frozen.first.kernel[...] is model.first.kernel[...]
    assert square_roots(frozen) == 0


def test_norms_are_neither_trained_nor_counted_as_adapters():
    model = Model(nnx.Rngs(0))
    before = jax.tree.structure(nnx.state(model, nnx.Param))
    jax_dora.keep_norms(model)
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == before


def test_errors_say_what_is_missing():
    with pytest.raises(ValueError, match="Linear has no DoRA layer"):
        jax_dora.keep_norms(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="keeps no norm"):
        jax_dora.refresh_norms(Model(nnx.Rngs(0)))


def test_a_split_step_as_in_the_docstring():
    """Kept norms move along with the adapters, and the frozen arrays are only read."""
    model = Model(nnx.Rngs(0))
    jax_dora.keep_norms(model)
    graphdef, adapters, norms, frozen = nnx.split(model, nnx.LoRAParam, DoRANorm, ...)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(adapters)

    @jax.jit
    def train_step(adapters, norms, state, frozen, batch):
        model = nnx.merge(graphdef, adapters, norms, frozen)
        jax_dora.refresh_norms(model)
        norms = nnx.state(model, DoRANorm)

        def loss_of(adapters):
            model = nnx.merge(graphdef, adapters, norms, frozen, copy=True)
            return loss_fn(model, batch)

        loss, grads = jax.value_and_grad(loss_of)(adapters)
        updates, state = optimizer.update(grads, state, adapters)
        return optax.apply_updates(adapters, updates), norms, state, loss

    plain = Model(nnx.Rngs(0))
    loss = jnp.nan
    for batch in batches(3):
        adapters, norms, state, loss = train_step(adapters, norms, state, frozen, batch)
        expected, grads = loss_and_grads(plain, batch)
        nnx.update(
            plain, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(plain, nnx.LoRAParam), grads)
        )
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert not np.isnan(loss)
