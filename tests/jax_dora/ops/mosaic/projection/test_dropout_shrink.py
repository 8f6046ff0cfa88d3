import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dropout import Dropout, draw_seed, keep_mask
from jax_dora.ops.mosaic.projection.dropout_shrink import Config, launch, refuses
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow, thinned

DIRECTIONS = pytest.mark.parametrize("transposed", [False, True])


def operands(seed, rows, n_in, rank, dtype, transposed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, n_in), np.float32)).astype(dtype)
    shape = (rows if transposed else n_in, rank)
    return x, jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def run(x, right, dropout, transposed, sm_count=2, config=None):
    found = launch(
        *(x, right, dropout.seed),
        rate=dropout.rate,
        transposed=transposed,
        sm_count=sm_count,
        config=config or Config(),
    )
    return jax.block_until_ready(found)


def check(found, x, right, dropout, transposed):
    left = fp64(x) * np.asarray(keep_mask(dropout.seed, x.shape, dropout.rate))
    left = left.T if transposed else left
    want, bound = tolerances.product(left, fp64(right))
    assert found.dtype == jnp.float32
    assert np.all(abs(fp64(found) - want) <= bound)


@DIRECTIONS
@pytest.mark.parametrize(
    ("rows", "n_in", "rank", "dtype", "rate", "sm_count", "config"),
    [
        (200, 128, 24, jnp.bfloat16, 0.3, 2, Config()),
        slow(37, 320, 300, jnp.float16, 0.5, 8, Config()),
        slow(8, 64, 1, jnp.bfloat16, 0.9, 1, Config(stages=2)),
        ci(264, 192, 72, jnp.bfloat16, 0.0, 4, Config(stages=3, parts=2)),
    ],
)
def test_agrees_with_fp64(on_mosaic, rows, n_in, rank, dtype, rate, sm_count, config, transposed):
    x, right = operands(0, rows, n_in, rank, dtype, transposed)
    dropout = Dropout(draw_seed(jax.random.key(rows)), rate)
    with on_mosaic():
        found = run(x, right, dropout, transposed, sm_count, config)
    check(found, x, right, dropout, transposed)


@DIRECTIONS
@pytest.mark.parametrize("rank", thinned([8, 384, 768], [384]))
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(rank, transposed):
    right = aval(4096 if transposed else 8192, rank)
    operands = (aval(4096, 8192), right, aval(2, dtype=jnp.uint32))
    options = {"rate": 0.1, "transposed": transposed, "config": Config(), "sm_count": 132}
    text = for_cuda(launch, *operands, **options)
    assert ("dora_dropout_shrink_back" if transposed else "dora_dropout_shrink") in text
    assert "8192xi1" not in text


def test_refuses_with_a_reason():
    assert refuses(4001, 4096, 12, jnp.bfloat16) is None
    assert "float32" in refuses(64, 256, 8, jnp.float32)
    assert "no rows" in refuses(0, 256, 8, jnp.float16)
    assert "no ranks" in refuses(64, 256, 0, jnp.float16)
    assert "in = 96" in refuses(64, 96, 8, jnp.bfloat16)


@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("rows", "n_in", "rank"), [(4096, 8192, 384), (4001, 1088, 768), (517, 2048, 24), (16, 4096, 8)]
)
def test_agrees_at_full_size(rows, n_in, rank, dtype, transposed):
    x, right = operands(1, rows, n_in, rank, dtype, transposed)
    dropout = Dropout(draw_seed(jax.random.key(rows)), 0.1)
    check(run(x, right, dropout, transposed, sm_count=132), x, right, dropout, transposed)
