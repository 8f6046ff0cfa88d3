"""Quantised kernels and a bank, natively on two GPUs, against one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dora import AdapterBank, ops, with_bank
from tests import quantised
from tests.jax_dora.bank.adapters import drawn
from tests.jax_dora.meshes import automatic, mesh_of
from tests.jax_dora.ops.test_several_gpus import assert_near

pytestmark = pytest.mark.gpus

IN, OUT, RANK, SCALE = 4096, 8192, 16, 0.7
COLUMNS, ROWS = P(None, "x"), P("x", None)
# A row of scales for each 64 rows of the kernel, or one for all of them.
TILES = {"nf4": (IN // 64, OUT), "int8": (1, OUT), "float8_e4m3fn": (1, OUT)}


@functools.cache
def kernel_of(qtype):
    return quantised.draw(qtype, (IN, OUT), TILES[qtype])


def arrays_of(rows):
    rng = np.random.default_rng(0)

    def draw(*shape, deviation=1.0, dtype=jnp.float32):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32), dtype)

    a, b = draw(IN, RANK, deviation=IN**-0.5), draw(RANK, OUT, deviation=0.1)
    magnitude = 1 + draw(OUT, deviation=0.1)
    return draw(rows, IN, dtype=jnp.bfloat16), a, b, magnitude, draw(rows, OUT, dtype=jnp.bfloat16)


def run(kernel, x, a, b, magnitude, dy, act_qtype=None):
    """Returns the norm, y, and the gradients of x and of the adapter."""

    def call(x, *adapter):
        return ops.dora_linear(x, kernel, *adapter, SCALE, act_qtype=act_qtype)

    y, pull = jax.vjp(call, x, a, b, magnitude)
    return ops.factored_norm(kernel, a, b, SCALE), y, pull(dy)


def on_two_gpus(kind, spec, kernel, *arrays, act_qtype=None):
    """Returns the results, and the number of kernels of the program."""
    mesh = mesh_of(kind, x=2)

    def placed(one):
        axes = [None if size == 1 else axis for axis, size in zip(spec, one.shape, strict=True)]
        return jax.device_put(one, NamedSharding(mesh, P(*axes)))

    with jax.set_mesh(mesh):
        *arrays, dy = arrays
        whole = jax.device_put(arrays, NamedSharding(mesh, P()))
        dy = jax.device_put(dy, NamedSharding(mesh, P(None, spec[1])))
        arguments = (jax.tree.map(placed, kernel), *whole, dy)
        call = functools.partial(run, act_qtype=act_qtype)
        program = jax.jit(call).lower(*arguments).compile()
        found = jax.block_until_ready(program(*arguments))
    return found, program.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize("rows", [8, 2048])
@pytest.mark.parametrize(
    ("kind", "spec"),
    # With explicit axes, JAX requires an out_sharding for a row-parallel product.
    [(AxisType.Auto, ROWS), (AxisType.Auto, COLUMNS), (AxisType.Explicit, COLUMNS)],
)
@pytest.mark.parametrize("qtype", TILES)
def test_a_layer_over_a_quantised_kernel(qtype, kind, spec, rows):
    """Each GPU has the scales of its part of the kernel, and the norm's sums are added."""
    kernel, arrays = kernel_of(qtype), arrays_of(rows)
    found, kernels = on_two_gpus(kind, spec, kernel, *arrays)
    assert kernels >= 1
    assert_near(found, jax.jit(run)(kernel, *arrays))
    _, a, b, *_ = (np.asarray(one, np.float64) for one in arrays)
    norm = np.linalg.norm(quantised.meant(kernel) + SCALE * a @ b, axis=0)
    np.testing.assert_allclose(found[0], norm, rtol=1e-5)


@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
def test_a_layer_with_codes_on_both_sides(spec):
    """A row of x that two GPUs share has one scale."""
    kernel, arrays = kernel_of("float8_e4m3fn"), arrays_of(2048)
    options = {"act_qtype": "float8_e4m3fn"}
    found, _ = on_two_gpus(AxisType.Auto, spec, kernel, *arrays, **options)
    assert_near(found, jax.jit(functools.partial(run, **options))(kernel, *arrays))


@pytest.mark.parametrize("time", [1, 16, 512])
@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
@pytest.mark.parametrize("use_bias", [False, True])
def test_rows_with_adapters_of_a_bank(use_bias, spec, time):
    plain = nnx.Linear(
        IN,
        OUT,
        use_bias=use_bias,
        param_dtype=jnp.bfloat16,
        dtype=jnp.bfloat16,
        bias_init=nnx.initializers.normal(1.0),
        rngs=nnx.Rngs(0),
    )
    # Drawn for one GPU, and loaded into both banks.
    bank = AdapterBank(plain, 3, 64)
    held = [drawn(bank, {"": rank}, rank) for rank in (8, 64)]
    ids = np.array([0, -1, 1, 1, 0, -1, 0, 1])
    x = jax.random.normal(jax.random.key(1), (8, time, IN), jnp.bfloat16)

    def call(model, bank, ids, x):
        return with_bank(model, bank, ids)(x)

    def filled(bank):
        return bank.load(0, held[0]).load(2, held[1]).load(1, held[1]).evict(2)

    wanted = nnx.jit(call)(plain, filled(bank), ids, x)
    mesh = automatic(x=2)
    sharded = nnx.clone(plain)
    sharded.kernel.set_value(jax.device_put(plain.kernel[...], NamedSharding(mesh, spec)))
    if use_bias:
        bias = jax.device_put(plain.bias[...], NamedSharding(mesh, P(spec[1])))
        sharded.bias.set_value(bias)
    # XLA chooses the algorithm of a product by timing it, in each program anew. Without those whose
    # results depend on that choice, a row has the same bits in two programs (docs/fidelity.md).
    jit = functools.partial(
        jax.jit, compiler_options={"xla_gpu_exclude_nondeterministic_ops": "True"}
    )
    graph, state = nnx.split(sharded)
    with jax.set_mesh(mesh):
        whole = jax.device_put(x, NamedSharding(mesh, P()))
        bank = filled(AdapterBank(sharded, 3, 64))
        found = jit(lambda state, *rest: call(nnx.merge(graph, state), *rest))(
            state, bank, ids, whole
        )
        base = jit(lambda state, x: nnx.merge(graph, state)(x))(state, whole)
    assert_near(found, wanted)
    # XLA can add a bias before it rounds the product, in either program. If two GPUs add parts of a
    # product, then it can add the adapters' products before them.
    if spec == COLUMNS and not use_bias:
        rows = (np.asarray(y, np.float32)[ids < 0] for y in (found, base))
        np.testing.assert_array_equal(*rows)
