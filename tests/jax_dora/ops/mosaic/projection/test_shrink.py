import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dispatch.choose import UNLIMITED_BLOCKS
from jax_dora.ops.mosaic.projection import shrink
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow


def check(leading, n_in, rank, dtype, sm_count):
    normal = normals(0)
    x = normal(*leading, n_in).astype(dtype)
    lora_a = normal(n_in, rank, deviation=n_in**-0.5).astype(dtype)
    config = shrink.config(x.size // n_in, n_in, rank, dtype)
    z = shrink.launch(x, lora_a, config=config, sm_count=sm_count)
    z = jax.block_until_ready(z)
    assert z.dtype == dtype
    assert z.shape == (*leading, rank)
    exact, accumulated = tolerances.product(fp64(x).reshape(-1, n_in), fp64(lora_a))
    bound = tolerances.rounding(exact, dtype) + accumulated
    assert np.all(abs(fp64(z).reshape(-1, rank) - exact) <= bound)


@pytest.mark.parametrize(
    ("leading", "n_in", "rank", "dtype", "sm_count"),
    [
        ((2, 67), 128, 192, jnp.bfloat16, 2),  # the last rows are no whole blocks of 8
        slow((264,), 192, 64, jnp.float16, UNLIMITED_BLOCKS),
    ],
)
def test_agrees_with_fp64(on_mosaic, leading, n_in, rank, dtype, sm_count):
    with on_mosaic():
        check(leading, n_in, rank, dtype, sm_count)


def test_lowers_for_hopper_at_full_size():
    options = {"config": shrink.config(4096, 14336, 384, jnp.bfloat16), "sm_count": 132}
    program = for_cuda(shrink.launch, aval(4096, 14336), aval(14336, 384), **options)
    assert "dora_shrink" in program


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rows", "n_in", "rank"), [(4096, 14336, 384), (4001, 1088, 768)])
@pytest.mark.parametrize("sm_count", [132, UNLIMITED_BLOCKS])
def test_agrees_at_full_size(rows, n_in, rank, dtype, sm_count):
    check((rows,), n_in, rank, dtype, sm_count)
