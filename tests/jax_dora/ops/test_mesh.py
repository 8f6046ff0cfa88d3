"""Inside `jax.shard_map`, with its check of what varies (the default) and without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_dora import ops

ROWS, IN, RANK, OUT = 8, 64, 8, 128
SCALE = 0.7


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def problem(devices, dtype=jnp.float32):
    """What is trained, x and dy."""
    trained = {
        "lora_a": draw(0, IN, RANK),
        "lora_b": draw(1, RANK, OUT),
        "magnitude": 5 + draw(2, OUT),
        "bias": draw(3, OUT),
    }
    x, dy = draw(4, devices * ROWS, IN), draw(5, devices * ROWS, OUT)
    return jax.tree.map(lambda array: array.astype(dtype), (trained, x, dy))


def linear(trained, x, implementation, dropout=None):
    kernel = draw(9, IN, OUT).astype(x.dtype)
    options = {"implementation": implementation, "dropout": dropout}
    return ops.dora_linear(x, kernel, **trained, scale=SCALE, **options)


def dropped(mode, trained, x, implementation):
    seed = ops.draw_seed(jax.random.key(0))
    return linear(trained, x, implementation, ops.Dropout(seed, 0.3, mode))


def composed(op, trained, x, implementation):
    base = x @ draw(9, IN, OUT).astype(x.dtype)
    lora = (x @ trained["lora_a"]) @ trained["lora_b"]
    g = trained["magnitude"].astype(jnp.float32)
    return op(base, lora, g, SCALE, implementation=implementation) + trained["bias"][None]


def gated(trained, x, implementation):
    def inner(seed):
        kernel = draw(seed, IN, OUT).astype(x.dtype)
        adapter = (trained["lora_a"], trained["lora_b"], SCALE)
        return ops.lora_linear(x, kernel, *adapter, implementation=implementation)

    g, bias = trained["magnitude"].astype(jnp.float32), trained["bias"]
    options = {"up_bias": bias, "implementation": implementation}
    return ops.swiglu(inner(9), inner(10), gate_g=g, up_g=g, **options)


LAYERS = {
    "dora_linear": linear,
    "dropout": functools.partial(dropped, "adapter"),
    "dropout of the input": functools.partial(dropped, "input"),
    "compose": functools.partial(composed, ops.compose),
    "compose_delta": functools.partial(composed, ops.compose_delta),
    "swiglu": gated,
}


def loss(name, implementation, trained, x, dy):
    y = LAYERS[name](trained, x, implementation)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


def sharded_gradient(name, implementation, devices, check):
    """Of `loss`, what is trained on every device and rows spread over them, as one program."""
    mesh = jax.make_mesh(
        (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )

    def on_each(trained, x, dy):
        grads = jax.grad(functools.partial(loss, name, implementation))(trained, x, dy)
        # With the check, the transposition of what lets a parameter vary has summed them up.
        return grads if check else jax.lax.psum(grads, "data")

    specs = (P(), P("data"), P("data"))
    return jax.jit(
        jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    )


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_is_summed_over_the_devices(name, check):
    """As of one device after the other."""
    devices = 4
    trained, x, dy = problem(devices)
    gradient = jax.grad(functools.partial(loss, name, None))
    shards = zip(jnp.split(x, devices), jnp.split(dy, devices), strict=True)
    each = [gradient(trained, *shard) for shard in shards]
    found = sharded_gradient(name, None, devices, check)(trained, x, dy)
    for leaf in trained:
        wanted = np.sum([grads[leaf] for grads in each], axis=0)
        np.testing.assert_allclose(found[leaf], wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", LAYERS)
def test_mosaic_computes_the_same(on_mosaic, name):
    """On one device: the interpreter knows no other."""
    arrays = problem(1, jnp.bfloat16)
    with on_mosaic():
        wanted = jax.grad(functools.partial(loss, name, "mosaic"))(*arrays)
        found = sharded_gradient(name, "mosaic", 1, True)(*arrays)
    for leaf, grads in found.items():
        scale = np.abs(np.asarray(wanted[leaf], np.float32)).max()
        one, other = (np.asarray(array, np.float32) for array in (grads, wanted[leaf]))
        np.testing.assert_allclose(one, other, atol=2**-7 * scale)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_mosaic_lowers_for_cuda_on_several_devices(name, check):
    gradient = sharded_gradient(name, "mosaic", 4, check)
    text = gradient.trace(*problem(4, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_" in text
    assert "all_reduce" in text
