"""FP8 codes and an adapter multiplied in one kernel, against fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dispatch.choose import UNLIMITED_BLOCKS
from jax_dora.ops.mosaic.projection import coded_matmul
from jax_dora.ops.mosaic.projection.coded_matmul import refuses
from jax_dora.ops.mosaic.projection.matmul_tiling import Config, Tiles
from parity import tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SMALL = Config(128, 128, split_rows=False, stages=3)


def operands(seed, rows, contracted, cols, rank, qtype, dtype, vectors):
    normal = normals(seed)
    return {
        "codes": (normal(rows, contracted) * 40).astype(qtype),
        "scales": jnp.exp(normal(rows)) / 1600,
        "kernel": (normal(cols, contracted) * 40).astype(E4M3),
        "z": normal(rows, rank).astype(dtype) * contracted**0.5,
        "adapter": normal(cols, rank, deviation=rank**-0.5).astype(dtype),
        "columns": jnp.exp(normal(cols)) if vectors else None,
        "g": 1 + normal(cols, deviation=0.05) if vectors > 1 else None,
    }


def run(given, config=None, sm_count=2):
    options = {"config": config or Config(), "sm_count": sm_count}
    (found,) = coded_matmul.launch(**given, **options)
    return found


def check(given, found):
    codes, scales, kernel, z, adapter, columns, g = (
        None if one is None else fp64(one) for one in given.values()
    )
    columns, g = (1.0 if one is None else one for one in (columns, g))
    scales = scales[:, None] * columns
    exact = g * (scales * (codes @ kernel.T) + z @ adapter.T)
    _, sums = tolerances.product(codes, kernel.T)
    if jax.default_backend() == "gpu":
        sums = sums + tolerances.fp8_product(codes, kernel.T)
    unit = tolerances.UNIT_ROUNDOFF["float32"]
    sums = tolerances.product(z, adapter.T)[1] + scales * (sums + 3 * unit * abs(codes @ kernel.T))
    bound = tolerances.rounding(exact, found.dtype) + abs(g) * sums + unit * abs(exact)
    assert np.all(abs(fp64(found) - exact) <= bound)


@pytest.mark.parametrize(
    ("rows", "contracted", "cols", "rank", "qtype", "dtype", "vectors", "config"),
    [
        (72, 256, 192, 16, E5M2, jnp.bfloat16, 0, SMALL),
        # More slices than buffers, and several tiles for a block.
        ci(264, 640, 320, 16, E4M3, jnp.bfloat16, 2, Config(band=2, band_in_cols=True)),
        slow(136, 128, 128, 4, E4M3, jnp.float16, 1, SMALL),
    ],
)
def test_agrees_with_fp64(on_mosaic, rows, contracted, cols, rank, qtype, dtype, vectors, config):
    given = operands(0, rows, contracted, cols, rank, qtype, dtype, vectors)
    with on_mosaic():
        found = jax.block_until_ready(run(given, config))
    assert found.dtype == dtype
    check(given, found)


def test_a_row_that_is_not_finite_harms_itself_only_in_each_layer_of_a_scan(on_mosaic):
    given = operands(3, 24, 128, 128, 1, E4M3, jnp.bfloat16, 1)
    given["scales"] = given["scales"].at[3].set(0)
    given["codes"] = given["codes"].at[5, 100].set(jnp.nan)
    given["z"] = given["z"].at[17].set(jnp.inf)
    stack = jnp.stack([given["kernel"][::-1], given["kernel"]])

    def layer(_, kernel):
        return None, run(given | {"kernel": kernel}, SMALL)

    with on_mosaic():
        _, found = jax.block_until_ready(jax.lax.scan(layer, None, stack))
    others = np.delete(np.arange(24), [5, 17])
    rows = {name: given[name][others] for name in ("codes", "scales", "z")}
    for kernel, result in zip(stack, found, strict=True):
        check(given | rows | {"kernel": kernel}, result[others])
    assert np.isnan(fp64(found[:, 5])).all()
    assert not np.isfinite(fp64(found[:, 17])).any()


@pytest.mark.parametrize(("cols", "parts"), [(192, 2), ci(320, 3)])
def test_a_kernel_in_parts_gives_the_same_bits(on_mosaic, cols, parts):
    given = operands(4, 24, 128 * parts, cols, 16, E4M3, jnp.bfloat16, 2)
    apart = jnp.stack(jnp.split(given["kernel"], parts, axis=1))
    with on_mosaic():
        whole = run(given, SMALL)
        found = jax.block_until_ready(run(given | {"kernel": apart}, SMALL))
    check(given, found)
    np.testing.assert_array_equal(found, whole)


@pytest.mark.ci
def test_keeps_leading_axes_and_copies(on_mosaic):
    given = operands(1, 48, 128, 128, 8, E4M3, jnp.bfloat16, 2)
    shaped = {
        **given,
        "codes": given["codes"].reshape(2, 24, 128),
        "scales": given["scales"].reshape(2, 24),
        "z": given["z"].reshape(2, 24, 8),
    }
    with on_mosaic():
        options = {"want_copy": True, "config": SMALL, "sm_count": 2}
        found, copy = jax.block_until_ready(coded_matmul.launch(**shaped, **options))
    assert found.shape == copy.shape == (2, 24, 128)
    np.testing.assert_array_equal(found, copy)
    check(given, found.reshape(48, 128))


@pytest.mark.parametrize(("qtype", "vectors"), [(E5M2, False), (E4M3, True)])
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(qtype, vectors):
    features = [aval(28672, dtype=jnp.float32)] * 2 if vectors else []
    program = for_cuda(
        coded_matmul.launch,
        aval(4096, 8192, dtype=qtype),
        aval(4096, dtype=jnp.float32),
        aval(28672, 8192, dtype=E4M3),
        aval(4096, 16),
        aval(28672, 16),
        *features,
        config=Config(),
        sm_count=132,
    )
    assert "dora_coded_matmul" in program
    # Without the barrier, XLA launches a kernel again for each result that a scan stacks and reads.
    assert program.count("stablehlo.optimization_barrier") == 1


@pytest.mark.parametrize(
    ("rows", "cols", "sm_count", "blocks"),
    [
        (4096, 28672, 132, 132),
        (4096, 28672, UNLIMITED_BLOCKS, 1792),
        (4096, 8192, UNLIMITED_BLOCKS, 512),
        (4096, 1024, UNLIMITED_BLOCKS, 128),  # a round for all tiles
        (4096, 1024, 132, 128),
        (4096, 2304, UNLIMITED_BLOCKS, 288),  # 3 rounds, or 2 of two
    ],
)
def test_during_collectives_a_block_has_two_tiles(rows, cols, sm_count, blocks):
    """Unless that takes another round."""
    assert Tiles.of(Config(), rows, cols, sm_count).in_pairs().blocks == blocks


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    assert refuses(4096, 8192, 28672, 16, bf16) is None
    assert "float32" in refuses(64, 256, 256, 8, jnp.float32)
    assert "rows = 0" in refuses(0, 256, 256, 8, bf16)
    assert "rows = 63" in refuses(63, 256, 256, 8, bf16)
    assert "192 summed" in refuses(64, 192, 256, 8, bf16)
    assert "96 features" in refuses(64, 256, 96, 8, bf16)
    assert "64 features" in refuses(64, 256, 64, 8, bf16)
    assert "rank = 64" in refuses(64, 256, 256, 64, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "contracted", "cols", "rank", "qtype", "vectors"),
    [
        (4096, 8192, 1024, 16, E5M2, 0),
        (4096, 1024, 8192, 16, E5M2, 0),
        (2048, 4096, 14336, 16, E4M3, 2),
        (520, 2048, 1088, 8, E4M3, 1),
    ],
)
def test_agrees_at_full_size(rows, contracted, cols, rank, qtype, vectors):
    given = operands(2, rows, contracted, cols, rank, qtype, jnp.bfloat16, vectors)
    first = run(given, sm_count=132)
    check(given, first)
    given["kernel"] = jnp.stack(jnp.split(given["kernel"], 2, axis=1))  # as two devices gather it
    np.testing.assert_array_equal(run(given, sm_count=UNLIMITED_BLOCKS), first)
