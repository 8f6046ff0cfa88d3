"""Rows rounded to FP8 in one pass, against NumPy's rounding of them, number for number.

A GPU's quotient may lie two units of fp32 off, on the other side of the middle of two codes.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_dora.ops.mosaic.rows import row_codes
from jax_dora.ops.mosaic.rows.row_codes import QTYPE, Config, refuses
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow

E5M2 = "float8_e5m2"
TINY = np.finfo(np.float32).tiny


def rows_of(rows, in_features, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, in_features), np.float32)
    return jnp.asarray(x * np.exp(rng.standard_normal((rows, 1), np.float32))).astype(dtype)


def columns_of(in_features):
    return jnp.exp(jnp.asarray(np.random.default_rng(1).standard_normal(in_features, np.float32)))


def run(x, columns=None, qtype=QTYPE, config=None, sm_count=1):
    call = (x.size // x.shape[-1], x.shape[-1], x.dtype)
    config = config or row_codes.config(*call)
    options = {"qtype": qtype, "config": config, "sm_count": sm_count}
    return jax.block_until_ready(row_codes.launch(x, columns, **options))


def check(x, codes, scales, columns=None, qtype=QTYPE):
    wide = np.asarray(x.astype(jnp.float32))
    wide = wide if columns is None else wide * np.asarray(columns, np.float32)
    inverse = np.float32(1 / float(ml_dtypes.finfo(qtype).max))
    wanted = np.maximum(np.abs(wide).max(-1) * inverse, TINY)
    np.testing.assert_array_equal(scales, wanted)
    quotients = wide / wanted[..., None]
    rounded = quotients.astype(qtype).astype(np.float32)
    apart = codes.astype(np.float32) != rounded
    off = 2 * quotients[apart] - codes[apart].astype(np.float32) - rounded[apart]
    assert np.all(abs(off) <= 2.0**-20 * abs(quotients[apart]))


@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    [
        ((37, 128), jnp.bfloat16, Config(tile_bytes=1024, stages=3)),  # the last tile is ragged
        ((2, 3, 384), jnp.float16, None),  # chunks of less than a thread block's numbers
        ((3, 3584), jnp.bfloat16, Config(blocks_per_sm=1)),
        slow((5, 28672), jnp.bfloat16, None),
    ],
)
def test_agrees_with_numpy(on_mosaic, shape, dtype, config):
    x = rows_of(int(np.prod(shape[:-1])), shape[-1], dtype).reshape(shape)
    with on_mosaic():
        codes, scales = map(np.asarray, run(x, config=config))
    assert codes.shape == shape
    assert scales.shape == shape[:-1]
    check(x, codes, scales)


@pytest.mark.parametrize(
    ("shape", "dtype", "qtype", "of_columns"),
    [
        ((37, 1024), jnp.bfloat16, E5M2, jnp.float32),
        slow((5, 384), jnp.float16, QTYPE, jnp.bfloat16),
    ],
)
@pytest.mark.ci
def test_multiplies_columns_first(on_mosaic, shape, dtype, qtype, of_columns):
    x, columns = rows_of(*shape, dtype), columns_of(shape[-1]).astype(of_columns)
    with on_mosaic():
        codes, scales = map(np.asarray, run(x, columns, qtype))
    check(x, codes, scales, columns, qtype)


def strange_rows(in_features):
    x = rows_of(4, in_features, jnp.bfloat16)
    return x.at[0].set(0).at[1, 3].set(jnp.nan).at[2].multiply(1e-30)


def check_strange_rows(x, codes, scales):
    assert not codes[0].astype(np.float32).any()
    assert np.isnan(codes[1].astype(np.float32)).all()
    assert np.isnan(scales[1])
    check(x[2:], codes[2:], scales[2:])


@pytest.mark.ci
def test_zeros_nan_and_small_rows(on_mosaic):
    x = strange_rows(256)
    with on_mosaic():
        check_strange_rows(x, *map(np.asarray, run(x)))


def test_refuses_with_a_reason():
    assert refuses(4096, 3584, jnp.bfloat16) is None
    assert "float32" in refuses(64, 128, jnp.float32)
    assert "is 0" in refuses(0, 128, jnp.bfloat16)
    assert "multiple of 128" in refuses(64, 192, jnp.bfloat16)
    assert "too long" in refuses(64, 32768, jnp.bfloat16)


@pytest.mark.parametrize(
    ("in_features", "qtype"),
    [slow(768, None), (16384, None), (1024, E5M2), (14336, QTYPE), (28672, E5M2)],
)
@pytest.mark.ci
def test_lowers_for_hopper(in_features, qtype):
    options = {"config": row_codes.config(4096, in_features, jnp.bfloat16), "sm_count": 132}
    operands = [aval(4096, in_features)]
    if qtype is not None:
        operands.append(aval(in_features, dtype=jnp.float32))
        options["qtype"] = qtype
    assert "dora_row_codes" in for_cuda(row_codes.launch, *operands, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(4096, 8192), (4100, 768), (333, 28672), (33, 16384), (8, 128)])
def test_agrees_at_full_size(shape, dtype):
    x = rows_of(*shape, dtype)
    check(x, *map(np.asarray, run(x, sm_count=132)))
    columns = columns_of(shape[-1])
    for qtype in (QTYPE, E5M2):
        found = map(np.asarray, run(x, columns, qtype, sm_count=132))
        check(x, *found, columns, qtype)
    x = strange_rows(shape[-1])
    check_strange_rows(x, *map(np.asarray, run(x, sm_count=132)))
