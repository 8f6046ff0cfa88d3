"""The kernels for prompts in a bank: `bank_shrink` and `bank_project`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic.bank import bank_project, bank_shrink
from jax_dora.ops.mosaic.projection.matmul_tiling import Config
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import thinned

# With many rows, only some of every tile are compared with fp64.
ROWS = 128
U32 = tolerances.UNIT_ROUNDOFF["float32"]
SLOT = [2, 0, 3, 2]


def operands(seed, time, features, rank, out, dtype, slots=4):
    normal = normals(seed)
    groups = len(SLOT)
    return {
        "x": normal(groups, time, features).astype(dtype),
        "kernel": normal(2, features, out, deviation=features**-0.5).astype(dtype),
        "layer": jnp.int32(1),
        "lora_a": normal(slots, rank, features, deviation=features**-0.5).astype(dtype),
        "z": normal(groups, time, rank).at[3].set(jnp.nan).astype(dtype),
        "lora_b": normal(slots, rank, out, deviation=rank**-0.5).astype(dtype),
        "slot": jnp.asarray(SLOT, jnp.int32),
        "g": 1 + normal(groups, out, deviation=0.05),
        "bias": normal(out),
    }


def shrink(arrays, config=None, *, sm_count=2):
    x, a = arrays["x"], arrays["lora_a"]
    call = (*x.shape, a.shape[1], x.dtype)
    assert bank_shrink.refuses(*call) is None
    config = config or bank_shrink.config(*call)
    return jax.block_until_ready(
        bank_shrink.launch(x, a, arrays["slot"], config=config, sm_count=sm_count)
    )


def project(arrays, config=None, *, sm_count=2, with_bias=True):
    x, kernel = arrays["x"], arrays["kernel"]
    call = (*x.shape, kernel.shape[-1], arrays["z"].shape[-1], x.dtype)
    assert bank_project.refuses(*call) is None
    config = config or bank_project.config(*call)
    names = ("layer", "z", "lora_b", "slot", "g", *(("bias",) if with_bias else ()))
    given = x, kernel, *(arrays[name] for name in names)
    return jax.block_until_ready(bank_project.launch(*given, config=config, sm_count=sm_count))


def every(arrays):
    return slice(None, None, max(arrays["x"].shape[1] // ROWS, 1))


def check_shrink(arrays, z):
    assert z.dtype == jnp.float32
    for group, one in enumerate(SLOT):
        some = every(arrays)
        left, right = fp64(arrays["x"][group, some]), fp64(arrays["lora_a"][one]).T
        exact, bound = tolerances.product(left, right)
        assert np.all(abs(fp64(z[group, some]) - exact) <= bound)


def check_project(arrays, y, with_bias=True):
    for group, one in enumerate(SLOT):
        if group == 3:
            assert np.isnan(fp64(y[group])).all()
            continue
        some = every(arrays)
        left = np.concatenate([fp64(arrays[n][group, some]) for n in ("x", "z")], axis=1)
        right = np.concatenate([fp64(arrays["kernel"][1]), fp64(arrays["lora_b"][one])])
        inner, accumulated = tolerances.product(left, right)
        g = fp64(arrays["g"][group])
        bias = fp64(arrays["bias"]) if with_bias else 0.0
        exact = g * inner + bias
        bound = tolerances.rounding(exact, y.dtype) + abs(g) * accumulated
        bound = bound + 2 * U32 * (abs(g * inner) + abs(bias))
        assert np.all(abs(fp64(y[group, some]) - exact) <= bound)


SPLIT_COLUMNS = Config(128, 128, split_rows=False, stages=2)


@pytest.mark.parametrize(
    ("time", "features", "rank", "out", "dtype", "config", "with_bias"),
    thinned(
        [
            (256, 128, 24, 320, jnp.bfloat16, None, True),
            (128, 64, 72, 64, jnp.bfloat16, None, False),
            (128, 128, 8, 128, jnp.float16, SPLIT_COLUMNS, False),
        ],
        [
            (256, 128, 24, 320, jnp.bfloat16, None, True),
            (128, 128, 8, 128, jnp.float16, SPLIT_COLUMNS, False),
        ],
    ),
)
@pytest.mark.ci
def test_the_whole_product_agrees_with_fp64(
    on_mosaic, time, features, rank, out, dtype, config, with_bias
):
    arrays = operands(0, time, features, rank, out, dtype)
    with on_mosaic():
        y = project(arrays, config, with_bias=with_bias)
    assert y.dtype == dtype
    check_project(arrays, y, with_bias)


@pytest.mark.parametrize(
    ("time", "features", "rank", "dtype", "config"),
    thinned(
        [
            (128, 320, 24, jnp.bfloat16, bank_shrink.Config(stages=2, parts=2)),
            (256, 64, 72, jnp.bfloat16, None),
            (128, 192, 8, jnp.float16, bank_shrink.Config(parts=1)),
        ],
        [(128, 320, 24, jnp.bfloat16, bank_shrink.Config(stages=2, parts=2))],
    ),
)
@pytest.mark.ci
def test_the_first_product_agrees_with_fp64(on_mosaic, time, features, rank, dtype, config):
    arrays = operands(1, time, features, rank, 64, dtype)
    with on_mosaic():
        z = shrink(arrays, config)
    check_shrink(arrays, z)


@pytest.mark.ci
def test_nonfinite_numbers_stay_in_their_group(on_mosaic):
    """The non-finite numbers are in one group's x, and in a slot that no group uses."""
    arrays = operands(2, 128, 64, 8, 64, jnp.bfloat16)
    arrays["x"] = arrays["x"].at[1].set(jnp.nan)
    for name in ("lora_a", "lora_b"):
        arrays[name] = arrays[name].at[1].set(jnp.nan)
    with on_mosaic():
        z, y = shrink(arrays), project(arrays)
    finite = np.isfinite(fp64(z)).all(axis=(1, 2)).tolist()
    assert finite == [True, False, True, True]
    assert np.isfinite(fp64(y)).all(axis=(1, 2)).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("groups", "time", "features", "rank", "out"),
    thinned(
        [(8, 512, 4096, 64, 14336), (1, 4096, 14336, 256, 4096), (3, 128, 4096, 72, 1088)],
        [(8, 512, 4096, 64, 14336)],
    ),
)
def test_lowers_for_hopper_at_full_size(groups, time, features, rank, out):
    x, slot = aval(groups, time, features), aval(groups, dtype=jnp.int32)
    config = bank_shrink.config(groups, time, features, rank, jnp.bfloat16)
    assert config.stages >= 2
    options = {"sm_count": 132, "config": config}
    operands = (x, aval(64, rank, features), slot)
    assert "dora_bank_shrink" in for_cuda(bank_shrink.launch, *operands, **options)
    options["config"] = bank_project.config(groups, time, features, out, rank, jnp.bfloat16)
    operands = (
        *(x, aval(2, features, out), aval(dtype=jnp.int32)),
        *(aval(groups, time, rank), aval(64, rank, out), slot),
        aval(groups, out, dtype=jnp.float32),
    )
    assert "dora_bank_project" in for_cuda(bank_project.launch, *operands, **options)


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    assert bank_project.refuses(8, 512, 4096, 14336, 64, bf16) is None
    assert "64 tokens" in bank_project.refuses(8, 64, 4096, 14336, 64, bf16)
    assert "rank 12" in bank_project.refuses(8, 128, 4096, 14336, 12, bf16)
    assert "out = 72" in bank_project.refuses(8, 128, 4096, 72, 8, bf16)
    assert "float32" in bank_project.refuses(8, 128, 4096, 14336, 8, jnp.float32)
    assert bank_shrink.refuses(8, 512, 4096, 64, bf16) is None
    assert "65 tokens" in bank_shrink.refuses(8, 65, 4096, 64, bf16)
    assert "in = 72" in bank_shrink.refuses(8, 128, 72, 64, bf16)
    assert "rank 264" in bank_shrink.refuses(8, 128, 64, 264, bf16)
    assert "float32" in bank_shrink.refuses(8, 128, 64, 8, jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("time", "features", "rank", "out"),
    [(512, 4096, 64, 14336), (128, 1024, 8, 1088), (1024, 14336, 256, 4096)],
)
def test_agrees_at_full_size(time, features, rank, out, dtype):
    arrays = operands(3, time, features, rank, out, dtype)
    z, y = shrink(arrays, sm_count=132), project(arrays, sm_count=132)
    check_shrink(arrays, z)
    check_project(arrays, y)
    for _ in range(10):
        np.testing.assert_array_equal(shrink(arrays, sm_count=132), z)
        # In fp32, because NumPy treats NaN as equal only for its own float dtypes.
        np.testing.assert_array_equal(
            project(arrays, sm_count=132).astype(np.float32), y.astype(np.float32)
        )
