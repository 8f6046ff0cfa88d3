import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dispatch.choose import UNLIMITED_BLOCKS
from jax_dora.ops.mosaic.projection import project, project_back
from jax_dora.ops.mosaic.projection.matmul_tiling import Config, refuses
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow

U32 = tolerances.UNIT_ROUNDOFF["float32"]


def operands(seed, rows, n_in, rank, out, dtype):
    normal = normals(seed)
    return {
        "x": normal(rows, n_in).astype(dtype),
        "kernel": normal(n_in, out, deviation=n_in**-0.5).astype(dtype),
        "z": normal(rows, rank).astype(dtype),
        "lora_b": normal(rank, out, deviation=rank**-0.5).astype(dtype),
        "g": 1 + normal(out, deviation=0.05),
        "bias": normal(out),
    }, {
        "d": normal(rows, out).astype(dtype),
        "kernel": normal(n_in, out, deviation=out**-0.5).astype(dtype),
        "dz": normal(rows, rank).astype(dtype),
        "lora_a": normal(n_in, rank, deviation=rank**-0.5).astype(dtype),
    }


def run(forward, back, config=None, *, sm_count=2, want_inner=True):
    options = {"sm_count": sm_count, "config": config or Config()}
    # One after the other: a program that is dispatched while a kernel is interpreted may deadlock.
    y, inner = jax.block_until_ready(project.launch(**forward, want_inner=want_inner, **options))
    return y, inner, project_back.launch(**back, **options)


def product(left, right, more_left, more_right):
    """Returns left @ right + more_left @ more_right, and the error bound of fp32 accumulation."""
    left = np.concatenate([fp64(left), fp64(more_left)], axis=1)
    right = np.concatenate([fp64(right), fp64(more_right)])
    return tolerances.product(left, right)


def check(forward, back, y, inner, dx):
    check_forward(forward, y, inner)
    exact, accumulated = product(
        back["d"], fp64(back["kernel"]).T, back["dz"], fp64(back["lora_a"]).T
    )
    assert np.all(abs(fp64(dx) - exact) <= tolerances.rounding(exact, dx.dtype) + accumulated)


def check_forward(forward, y, inner=None):
    exact_inner, accumulated = product(
        forward["x"], forward["kernel"], forward["z"], forward["lora_b"]
    )
    g, bias = fp64(forward["g"]), fp64(forward.get("bias", 0.0))
    exact = g * exact_inner + bias
    bound = tolerances.rounding(exact, y.dtype) + abs(g) * accumulated
    bound = bound + 2 * U32 * (abs(g * exact_inner) + abs(bias))
    assert np.all(abs(fp64(y) - exact) <= bound)
    if inner is not None:
        bound = tolerances.rounding(exact_inner, y.dtype) + accumulated
        assert np.all(abs(fp64(inner) - exact_inner) <= bound)


@pytest.mark.parametrize(
    ("rows", "n_in", "rank", "out", "dtype", "config"),
    [
        slow(200, 256, 24, 320, jnp.bfloat16, Config()),
        slow(200, 64, 24, 64, jnp.bfloat16, Config()),
        # The last rows are no whole blocks of 8.
        ci(201, 128, 24, 320, jnp.bfloat16, Config()),
        (37, 256, 4, 256, jnp.float16, Config(128, 128, split_rows=False, stages=2)),
        slow(
            *(264, 320, 72, 256, jnp.bfloat16),
            Config(128, 128, stages=3, band=2, band_in_cols=True),
        ),
    ],
)
def test_agrees_with_fp64(on_mosaic, rows, n_in, rank, out, dtype, config):
    forward, back = operands(0, rows, n_in, rank, out, dtype)
    with on_mosaic():
        y, inner, dx = run(forward, back, config)
    assert y.dtype == inner.dtype == dx.dtype == dtype
    check(forward, back, y, inner, dx)


@pytest.mark.ci
def test_tiles_of_one_chunk_do_not_overwrite_each_other(on_mosaic):
    """Each tile stores one chunk: a race if the next tile overwrites the chunk during its copy."""
    forward, _ = operands(3, 384, 64, 8, 64, jnp.bfloat16)
    with on_mosaic():
        y, _ = project.launch(**forward, want_inner=False, sm_count=1, config=Config())
        jax.block_until_ready(y)
    check_forward(forward, y)


@pytest.mark.ci
def test_keeps_leading_axes_without_bias_and_inner(on_mosaic):
    forward, back = operands(1, 24, 256, 8, 256, jnp.bfloat16)
    del forward["bias"]
    x, d = (array.reshape(2, 12, 256) for array in (forward["x"], back["d"]))
    leading = {**forward, "x": x, "z": forward["z"].reshape(2, 12, 8)}
    back_leading = {**back, "d": d, "dz": back["dz"].reshape(2, 12, 8)}
    with on_mosaic():
        y, inner, dx = run(leading, back_leading, sm_count=1, want_inner=False)
    assert inner is None
    assert y.shape == dx.shape == (2, 12, 256)
    check(forward, back, y.reshape(24, 256), None, dx.reshape(24, 256))


@pytest.mark.parametrize("rank", [8, 384])
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(rank):
    options = {"config": Config(), "sm_count": 132}
    features, kernel = aval(12288, dtype=jnp.float32), aval(4096, 12288)
    operands = (aval(4096, 4096), kernel, aval(4096, rank), aval(rank, 12288), features, features)
    program = for_cuda(project.launch, *operands, want_inner=True, **options)
    assert "dora_project" in program
    # Without the barrier, XLA launches a kernel again for each result that a scan stacks and reads.
    assert program.count("stablehlo.optimization_barrier") == 2
    operands = (kernel, kernel, aval(4096, rank), aval(4096, rank))
    assert "dora_project_back" in for_cuda(project_back.launch, *operands, **options)


def test_refuses_with_a_reason():
    bf16, f32 = jnp.bfloat16, jnp.float32
    assert refuses(4001, 4096, 12288, bf16) is None
    assert "float32" in refuses(64, 256, 256, f32)
    assert "no rows" in refuses(0, 256, 256, bf16)
    assert "in = 96" in refuses(64, 96, 256, bf16)
    assert "out = 96" in refuses(64, 256, 96, bf16)
    assert "in is 0" in refuses(64, 0, 256, bf16)
    assert refuses(64, 64, 64, bf16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("rows", "n_in", "rank", "out"),
    [(4096, 4096, 384, 4096), (4001, 1024, 64, 3072), (517, 2048, 24, 1088), (8, 4096, 16, 12288)],
)
def test_agrees_at_full_size(rows, n_in, rank, out, dtype):
    forward, back = operands(2, rows, n_in, rank, out, dtype)
    first = run(forward, back, sm_count=132)
    check(forward, back, *first)
    block_a_tile = run(forward, back, sm_count=UNLIMITED_BLOCKS)
    jax.tree.map(np.testing.assert_array_equal, block_a_tile, first)
