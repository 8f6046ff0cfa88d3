import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic.bank import bank_expand
from jax_dora.ops.mosaic.bank.bank_expand import refuses
from jax_dora.ops.mosaic.projection.strip_tiling import Config
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import thinned

U32 = tolerances.UNIT_ROUNDOFF["float32"]
SLOT = [2, 0, 3, 2, 1]
# The third group has no adapter.
SCALE = [0.7, 1.5, 0.0, 0.7, np.nan]


def operands(seed, time, rank, out, dtype, slots=4):
    normal = normals(seed)
    groups = len(SLOT)
    base = normal(groups, time, out).astype(dtype)
    z, b = normal(groups, time, rank), normal(slots, rank, out, deviation=rank**-0.5)
    g = 1 + normal(groups, out, deviation=0.05)
    g = g.at[2].set(1)
    slot, scale = jnp.asarray(SLOT, jnp.int32), jnp.asarray(SCALE, jnp.float32)
    return base, z.astype(dtype), b.astype(dtype), slot, g, scale, normal(out)


def run(arrays, config=None, *, sm_count=2, with_bias=True):
    *arrays, bias = arrays
    base, z = arrays[:2]
    call = (*base.shape[:2], z.shape[-1], base.shape[-1], base.dtype)
    assert refuses(*call) is None
    y = bank_expand.launch(
        *(*arrays, bias if with_bias else None),
        sm_count=sm_count,
        config=config or bank_expand.config(*call),
    )
    return jax.block_until_ready(y)


def check(arrays, y, *, with_bias=True):
    base, z, b, slot, g, scale, bias = arrays
    for group, one in enumerate(np.asarray(slot)):
        if not np.isfinite(scale[group]):
            assert np.isnan(fp64(y[group])).all()
            continue
        if scale[group] == 0:
            exact = base[group] + bias.astype(base.dtype)[None] if with_bias else base[group]
            if not with_bias:
                assert jnp.array_equal(y[group], exact)
            continue
        this, left, right, factor = map(fp64, (base[group], z[group], b[one], g[group]))
        s = float(scale[group])
        lora, accumulated = tolerances.product(left, right)
        exact = factor * (this + s * lora)
        bound = tolerances.compose(this, lora, factor, s, y.dtype) + abs(factor) * s * accumulated
        if with_bias:
            exact = exact + fp64(bias)
            bound = bound + tolerances.rounding(exact, y.dtype) + U32 * abs(fp64(bias))
        assert np.all(abs(fp64(y[group]) - exact) <= bound)


@pytest.mark.parametrize(
    ("time", "rank", "out", "dtype", "with_bias"),
    thinned(
        [
            (128, 96, 192, jnp.bfloat16, False),  # several tiles, a ragged one in the columns
            (64, 8, 64, jnp.float16, True),
        ],
        [(64, 8, 64, jnp.float16, True)],
    ),
)
def test_agrees_with_fp64(on_mosaic, time, rank, out, dtype, with_bias):
    arrays = operands(0, time, rank, out, dtype)
    with on_mosaic():
        y = run(arrays, with_bias=with_bias)
    assert y.dtype == dtype
    check(arrays, y, with_bias=with_bias)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        Config(stages=2, slots=1, consumers=3, splits=2),
        pytest.param(Config(tile_cols=64, stages=2, slots=2, splits=1), marks=pytest.mark.slow),
        pytest.param(Config(tile_cols=64, stages=3, slots=2, splits=3), marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_config_agrees(on_mosaic, config):
    arrays = operands(1, 192, 64, 192, jnp.bfloat16)
    with on_mosaic():
        y = run(arrays, config, sm_count=3, with_bias=False)
    check(arrays, y, with_bias=False)


@pytest.mark.parametrize(
    ("groups", "time", "rank", "out"),
    thinned(
        [(8, 512, 64, 14336), (1, 4096, 256, 4096), (64, 64, 8, 1024), (3, 128, 72, 320)],
        [(8, 512, 64, 14336), (3, 128, 72, 320)],
    ),
)
def test_lowers_for_hopper_at_full_size(groups, time, rank, out):
    config = bank_expand.config(groups, time, rank, out, jnp.bfloat16)
    operands = (
        *(aval(groups, time, out), aval(groups, time, rank), aval(64, rank, out)),
        aval(groups, dtype=jnp.int32),
        *(aval(groups, out, dtype=jnp.float32), aval(groups, dtype=jnp.float32)),
    )
    text = for_cuda(bank_expand.launch, *operands, sm_count=132, config=config)
    assert "dora_bank_expand" in text


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    assert refuses(8, 512, 64, 14336, bf16) is None
    assert "65 tokens" in refuses(8, 65, 64, 14336, bf16)
    assert "rank 12" in refuses(8, 64, 12, 14336, bf16)
    assert "out = 72" in refuses(8, 64, 8, 72, bf16)
    assert "float32" in refuses(8, 64, 8, 64, jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("time", "rank", "out"), [(512, 64, 14336), (64, 8, 1024), (2048, 256, 4096)]
)
def test_agrees_at_full_size(time, rank, out, dtype):
    arrays = operands(3, time, rank, out, dtype)
    first = run(arrays, sm_count=132, with_bias=False)
    check(arrays, first, with_bias=False)
    for _ in range(20):
        again = run(arrays, sm_count=132, with_bias=False)
        # In fp32, because NumPy treats NaN as equal only for its own float dtypes.
        np.testing.assert_array_equal(again.astype(np.float32), first.astype(np.float32))
