"""The norm with the transposed codes, against fp64 and the codes themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic.norm import stationary_tile, transposing_norm
from jax_dora.ops.mosaic.norm.transposing_norm import refuses
from jax_dora.ops.mosaic.projection.strip_tiling import Config
from jax_dora.ops.quantised import Format, format_of
from tests.jax_dora.ops.mosaic import lanes
from tests.jax_dora.ops.mosaic.norm.test_one_pass_norm import SCALE
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import check, draw
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow

FP8, BF16, F32 = "float8_e4m3fn", jnp.bfloat16, jnp.float32


def run(arrays, config=None, *, sm_count=2):
    kernel, lora_a, lora_b = arrays
    call = (kernel.shape[0], lora_a.shape[1], kernel.shape[1], format_of(kernel), lora_a.dtype)
    assert refuses(*call) is None
    config = config or transposing_norm.config(*call)
    arrays = (*jax.tree.leaves(kernel), lora_a, lora_b, jnp.float32(SCALE))
    squared, turned = transposing_norm.launch(*arrays, sm_count=sm_count, config=config)
    return jax.block_until_ready((jnp.sqrt(squared), turned))


def check_both(arrays, found):
    norm, turned = found
    check(arrays, norm)
    bits = [np.asarray(one).view(np.uint8) for one in (arrays[0].qvalue, turned)]
    np.testing.assert_array_equal(bits[1], bits[0].T)


@pytest.mark.parametrize(
    ("n_in", "rank", "out", "adapter_dtype", "config"),
    [
        (256, 16, 512, BF16, None),  # four consumers
        ci(384, 24, 128, F32, None),
        slow(384, 72, 256, BF16, Config(stages=2, slots=3, splits=2)),
    ],
)
def test_agrees_with_the_materialised_norm(on_mosaic, n_in, rank, out, adapter_dtype, config):
    arrays = draw(FP8, n_in, rank, out, (1, out), adapter_dtype)
    with on_mosaic():
        found = run(arrays, config)
    check_both(arrays, found)


@pytest.mark.ci
def test_zeros_and_nan(on_mosaic):
    kernel, a, b = draw(FP8, 128, 8, 256, (1, 256), BF16)
    codes = kernel.qvalue.at[:, 3].set(0).at[5, 7].set(jnp.nan)
    kernel, b = kernel.replace(qvalue=codes), b.at[:, 3].set(0)
    with on_mosaic():
        norm, turned = run((kernel, a, b))
    assert norm[3] == 0
    assert np.flatnonzero(np.isnan(norm)).tolist() == [7]
    np.testing.assert_array_equal(turned.astype(F32), codes.astype(F32).T)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("n_in", "out", "rank", "dtype"),
    [(8192, 28672, 16, BF16), (8192, 1024, 16, F32), (1024, 384, 64, BF16)],
)
def test_lowers_for_hopper(n_in, out, rank, dtype):
    stored = Format(FP8, (n_in, 1), BF16, False)
    call = (n_in, rank, out, stored, dtype)
    assert refuses(*call) is None
    given = [aval(n_in, out, dtype=FP8), aval(1, out)]
    given += [aval(*shape, dtype=dtype) for shape in ((n_in, rank), (rank, out))]
    given.append(aval(dtype=F32))
    config = transposing_norm.config(*call)
    text = for_cuda(transposing_norm.launch, *given, config=config, sm_count=132)
    assert "dora_transposing_norm" in text
    assert f"{n_in}x{out}xf32" not in text


def test_refuses_with_a_reason():
    stored = Format(FP8, (8192, 1), BF16, False)
    assert refuses(8192, 16, 8192, stored, BF16) is None
    assert "one scale per column" in refuses(8192, 16, 8192, stored._replace(tile=(64, 1)), BF16)
    assert "int8" in refuses(8192, 16, 8192, stored._replace(qtype="int8"), BF16)
    assert "in = 64" in refuses(64, 16, 8192, stored._replace(tile=(64, 1)), BF16)


@pytest.mark.parametrize(
    ("rank", "dtype", "consumers"), [(64, BF16, 4), (64, F32, 2), (72, BF16, None), (72, F32, None)]
)
def test_is_used_with_small_adapters(rank, dtype, consumers):
    call = (8192, rank, 8192, Format(FP8, (8192, 1), BF16, False), dtype)
    assert transposing_norm.wins(*call) == (consumers is not None)
    if consumers:
        assert transposing_norm.config(*call).consumers == consumers


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n_in", "rank", "out", "dtype"),
    [
        (8192, 16, 28672, BF16),
        (28672, 16, 8192, BF16),
        (8192, 8, 1024, F32),
        (1920, 64, 1152, BF16),
        (1024, 200, 384, BF16),
    ],
)
def test_agrees_at_full_size(n_in, rank, out, dtype):
    arrays = draw(FP8, n_in, rank, out, (1, out), dtype)
    check_both(arrays, run(arrays, sm_count=132))


@pytest.mark.parametrize("warp", [0, 3])
def test_a_thread_has_16_adjacent_codes_of_its_columns(monkeypatch, warp):
    """In the order of `in_order_of_codes`, whose lanes read different banks of shared memory."""
    rng, columns = np.random.default_rng(0), 128
    tile = rng.integers(0, 256, (64, columns)).astype(np.uint8)
    swizzled = np.zeros(tile.size, np.uint8)
    row, column = np.indices(tile.shape)
    swizzled[row * columns + (column ^ (row & 7) << 4)] = tile
    rows = jnp.broadcast_to(jnp.arange(64)[:, None], (64, 8))
    order = np.asarray(stationary_tile.in_order_of_codes(rows))[:, 0]
    assert sorted(order) == list(range(64))

    stored = lanes.plant(monkeypatch, stationary_tile)
    lane = lanes.LANE
    first = 16 * warp + 2 * (lane >> 2)
    monkeypatch.setattr(stationary_tile, "_first_column", lambda _: first)
    pairs, loaded = stationary_tile._AdjacentPairs(np.int64(0), columns), []
    for n in range(16):
        place = pairs._rows[n % 8] + n // 8 * pairs._stride
        # 32 lanes read 16 bits each: no two of them different words of the same bank.
        assert len(set(place // 4 % 32)) == len(set(place // 4))
        loaded.append(
            swizzled[place].astype(np.uint64) | swizzled[place + 1].astype(np.uint64) << 8
        )
        of_product = order[8 * (n // 2) + 2 * (lane & 3) + n % 2]
        np.testing.assert_array_equal(loaded[-1] & 255, tile[of_product, first])
    stationary_tile._store_words_of_columns(loaded, np.int64(0), 64)
    found = np.zeros((columns, 64), np.uint8)
    for place, words in stored:
        found.reshape(-1)[place : place + 16] = np.array(words, np.uint32).view(np.uint8)
    np.testing.assert_array_equal(
        found[16 * warp : 16 * warp + 16], tile.T[16 * warp : 16 * warp + 16]
    )
