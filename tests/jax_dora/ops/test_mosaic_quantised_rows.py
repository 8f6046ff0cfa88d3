"""One or two rows by a kernel of 8 bits, multiplied in registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic import quantised_rows
from jax_dora.ops.mosaic.hopper import RESERVED, SHARED_MEMORY
from jax_dora.ops.mosaic.quantised_rows import refuses
from jax_dora.ops.quantised import Format, format_of
from tests.jax_dora.ops.test_mosaic_quantised_norm import STORED, draw
from tests.jax_dora.ops.test_mosaic_quantised_product import check
from tests.tables import thinned


@pytest.mark.parametrize(
    ("qtype", "tiles", "shape", "dtype"),
    thinned(
        [
            ("int8", (1, 160), (192,), jnp.bfloat16),
            ("int8", (3, 160), (2, 192), jnp.float16),
            ("float8_e4m3fn", (3, 5), (1, 192), jnp.float16),
            ("float8_e4m3fn", (1, 160), (2, 1, 192), jnp.bfloat16),
        ],
        [
            ("int8", (1, 160), (192,), jnp.bfloat16),
            ("float8_e4m3fn", (3, 5), (1, 192), jnp.float16),
        ],
    ),
)
def test_agrees_with_the_product(on_mosaic, qtype, tiles, shape, dtype):
    kernel, *_ = draw(qtype, 192, 1, 160, tiles, jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal(shape), dtype)
    call = (x.size // 192, 192, 160, format_of(kernel), x.dtype)
    assert refuses(*call) is None
    config = quantised_rows.config(*call)
    with on_mosaic():
        found = quantised_rows.launch(x, kernel.qvalue, kernel.scale, config=config, sm_count=2)
    check(x, kernel, found)


@pytest.mark.parametrize(
    ("qtype", "rows"),
    [("int8", 1), ("float8_e4m3fn", 2)],
)
def test_lowers_for_hopper_at_full_size(qtype, rows):
    tiles = 128 // rows
    form = Format(qtype, (8192 // tiles, 1), jnp.float32, False)
    config = quantised_rows.config(rows, 8192, 8192, form, jnp.bfloat16)
    avals = [
        jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 8192), STORED[qtype]),
        jax.ShapeDtypeStruct((tiles, 8192), jnp.float32),
    ]
    call = jax.jit(lambda *a: quantised_rows.launch(*a, config=config, sm_count=132))
    text = call.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_quantised_rows" in text
    assert "8192x8192xbf16" not in text


@pytest.mark.parametrize("rows", [1, 2])
def test_its_tiles_have_room(rows):
    form = Format("int8", (64, 1), jnp.float32, False)
    config = quantised_rows.config(rows, 8192, 8192, form, jnp.bfloat16)
    ring = config.consumers * config.slots
    tile = 64 * config.tile_cols
    taken = ring * (tile + rows * 128 + 4 * config.tile_cols)
    taken += 4 * config.consumers * rows * config.tile_cols
    assert taken + RESERVED <= SHARED_MEMORY


def test_refuses_with_a_reason():
    int8 = Format("int8", (64, 1), jnp.float32, False)
    assert refuses(2, 8192, 8192, int8, jnp.float16) is None
    assert "3 rows" in refuses(3, 8192, 8192, int8, jnp.bfloat16)
    assert "format is nf4" in refuses(1, 64, 64, int8._replace(qtype="nf4"), jnp.bfloat16)
    assert "float32" in refuses(1, 64, 64, int8, jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("rows", "n_in", "out", "tiles"), [(1, 8192, 8192, 1), (2, 2048, 1056, 32)]
)
def test_agrees_at_full_size(rows, n_in, out, tiles, qtype):
    kernel, *_ = draw(qtype, n_in, 1, out, (tiles, out), jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((rows, n_in)), jnp.bfloat16)
    config = quantised_rows.config(rows, n_in, out, format_of(kernel), x.dtype)
    knobs = {"config": config, "sm_count": 132}
    first = quantised_rows.launch(x, kernel.qvalue, kernel.scale, **knobs)
    check(x, kernel, first)
    again = quantised_rows.launch(x, kernel.qvalue, kernel.scale, **knobs)
    np.testing.assert_array_equal(again, first)
