"""The norm and expand and compose by strips, which a Hopper's config chooses."""

import jax.numpy as jnp
import numpy as np
import pytest

from dora_common.triton import strips
from jax_dora.ops.triton import triton_expand_compose, triton_norm
from parity import oracle, tolerances
from parity.oracle import fp64
from tests.jax_dora.ops.test_norm import adapter


@pytest.mark.parametrize("adapter_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("sizes", [(150, 141, 40), (33, 300, 5)])
def test_the_norm_agrees_with_the_oracle(sizes, adapter_dtype):
    operands = adapter(0, *sizes, jnp.bfloat16, adapter_dtype)
    n_in, out, rank = sizes
    config = triton_norm.config(90, n_in, rank, out, jnp.bfloat16, adapter_dtype)
    assert isinstance(config, strips.Config)
    found = triton_norm.launch(*operands, jnp.float32(0.7), config=config, capability=90)
    exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
    bound = tolerances.norm(*oracle.from_flax(*operands), 0.7)
    assert np.all(abs(np.sqrt(fp64(found)) - exact) <= bound)


@pytest.mark.parametrize("sizes", [(150, 40, 70), (3, 7, 130)])
def test_expand_and_compose_agree_with_fp64(sizes):
    rows, rank, out = sizes
    rng = np.random.default_rng(0)
    shapes = (rows, out), (rows, rank), (rank, out)
    base, z, b = (jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in shapes)
    g, bias = (jnp.asarray(rng.normal(size=out), jnp.float32) for _ in range(2))
    config = triton_expand_compose.config(90, rows, rank, out, jnp.float16)
    assert isinstance(config, strips.Config)
    options = {"want_inner": True, "config": config, "capability": 90}
    y, inner = triton_expand_compose.launch(base, z, b, g, jnp.float32(0.7), bias, **options)
    sums = fp64(base) + 0.7 * fp64(z) @ fp64(b)
    terms = 1 + abs(fp64(base)) + abs(fp64(z)) @ abs(fp64(b))
    for got, exact in ((y, fp64(g) * sums + fp64(bias)), (inner, sums)):
        bound = tolerances.rounding(exact, got.dtype) + 2.0**-19 * (1 + abs(fp64(g))) * terms
        assert np.all(abs(fp64(got) - exact) <= bound)


@pytest.mark.parametrize(("features", "size"), [(8192, 8192), (70, 1), (14336, 4096), (1, 70)])
def test_programs_cover_each_tile_once(features, size):
    config = strips.Config(64, 64, 64, 4)
    programs, splits, steps = config.walk(features, size, 90)
    tiles = -(-size // 64)
    assert programs == -(-features // 64) * splits
    assert tiles <= splits * steps < tiles + splits
