"""Natively on two GPUs, with shards of sizes at which every kernel is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from jax_dora import ops
from tests.jax_dora.meshes import automatic, mesh_of

pytestmark = pytest.mark.gpus

TOKENS, IN, RANK, OUT = 4096, 8192, 64, 8192
HIGH_RANK = 384
SCALE = 0.7
# The specs of x, the kernel and the result.
LAYOUTS = {
    "dp": (P("x"), P(None, None), P("x")),
    "fsdp": (P("x"), P("x", None), P("x")),
    "column": (P(), P(None, "x"), P(None, None, "x")),
    "row": (P(None, None, "x"), P("x", None), P()),
}


@functools.cache
def problem(rank=RANK):
    rng = np.random.default_rng(0)

    def draw(*shape, deviation=1.0, dtype=jnp.bfloat16):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32), dtype)

    trained = {
        "lora_a": draw(IN, rank, deviation=IN**-0.5, dtype=jnp.float32),
        "lora_b": draw(rank, OUT, deviation=0.1, dtype=jnp.float32),
        "magnitude": 1 + draw(OUT, deviation=0.1, dtype=jnp.float32),
        "bias": draw(OUT),
    }
    return trained, draw(IN, OUT, deviation=IN**-0.5), draw(2, TOKENS, IN), draw(2, TOKENS, OUT)


def run(trained, kernel, x, dy, rate=0.0, implementation=None):
    dropout = ops.Dropout(jnp.array([3, 5], jnp.uint32), rate) if rate else None

    def loss(trained, x):
        options = {"scale": SCALE, "dropout": dropout, "implementation": implementation}
        y = ops.dora_linear(x, kernel, **trained, **options)
        return jnp.sum((y * dy).astype(jnp.float32)), y

    (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(trained, x)
    return y, found


@functools.cache
def wanted(rate, rank=RANK):
    """Returns XLA's results on one device."""
    with jax.default_matmul_precision("highest"):
        return jax.tree.map(
            np.asarray, jax.jit(run, static_argnums=(4, 5))(*problem(rank), rate, "xla")
        )


def assert_near(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        # Both are rounded to bf16 several times; a missing or doubled part gives an error of 0.1.
        assert np.linalg.norm(one - other) <= 2.0**-6 * np.linalg.norm(other)


def kernels_of_checked(name, kind, rate, rank=RANK):
    """Checks a layer on two GPUs against one, and returns the number of its program's kernels."""
    of_x, of_kernel, of_y = LAYOUTS[name]
    mesh = mesh_of(kind, x=2)
    into, out = of_kernel
    specs = {"lora_a": P(into, None), "lora_b": P(None, out), "magnitude": P(out), "bias": P(out)}
    trained, kernel, x, dy = problem(rank)

    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    trained = {key: put(array, specs[key]) for key, array in trained.items()}
    placed = (trained, put(kernel, of_kernel), put(x, of_x), put(dy, of_y))
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(run, rate=rate)).lower(*placed).compile()
        assert_near(program(*placed), wanted(rate, rank))
    return program.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, AxisType.Auto) for name in LAYOUTS),
        # With explicit axes, JAX requires an out_sharding for a row-parallel product.
        *((name, AxisType.Explicit) for name in LAYOUTS if name != "row"),
    ],
)
def test_a_layer_on_two_gpus(name, kind, rate):
    assert kernels_of_checked(name, kind, rate) >= 3


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_z_has_a_kernel_at_high_ranks_where_kernels_are_gathered(kind):
    at_low_rank = kernels_of_checked("fsdp", kind, 0.0)
    assert kernels_of_checked("fsdp", kind, 0.0, HIGH_RANK) == at_low_rank + 1


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_gradients_of_bf16_adapters_are_sent_in_bf16(rate):
    """On a GPU only: CPU programs send gradients in fp32, also for LoRA."""
    mesh = automatic(x=2)
    trained, kernel, x, dy = problem()
    trained = {name: array.astype(jnp.bfloat16) for name, array in trained.items()}
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("x")))
    placed = (*jax.device_put((trained, kernel), whole), *jax.device_put((x, dy), rows))
    program = jax.jit(functools.partial(run, rate=rate)).lower(*placed).compile()
    sent = sum(one.bytes for one in collectives(program.as_text()))
    assert sent <= 2 * RANK * (IN + OUT) + 4 * 3 * OUT  # The magnitude's and the bias's too.
    assert_near(program(*placed)[1], wanted(rate)[1])


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_norm_on_two_gpus(kind, spec):
    trained, kernel, *_ = problem()
    mesh = mesh_of(kind, x=2)
    norm = functools.partial(ops.factored_norm, scale=SCALE)
    dense = np.asarray(kernel, np.float64) + SCALE * np.asarray(
        trained["lora_a"], np.float64
    ) @ np.asarray(trained["lora_b"], np.float64)
    with jax.set_mesh(mesh):
        placed = jax.device_put(kernel, NamedSharding(mesh, spec))
        program = jax.jit(norm).lower(placed, trained["lora_a"], trained["lora_b"]).compile()
        assert "mosaic_gpu" in program.as_text()
        found = program(placed, trained["lora_a"], trained["lora_b"])
    np.testing.assert_allclose(found, np.linalg.norm(dense, axis=0), rtol=1e-4)


def test_a_program_for_the_second_gpu_has_kernels():
    arrays = jax.device_put(problem(), jax.devices()[1])
    program = jax.jit(run).lower(*arrays).compile()
    assert program.as_text().count("mosaic_gpu") >= 4
    assert_near(program(*arrays), wanted(0.0))
