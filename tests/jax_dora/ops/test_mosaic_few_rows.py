"""Few rows by a quantised kernel, multiplied with the numbers that a table has for its codes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora import ops
from jax_dora.ops.mosaic import codebook, quantised_rows, quantised_tile
from jax_dora.ops.mosaic.hopper import RESERVED, SHARED_MEMORY
from jax_dora.ops.mosaic.quantised_rows import refuses
from jax_dora.ops.quantised import Format, format_of
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.ops.test_mosaic_quantised_norm import STORED, draw
from tests.tables import thinned


def check(x, kernel, found):
    """Holds a product to one rounding of W's numbers and one of the result to x's dtype."""
    bound = abs(fp64(x)) @ abs(quantised.meant(kernel))
    epsilon = float(jnp.finfo(x.dtype).eps)
    exact = fp64(x) @ quantised.meant(kernel)
    assert found.dtype == x.dtype
    assert np.all(abs(fp64(found) - exact) <= epsilon * (bound + abs(exact)) / 2)


@pytest.mark.parametrize(
    ("qtype", "tiles", "shape", "dtype", "scale_dtype"),
    thinned(
        [
            ("nf4", (3, 512), (2, 3, 192), jnp.bfloat16, jnp.bfloat16),
            ("int4", (3, 4), (33, 192), jnp.float16, jnp.float32),
            ("nf4", (1, 512), (2, 192), jnp.float16, jnp.float16),
            ("int8", (1, 384), (192,), jnp.bfloat16, jnp.bfloat16),
            ("float8_e4m3fn", (3, 384), (9, 192), jnp.bfloat16, jnp.float32),
        ],
        [
            ("nf4", (3, 512), (2, 3, 192), jnp.bfloat16, jnp.bfloat16),
            ("int4", (3, 4), (33, 192), jnp.float16, jnp.float32),
            ("int8", (1, 384), (192,), jnp.bfloat16, jnp.bfloat16),
        ],
    ),
)
def test_agrees_with_the_product(on_mosaic, qtype, tiles, shape, dtype, scale_dtype):
    out = 512 if qtype in ("nf4", "int4") else 384
    kernel, *_ = draw(qtype, 192, 1, out, tiles, jnp.float32)
    kernel = kernel.replace(scale=kernel.scale.astype(scale_dtype))
    x = jnp.asarray(np.random.default_rng(2).standard_normal(shape), dtype)
    call = (x.size // 192, 192, out, format_of(kernel), x.dtype)
    assert refuses(*call) is None
    config = quantised_rows.config(*call)
    with on_mosaic():
        found = quantised_rows.launch(x, kernel.qvalue, kernel.scale, config=config, sm_count=2)
    check(x, kernel, found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("qtype", STORED)
def test_the_table_has_every_code_or_pair(qtype, dtype):
    numbers = {
        "nf4": quantised.nf4_codebook(),
        "int4": np.array([*range(8), *range(-8, 0)]),
        "int8": np.arange(256, dtype=np.uint8).view(np.int8),
        "float8_e4m3fn": np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn),
    }[qtype].astype(np.float32)
    table = quantised_tile.table(codebook.numbers(STORED[qtype]), dtype)
    assert (table == table[:, :1]).all()
    found = table[:, 0].copy().view(np.uint16).view(dtype)
    lower, upper = found.astype(np.float32).reshape(256, 2).T
    numbers = numbers.astype(dtype).astype(np.float32)  # NaN of FP8 is NaN.
    if numbers.size == 16:
        np.testing.assert_array_equal(lower.reshape(16, 16), np.tile(numbers, (16, 1)))
        np.testing.assert_array_equal(upper.reshape(16, 16).T, np.tile(numbers, (16, 1)))
    else:
        np.testing.assert_array_equal(lower, numbers)
        np.testing.assert_array_equal(upper, numbers)


@pytest.mark.parametrize(
    ("qtype", "tiles", "rows"),
    thinned(
        itertools.product(STORED, [1, 128], [1, 32]),
        [("nf4", 128, 32), ("int4", 128, 1), ("float8_e4m3fn", 1, 32)],
    ),
)
def test_lowers_for_hopper_at_full_size(qtype, tiles, rows):
    form = Format(qtype, (8192 // tiles, 1), jnp.bfloat16, False)
    config = quantised_rows.config(rows, 8192, 8192, form, jnp.bfloat16)
    avals = [
        jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 8192), STORED[qtype]),
        jax.ShapeDtypeStruct((tiles, 8192), jnp.bfloat16),
    ]
    call = jax.jit(lambda *a: quantised_rows.launch(*a, config=config, sm_count=132))
    text = call.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_quantised_rows" in text
    assert "8192x8192xbf16" not in text


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_its_tiles_have_room(rows):
    form = Format("nf4", (64, 1), jnp.float32, False)
    config = quantised_rows.config(rows, 8192, 8192, form, jnp.bfloat16)
    stage = 64 * 128 + max(rows, 8) * 128 + 4 * config.tile_cols
    taken = config.consumers * (config.slots * stage + 4 * max(rows, 8) * config.tile_cols)
    assert taken + 4 * 256 * 32 + RESERVED <= SHARED_MEMORY


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    nf4 = Format("nf4", (64, 1), jnp.float32, False)
    assert refuses(64, 8192, 8192, nf4, jnp.float16) is None
    assert refuses(1, 64, 128, nf4._replace(qtype="int8"), bf16) is None
    assert "float32" in refuses(8, 64, 256, nf4, jnp.float32)
    assert "65 rows" in refuses(65, 64, 256, nf4, bf16)
    assert "zero points" in refuses(8, 64, 256, nf4._replace(has_zero_point=True), bf16)
    assert "in = 100" in refuses(8, 100, 256, nf4, bf16)
    assert "32×1" in refuses(8, 64, 256, nf4._replace(tile=(32, 1)), bf16)
    assert "out = 384" in refuses(8, 64, 384, nf4, bf16)


@pytest.mark.slow
@pytest.mark.parametrize(("qtype", "rows"), [("nf4", 4), ("int8", 2)])
def test_an_adapted_projection_of_few_rows_takes_it(on_mosaic, monkeypatch, qtype, rows):
    kernel, lora_a, lora_b = draw(qtype, 128, 8, 256, (2, 256), jnp.float32)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((rows, 128)), jnp.bfloat16)
    magnitude = jnp.asarray(np.random.default_rng(4).uniform(0.5, 2, 256), jnp.float32)
    norm = ops.factored_norm(kernel, lora_a, lora_b, 0.7)

    launch, launched = quantised_rows.launch, []

    def seen(*operands, **knobs):
        launched.append(operands[0].shape)
        return launch(*operands, **knobs)

    monkeypatch.setattr(quantised_rows, "launch", seen)
    with on_mosaic():
        found = ops.dora_linear(
            x, kernel, lora_a, lora_b, magnitude, 0.7, norm=norm, implementation="mosaic"
        )
    assert launched
    assert set(launched) == {(rows, 128)}
    adapted = quantised.meant(kernel) + 0.7 * fp64(lora_a) @ fp64(lora_b)
    exact = fp64(x) @ (adapted * fp64(magnitude) / np.linalg.norm(adapted, axis=0))
    np.testing.assert_allclose(fp64(found), exact, atol=0.03 * abs(exact).max())


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize(
    ("rows", "n_in", "out"), [(1, 8192, 8192), (2, 2048, 1280), (12, 4096, 1024), (64, 2048, 5120)]
)
def test_agrees_at_full_size(rows, n_in, out, qtype):
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") or rows == 2 else (1, out)
    kernel, *_ = draw(qtype, n_in, 1, out, tiles, jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((rows, n_in)), jnp.bfloat16)
    config = quantised_rows.config(rows, n_in, out, format_of(kernel), x.dtype)
    knobs = {"config": config, "sm_count": 132}
    first = quantised_rows.launch(x, kernel.qvalue, kernel.scale, **knobs)
    check(x, kernel, first)
    again = quantised_rows.launch(x, kernel.qvalue, kernel.scale, **knobs)
    np.testing.assert_array_equal(again, first)
