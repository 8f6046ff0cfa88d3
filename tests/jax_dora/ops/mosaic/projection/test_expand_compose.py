import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic.projection import expand_compose
from jax_dora.ops.mosaic.projection.expand_compose import refuses
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow, thinned

SCALE = 0.7
U32 = tolerances.UNIT_ROUNDOFF["float32"]


def operands(seed, rows, rank, out, dtype):
    normal = normals(seed)
    base, z = normal(rows, out).astype(dtype), normal(rows, rank).astype(dtype)
    lora_b = normal(rank, out, deviation=rank**-0.5).astype(dtype)
    return base, z, lora_b, 1 + normal(out, deviation=0.05), normal(out)


def run(arrays, config=None, *, sm_count=2, want_inner=True, with_bias=True, scales=None):
    *arrays, bias = arrays
    base, z = arrays[:2]
    call = (base.size // base.shape[-1], z.shape[-1], base.shape[-1], base.dtype)
    found = expand_compose.launch(
        *(*arrays, jnp.float32(SCALE), bias if with_bias else None, scales),
        want_inner=want_inner,
        sm_count=sm_count,
        config=config or expand_compose.config(*call),
    )
    return jax.block_until_ready(found)


def check(arrays, y, inner, *, with_bias=True, scales=None):
    base, z, lora_b, g, bias = map(fp64, arrays)
    apart = 0.0
    if scales is not None:
        of_rows, of_columns = map(fp64, scales)
        base = of_rows[:, None] * of_columns * base
        apart = 2 * U32 * abs(base)  # two more products
    lora, accumulated = tolerances.product(z, lora_b)
    exact_inner = base + SCALE * lora
    exact = g * exact_inner
    accumulated = SCALE * accumulated + apart
    bound = tolerances.compose(base, lora, g, SCALE, y.dtype) + abs(g) * accumulated
    if with_bias:
        exact = exact + bias
        bound = bound + tolerances.rounding(exact, y.dtype) + U32 * abs(bias)
    assert np.all(abs(fp64(y) - exact) <= bound)
    if inner is not None:
        bound = tolerances.rounding(exact_inner, inner.dtype) + accumulated
        bound = bound + 2 * U32 * (abs(base) + abs(SCALE * lora))
        assert np.all(abs(fp64(inner) - exact_inner) <= bound)


@pytest.mark.parametrize(
    ("rows", "rank", "out", "dtype"),
    [
        (200, 96, 136, jnp.bfloat16),  # several tiles, a ragged one each way, a padded rank
        slow(37, 4, 24, jnp.float16),  # smaller than one tile in all directions
    ],
)
def test_agrees_with_fp64(on_mosaic, rows, rank, out, dtype):
    arrays = operands(0, rows, rank, out, dtype)
    with on_mosaic():
        y, inner = run(arrays)
    assert y.dtype == inner.dtype == dtype
    check(arrays, y, inner)


def scales_of(rows, out):
    rng = np.random.default_rng(5)
    return tuple(jnp.asarray(np.exp(rng.standard_normal(size, np.float32))) for size in (rows, out))


@pytest.mark.parametrize("with_bias", [slow(False), True])
@pytest.mark.ci
def test_scales_of_rows_and_columns(on_mosaic, with_bias):
    arrays, scales = operands(4, 136, 24, 136, jnp.bfloat16), scales_of(136, 136)
    with on_mosaic():
        found = run(arrays, want_inner=with_bias, with_bias=with_bias, scales=scales)
    check(arrays, *found, with_bias=with_bias, scales=scales)


@pytest.mark.ci
def test_every_kind_of_config_agrees(on_mosaic, low_rank_config):
    arrays = operands(1, 264, 128, 200, jnp.bfloat16)
    with on_mosaic():
        y, inner = run(arrays, low_rank_config, want_inner=False, with_bias=False)
    assert inner is None
    check(arrays, y, None, with_bias=False)


@pytest.mark.ci
def test_keeps_leading_axes(on_mosaic):
    base, z, lora_b, g, bias = arrays = operands(2, 24, 8, 64, jnp.bfloat16)
    leading = base.reshape(2, 3, 4, 64), z.reshape(2, 3, 4, 8), lora_b, g, bias
    with on_mosaic():
        y, inner = run(leading, sm_count=1)
    assert y.shape == inner.shape == (2, 3, 4, 64)
    check(arrays, y.reshape(24, 64), inner.reshape(24, 64))


@pytest.mark.parametrize(
    ("rank", "want_inner", "scaled"),
    thinned(
        itertools.product([8, 64, 384, 768], [False, True], [False, True]),
        [(8, True, False), (384, False, False), (384, True, True)],
    ),
)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(rank, want_inner, scaled):
    operands = (
        aval(4096, 8192),
        aval(4096, rank),
        aval(rank, 8192),
        aval(8192, dtype=jnp.float32),
        aval(dtype=jnp.float32),
        aval(8192),
        tuple(aval(size, dtype=jnp.float32) for size in (4096, 8192)) if scaled else None,
    )
    config = expand_compose.config(4096, rank, 8192, jnp.bfloat16)
    options = {"want_inner": want_inner, "sm_count": 132, "config": config}
    assert "dora_expand_compose" in for_cuda(expand_compose.launch, *operands, **options)


def test_refuses_with_a_reason():
    bf16, f32 = jnp.bfloat16, jnp.float32
    assert refuses(4001, 100, 8200, bf16) is None
    assert "float32" in refuses(64, 8, 64, f32)
    assert "no rows" in refuses(0, 8, 64, bf16)
    assert "multiple of 8" in refuses(64, 8, 60, bf16)
    assert "shared memory" in refuses(64, 4096, 64, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("rows", "rank", "out"),
    [(4096, 384, 8192), (4001, 64, 4096), (2048, 768, 4096), (517, 24, 1032), (8, 16, 28672)],
)
def test_agrees_at_full_size(rows, rank, out, dtype):
    arrays = operands(3, rows, rank, out, dtype)
    first = run(arrays, sm_count=132)
    check(arrays, *first)
    scales = scales_of(rows, out)
    check(arrays, *run(arrays, sm_count=132, scales=scales), scales=scales)
