"""The norm and expand and compose by strips, which a Hopper's config chooses."""

import jax.numpy as jnp
import numpy as np
import pytest

from dora_common.triton import strips
from jax_dora.ops.triton import triton_expand_compose, triton_norm
from parity import oracle, tolerances
from parity.oracle import fp64
from tests.jax_dora.ops.test_norm import adapter


def check_norm(operands, kind):
    """Holds norm² by the config of a Hopper, of type `kind`, to the oracle."""
    (n_in, rank), out = operands[1].shape, operands[0].shape[1]
    config = triton_norm.config(90, n_in, rank, out, operands[0].dtype, operands[1].dtype)
    assert isinstance(config, kind)
    found = triton_norm.launch(*operands, jnp.float32(0.7), config=config, capability=90)
    exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
    bound = tolerances.norm(*oracle.from_flax(*operands), 0.7)
    assert np.all(abs(np.sqrt(fp64(found)) - exact) <= bound)


def check_expand_and_compose(sizes, kind, *, with_bias, want_inner):
    """Holds expand and compose by the config of a Hopper, of type `kind`, to fp64."""
    rows, rank, out = sizes
    rng = np.random.default_rng(0)
    shapes = (rows, out), (rows, rank), (rank, out)
    base, z, b = (jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in shapes)
    g, bias = (jnp.asarray(rng.normal(size=out), jnp.float32) for _ in range(2))
    config = triton_expand_compose.config(90, rows, rank, out, jnp.float16)
    assert isinstance(config, kind)
    options = {"want_inner": want_inner, "config": config, "capability": 90}
    vectors = g, jnp.float32(0.7), bias if with_bias else None
    y, inner = triton_expand_compose.launch(base, z, b, *vectors, **options)
    assert (inner is None) != want_inner
    sums = fp64(base) + 0.7 * fp64(z) @ fp64(b)
    terms = 1 + abs(fp64(base)) + abs(fp64(z)) @ abs(fp64(b))
    shift = fp64(bias) * with_bias
    for got, exact in ((y, fp64(g) * sums + shift), (inner, sums))[: 1 + want_inner]:
        bound = tolerances.rounding(exact, got.dtype) + 2.0**-19 * (1 + abs(fp64(g))) * terms
        assert np.all(abs(fp64(got) - exact) <= bound)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("adapter_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("sizes", [(150, 141, 40), (33, 300, 5)])
def test_the_norm_agrees_with_the_oracle(sizes, adapter_dtype):
    check_norm(adapter(0, *sizes, jnp.bfloat16, adapter_dtype), strips.Config)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("sizes", [(150, 40, 70), (3, 7, 130)])
def test_expand_and_compose_agree_with_fp64(sizes):
    check_expand_and_compose(sizes, strips.Config, with_bias=True, want_inner=True)


@pytest.mark.parametrize(("features", "size"), [(8192, 8192), (70, 1), (14336, 4096), (1, 70)])
def test_programs_cover_each_tile_once(features, size):
    config = strips.Config(64, 64, 64, 4)
    programs, splits, steps = config.walk(features, size, 90)
    tiles = -(-size // 64)
    assert programs == -(-features // 64) * splits
    assert tiles <= splits * steps < tiles + splits
