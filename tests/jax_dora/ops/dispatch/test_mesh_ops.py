"""Operators inside `jax.shard_map`, with check_vma (the default) and without; and on a mesh with
explicit axes."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dora import ops
from tests.jax_dora.meshes import automatic, explicit
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow, thinned

ROWS, IN, RANK, OUT = 8, 64, 8, 128
SCALE = 0.7


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def problem(devices, dtype=jnp.float32):
    """Returns the trained parameters, x and dy."""
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
    """Returns a jitted gradient of `loss`, with parameters on every device and sharded rows."""
    mesh = automatic(data=devices)

    def on_each(trained, x, dy):
        grads = jax.grad(functools.partial(loss, name, implementation))(trained, x, dy)
        # With check_vma, JAX sums the gradients: the transpose of making a parameter varying.
        return grads if check else jax.lax.psum(grads, "data")

    specs = (P(), P("data"), P("data"))
    return jax.jit(
        jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    )


@pytest.mark.parametrize(
    ("name", "check"),
    [*((name, True) for name in LAYERS), *(slow(name, False) for name in LAYERS)],
)
def test_a_gradient_is_summed_over_the_devices(name, check):
    """The gradient is the sum of the gradients that are computed for each device's rows alone."""
    devices = 4
    trained, x, dy = problem(devices)
    gradient = jax.jit(jax.grad(functools.partial(loss, name, None)))
    shards = zip(np.split(x, devices), np.split(dy, devices), strict=True)
    each = [gradient(trained, *shard) for shard in shards]
    found = sharded_gradient(name, None, devices, check)(trained, x, dy)
    for leaf in trained:
        wanted = np.sum([grads[leaf] for grads in each], axis=0)
        np.testing.assert_allclose(found[leaf], wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", thinned(LAYERS, ["compose", "dora_linear", "swiglu"]))
@pytest.mark.ci
def test_mosaic_computes_the_same(on_mosaic, name):
    """Runs on one device, because the interpreter supports only one."""
    arrays = problem(1, jnp.bfloat16)
    # One program: another program that is dispatched while a kernel is interpreted may deadlock.
    gradient = jax.jit(jax.grad(functools.partial(loss, name, "mosaic")))
    with on_mosaic():
        wanted = jax.block_until_ready(gradient(*arrays))
        found = sharded_gradient(name, "mosaic", 1, True)(*arrays)
    for leaf, grads in found.items():
        scale = np.abs(np.asarray(wanted[leaf], np.float32)).max()
        one, other = (np.asarray(array, np.float32) for array in (grads, wanted[leaf]))
        np.testing.assert_allclose(one, other, atol=2**-7 * scale)


@pytest.mark.ci
def test_a_kernel_that_maps_warps_is_interpreted_in_a_checked_shard_map(on_mosaic):
    mesh = automatic(data=1)
    arrays = [draw(seed, *shape) for seed, shape in enumerate([(IN, OUT), (IN, RANK), (RANK, OUT)])]
    norm = functools.partial(ops.factored_norm, scale=SCALE, implementation="mosaic")
    rows = jax.shard_map(norm, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    with on_mosaic():
        found = jax.block_until_ready(jax.jit(rows)(*arrays))
    np.testing.assert_allclose(found, ops.factored_norm(*arrays, SCALE), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "check"),
    thinned(itertools.product(LAYERS, [True, False]), [("dora_linear", True), ("swiglu", True)]),
)
@pytest.mark.ci
def test_mosaic_lowers_for_cuda_on_several_devices(name, check):
    text = for_cuda(sharded_gradient(name, "mosaic", 4, check), *problem(4, jnp.bfloat16))
    assert "dora_" in text
    assert "all_reduce" in text


@pytest.mark.parametrize("check", [True, slow(False)])
def test_kernels_of_a_low_rank_product_lower_for_cuda_on_several_devices(check):
    """Kernels' references must not vary over a mesh axis, which the interpreter does not check."""
    mesh = automatic(model=4)

    def run(x, kernel, lora_a, lora_b, magnitude):
        norm = ops.factored_norm(kernel, lora_a, lora_b, SCALE, implementation="mosaic")
        options = {"norm": norm, "implementation": "mosaic"}
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, SCALE, **options)

    across = P(None, "model")
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(), across, P(), across, P("model")),
        out_specs=across,
        check_vma=check,
    )
    shapes = (ROWS, 72), (72, 4 * 136), (72, RANK), (RANK, 4 * 136), (4 * 136,)
    text = for_cuda(sharded, *(aval(*shape) for shape in shapes))
    assert "dora_one_pass_norm" in text
    assert "dora_expand_compose" in text


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("dora_linear", True),
        slow("dora_linear", False),
        slow("compose", True),
        slow("swiglu", True),
    ],
)
def test_runs_in_a_shard_map_without_jit(name, check):
    trained, x, _ = problem(2)
    mesh = automatic(data=2)
    call = functools.partial(LAYERS[name], trained, implementation=None)
    sharded = jax.shard_map(
        call, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check
    )
    wanted = np.concatenate([call(part) for part in jnp.split(x, 2)])
    np.testing.assert_allclose(sharded(x), wanted, rtol=1e-5, atol=1e-4)


KERNEL, ACROSS = draw(9, IN, OUT), P("data", None)
# The specs of the kernel, x and the result.
SHARDINGS = {
    "rows": (P(None, None), ACROSS, ACROSS),
    "rows and columns": (P(None, "model"), ACROSS, P("data", "model")),
    "rows over both": (P(None, None), P(("data", "model"), None), P(("data", "model"), None)),
    "the kernel's inputs": (P("model", None), ACROSS, ACROSS),
    "kernel and rows over one axis": (P("data", "model"), ACROSS, P("data", "model")),
    "x's inputs": (P(None, "data"), P(None, "model"), P(None, "data")),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *thinned(itertools.product(SHARDINGS, [None]), [("kernel and rows over one axis", None)]),
        slow("rows over both", "adapter"),
        ("x's inputs", "input"),
        slow("kernel and rows over one axis", "input"),
        slow("x's inputs", "adapter"),
    ],
)
def test_explicit_axes_are_as_one_device(name, mode):
    """For shardings for which x @ kernel needs no out_sharding; the mask is that of the whole x."""
    trained, x, dy = problem(1)

    def run(trained, x, kernel, dy):
        dropout = mode and ops.Dropout(ops.draw_seed(jax.random.key(0)), 0.3, mode)
        y = ops.dora_linear(x, kernel, **trained, scale=SCALE, dropout=dropout)
        return jnp.sum(y * dy), y

    gradient = jax.grad(run, argnums=(0, 1), has_aux=True)
    (wanted, wanted_dx), wanted_y = jax.jit(gradient)(trained, x, KERNEL, dy)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        of_kernel, of_x, of_y = (NamedSharding(mesh, spec) for spec in SHARDINGS[name])
        placed = jax.device_put((x, KERNEL, dy), (of_x, of_kernel, of_y))
        # Only one case runs eagerly too, because that is slow.
        for call in (jax.jit(gradient), *([gradient] if (name, mode) == ("rows", None) else [])):
            (found, found_dx), y = call(trained, *placed)
            assert y.sharding.spec == of_y.spec
            assert found_dx.sharding.spec == of_x.spec
            np.testing.assert_allclose(y, wanted_y, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found_dx, wanted_dx, rtol=1e-4, atol=1e-3)
            for leaf, one in found.items():
                other = np.asarray(wanted[leaf])
                np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("op", "specs"),
    [
        *((op, [P("data", "model")] * 3) for op in (ops.compose, ops.compose_delta, ops.swiglu)),
        (ops.compose, [P(None, "model"), P("data", None), P("data", "model")]),
        (ops.compose_delta, [P("data", "model"), P(), P("data", "model")]),
        (ops.swiglu, [P(), P("data", "model"), P("data", "model")]),
    ],
)
@pytest.mark.ci
def test_elementwise_on_explicit_axes(op, specs):
    """The operands have the same sharding, or are sharded over fewer axes than the result."""
    arrays = [draw(seed, 2 * ROWS, OUT) for seed in range(3)]
    vectors, scale = {"g": 1 + draw(3, OUT)}, {"scale": SCALE}
    if op is ops.swiglu:
        scale = {}
        vectors = {"gate_g": 1 + draw(3, OUT), "up_g": 1 + draw(4, OUT), "up_bias": draw(5, OUT)}

    def run(vectors, base, other, dy):
        return jnp.sum(op(base, other, **vectors, **scale) * dy)

    gradient = jax.grad(run, argnums=(0, 1, 2))
    wanted = gradient(vectors, *arrays)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        found = jax.jit(gradient)(vectors, *jax.device_put(arrays, shardings))
        for one, sharding in zip(found[1:], shardings, strict=False):
            assert one.sharding.is_equivalent_to(sharding, one.ndim)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [P("data", "model"), P(("data", "model"), None), P(None, "model")])
@pytest.mark.usefixtures("optimized")
def test_a_norm_sends_only_vectors(spec):
    lora_a, lora_b = draw(0, IN, RANK), draw(1, RANK, OUT)
    mesh = explicit(data=2, model=4)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(KERNEL, NamedSharding(mesh, spec))
        adapter = {"lora_a": lora_a, "lora_b": lora_b, "scale": SCALE}
        norm = jax.jit(functools.partial(ops.factored_norm, **adapter))
        found = norm(kernel)
        program = norm.lower(kernel).compile().as_text()
    dense = np.asarray(KERNEL, np.float64) + SCALE * np.float64(lora_a) @ np.float64(lora_b)
    np.testing.assert_allclose(found, np.linalg.norm(dense, axis=0), rtol=1e-6)
    assert found.sharding.spec == P(spec[1])
    collectives = re.findall(r"= (.*) all-[a-z-]+\(", program)
    assert bool(collectives) == (spec[0] is not None)
    assert not any(re.search(r"\[\d+,", shape) for shape in collectives)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("mesh_of", [automatic, explicit], ids=["auto", "explicit"])
def test_gradients_sum_three_axes_of_rows_that_two_mesh_axes_shard_in_two_ways(
    mesh_of, dropout, implementation
):
    """XLA leaves out partial sums of such products, and devices have different results."""
    mesh, (trained, _, _) = mesh_of(x=2, y=2), problem(1)
    x, dy = draw(6, 4, 4, 4, IN), draw(7, 4, 4, 4, OUT)
    layer = functools.partial(dropped, "adapter") if dropout else linear

    def gradients(trained, x, dy):
        return jax.vjp(lambda trained: layer(trained, x, implementation), trained)[1](dy)[0]

    def on_mesh(trained, x, dy):
        # On explicit axes y is sharded as x is, and so is dy.
        if mesh.are_all_axes_auto:
            x, dy = (
                jax.lax.with_sharding_constraint(one, NamedSharding(mesh, spec))
                for one, spec in ((x, P("y", "x")), (dy, P(None, "x", "y")))
            )
        else:
            x, dy = (jax.sharding.reshard(one, NamedSharding(mesh, P("y", "x"))) for one in (x, dy))
        return gradients(trained, x, dy)

    with jax.set_mesh(mesh):
        found = jax.jit(on_mesh)(trained, x, dy)
    wanted = jax.jit(gradients)(trained, x, dy)
    for name, gradient in found.items():
        for shard in gradient.addressable_shards:
            want = wanted[name][shard.index]
            np.testing.assert_allclose(shard.data, want, atol=1e-5 * np.abs(want).max())
