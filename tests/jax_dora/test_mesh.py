"""Adapted models on a mesh with explicit axes, the default of `jax.make_mesh`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dora
import jax_dora.linen
from tests.jax_dora.meshes import explicit
from tests.tables import thinned

IN = 24


def rule(**options):
    init = nnx.initializers.normal(0.1)
    return jax_dora.DoRARule(".*", rank=4, alpha=8, lora_a_init=init, lora_b_init=init, **options)


class One(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.gate = nnx.Linear(IN, 48, rngs=rngs), nnx.Linear(IN, 48, rngs=rngs)
        self.down = nnx.Linear(48, IN, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax_dora.swiglu(self.gate, self.up, x))


MODELS = {
    "linear": lambda rngs: One(nnx.Linear(IN, 40, rngs=rngs)),
    "general": lambda rngs: One(nnx.LinearGeneral(IN, (2, 8), rngs=rngs)),
    "einsum": lambda rngs: One(nnx.Einsum("bti,io->bto", (IN, 8), rngs=rngs)),
    "conv": lambda rngs: One(nnx.Conv(IN, 8, (3,), rngs=rngs)),
    "attention": lambda rngs: One(
        nnx.MultiHeadAttention(2, in_features=IN, decode=False, rngs=rngs)
    ),
    "swiglu": Block,
}


def gradient(model, x, given=False):
    values = jax_dora.norms(model) if given else {}
    graphdef, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def run(adapters, frozen, x):
        def loss(adapters):
            call = nnx.merge(graphdef, adapters, frozen, copy=True)
            if given:
                call = jax_dora.with_norms(call, values)
            # As in a model that rematerialises.
            call = jax.checkpoint(call, policy=jax_dora.remat_policy())
            return jnp.sum(call(x) ** 2)

        return jax.grad(loss)(adapters)

    return run(adapters, frozen, x)


def assert_near(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        other = np.asarray(other)
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "given"),
    thinned(
        [*itertools.product(MODELS, [False]), ("conv", True), ("swiglu", True)],
        [("linear", False), ("attention", False), ("conv", True)],
    ),
)
def test_rows_over_devices(name, given):
    """The gradients of one device, in a model that was adapted on the mesh."""
    options = {"keep_inner": True} if name in ("linear", "swiglu") else {}

    def adapted():
        return jax_dora.apply_dora(MODELS[name](nnx.Rngs(0)), rule(**options), rngs=nnx.Rngs(1))

    x = jax.random.normal(jax.random.key(0), (8, 6, IN))
    wanted = gradient(adapted(), x, given)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        found = gradient(adapted(), placed, given)
    assert_near(found, wanted)


@pytest.mark.parametrize(
    "spec",
    thinned(
        [P("data", None, None), P("data", None, "model"), P(None, "data", None)],
        [P("data", None, "model")],
    ),
)
def test_embedding_takes_out_sharding(spec):
    ids = jax.random.randint(jax.random.key(0), (8, 6), 0, 16)
    layer = jax_dora.DoRAEmbed(
        nnx.Embed(16, 8, rngs=nnx.Rngs(0)),
        rank=4,
        alpha=8,
        lora_a_init=nnx.initializers.normal(0.1),
        rngs=nnx.Rngs(1),
    )
    wanted = layer(ids)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        placed = jax.device_put(ids, NamedSharding(mesh, P("data")))
        for sharding in (spec, NamedSharding(mesh, spec)):
            found = layer(placed, sharding)
            assert found.sharding.spec == spec
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def linear(rngs):
    return nnx.Linear(IN, 40, rngs=rngs)


# The layer, the shape of x, and how x, the kernel and the result are sharded.
SHARDED = {
    "rows of a kernel": (linear, (8, IN), P("data", "model"), P("model", None), P("data", None)),
    "rows over both": (
        *(linear, (8, IN), P("data", "model"), P("model", None)),
        P(None, ("data", "model")),
    ),
    "columns": (linear, (8, IN), P("data", None), P(None, "model"), P("data", "model")),
    "columns gathered": (linear, (8, IN), P("data", None), P(None, "model"), P(None, None)),
    "rows and columns": (linear, (8, IN), P(None, "data"), P("data", "model"), P(None, "model")),
    "split heads": (
        lambda rngs: nnx.LinearGeneral(IN, (4, 8), rngs=rngs),
        *((8, 6, IN), P("data"), P("data", "model", None), P("data", None, "model", None)),
    ),
    "join heads": (
        lambda rngs: nnx.LinearGeneral((4, 6), 16, axis=(-2, -1), rngs=rngs),
        *((8, 6, 4, 6), P("data"), P("model", None, "data"), P("data", None, "model")),
    ),
    "einsum": (
        lambda rngs: nnx.Einsum("btd,ndh->bnth", (4, IN, 8), (4, 8), rngs=rngs),
        *((8, 6, IN), P("data"), P("model", "data", None), P("data", "model", None, None)),
    ),
    "conv": (
        lambda rngs: nnx.Conv(IN, 8, (3,), rngs=rngs),
        *((8, 6, IN), P("data"), P(None, None, "model"), P("data", None, "model")),
    ),
}


def on_mesh(mesh, make, of_kernel):
    """Returns the layer, its kernel sharded so; on one device where `mesh` is None."""
    layer = make(nnx.Rngs(0))
    if mesh is not None:
        sharding = NamedSharding(mesh, of_kernel)
        layer.kernel.set_value(jax.device_put(layer.kernel[...], sharding))
    return layer


def adapted_on(mesh, make, of_kernel):
    layer = on_mesh(mesh, make, of_kernel)
    return jax_dora.apply_dora(layer, rule(dropout=0.5), rngs=nnx.Rngs(1))


def gradient_of_call(adapted, x, sharding=None, *, dropout=False):
    """Returns gradients of the adapter and of x, and the result."""
    graphdef, adapters, frozen = nnx.split(adapted, nnx.LoRAParam, ...)
    options = {"deterministic": not dropout, "rngs": jax.random.key(5)}

    def loss(adapters, x):
        layer = nnx.merge(graphdef, adapters, frozen, copy=True)
        y = layer(x, out_sharding=sharding, **options)
        return jnp.sum(y**2), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(adapters, x)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "dropout"),
    thinned(
        itertools.product(SHARDED, [False, True]),
        [("rows of a kernel", False), ("split heads", False), ("columns", True), ("einsum", False)],
    ),
)
def test_every_layer_takes_out_sharding(case, dropout):
    """As models do that are written for explicit axes, FSDP over "data" and TP over "model". The
    result is sharded so, and neither it nor a gradient changes; nor what is dropped."""
    make, shape, of_x, of_kernel, of_y = SHARDED[case]

    x = jax.random.normal(jax.random.key(0), shape)
    wanted, y = gradient_of_call(adapted_on(None, make, of_kernel), x, dropout=dropout)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        adapted = adapted_on(mesh, make, of_kernel)
        x = jax.device_put(x, NamedSharding(mesh, of_x))
        # Both ways to say it mean the same to every layer.
        for sharding in (of_y, NamedSharding(mesh, of_y))[: 1 + (case == "split heads")]:
            found, z = gradient_of_call(adapted, x, sharding, dropout=dropout)
            assert z.sharding.spec == of_y
            assert_near((found, z), (wanted, y))
            adapters = nnx.state(adapted, nnx.LoRAParam)
            for one, other in zip(*map(jax.tree.leaves, (found[0], adapters)), strict=True):
                assert one.sharding.spec == other.sharding.spec


def split(rngs):
    return nnx.LinearGeneral(IN, (2, 8), rngs=rngs)


def heads(rngs):
    return nnx.Einsum("btd,ndh->btnh", (4, IN, 8), (4, 8), rngs=rngs)


def joined(rngs):
    return nnx.LinearGeneral((6, 4), 16, axis=(-2, -1), rngs=rngs)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "shape", "of_kernel"),
    [
        (split, (8, 6, IN), P(None, None, "model")),
        (split, (8, 6, IN), P("model", None, "data")),
        (joined, (8, 6, 6, 4), P(None, "model", None)),
        (joined, (8, 6, 6, 4), P(None, "model", "data")),
        (heads, (8, 6, IN), P("data", None, "model")),
    ],
)
def test_any_axis_of_a_projection_may_be_sharded(make, shape, of_kernel):
    """Also one that is not the outermost of the kernel's inputs or outputs."""
    x = jax.random.normal(jax.random.key(0), shape)
    wanted = gradient_of_call(adapted_on(None, make, of_kernel), x)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        plain = on_mesh(mesh, make, of_kernel)(x)
        found = gradient_of_call(adapted_on(mesh, make, of_kernel), x)
    assert found[1].sharding.spec == plain.sharding.spec
    assert_near(found, wanted)


def test_an_adapted_tied_head_takes_out_sharding():
    layer = jax_dora.apply_dora(nnx.Embed(16, 8, rngs=nnx.Rngs(0)), rule(), rngs=nnx.Rngs(1))
    x, spec = jax.random.normal(jax.random.key(0), (8, 6, 8)), P("data", None, "model")
    wanted = layer.attend(x)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        found = layer.attend(jax.device_put(x, NamedSharding(mesh, P("data"))), spec)
        assert found.sharding.spec == spec
        assert_near(found, wanted)


def stack(rngs):
    return nnx.split_rngs(splits=3)(nnx.vmap(linear))(rngs)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "spec"),
    thinned(
        [
            (linear, P("model", None)),
            (linear, P("data", "model")),
            (stack, P(None, "data", "model")),
            (split, P("data", None, "model")),
        ],
        [(split, P("data", None, "model"))],
    ),
)
def test_merging_where_a_kernels_inputs_are_sharded(make, spec):
    plain = jax_dora.apply_dora(One(make(nnx.Rngs(0))), rule(), rngs=nnx.Rngs(1))
    merged, wanted = jax_dora.merge_dora(plain, return_report=True)
    kernel = merged.layer.kernel[...]
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        base = One(make(nnx.Rngs(0)))
        base.layer.kernel.set_value(
            jax.device_put(base.layer.kernel[...], NamedSharding(mesh, spec))
        )
        adapted = jax_dora.apply_dora(base, rule(), rngs=nnx.Rngs(1))
        merged, report = jax_dora.merge_dora(adapted, return_report=True)
        found = merged.layer.kernel[...]
        assert found.sharding.spec == spec
        np.testing.assert_allclose(found, kernel, rtol=1e-5, atol=1e-6)
    assert report.layers[0].change == pytest.approx(wanted.layers[0].change, rel=1e-5)


def test_linen():
    layer = jax_dora.linen.DoRADense(40, rank=4, alpha=8, lora_b_init=nn.initializers.normal(0.1))
    x = jax.random.normal(jax.random.key(0), (8, IN))
    params = layer.init(jax.random.key(1), x)["params"]

    def loss(adapters, frozen, x):
        return jnp.sum(layer.apply({"params": frozen | adapters}, x) ** 2)

    adapters = {name: params[name] for name in ("lora_a", "lora_b", "magnitude")}
    wanted = jax.grad(loss)(adapters, params, x)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        params = params | {
            "kernel": jax.device_put(params["kernel"], NamedSharding(mesh, P("model", None)))
        }
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        found = jax.jit(jax.grad(loss))(adapters, params, placed)
    assert_near(found, wanted)
