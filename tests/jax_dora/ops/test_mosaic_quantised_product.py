import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora import ops
from jax_dora.ops.mosaic import quantised_product, quantised_rows
from jax_dora.ops.mosaic.low_rank_tiling import Config
from jax_dora.ops.mosaic.quantised_product import refuses
from jax_dora.ops.quantised import Format, format_of
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.ops.test_mosaic_quantised_norm import STORED, draw
from tests.tables import thinned


def check(x, kernel, found):
    """Holds a product to the roundings of W's numbers and of the result to x's dtype.

    Scales of x's dtype are applied in it: to a number of NF4 that is rounded itself.
    """
    roundings = 2 if kernel.scale.dtype == x.dtype else 1
    bound = abs(fp64(x)) @ abs(quantised.meant(kernel))
    epsilon = float(jnp.finfo(x.dtype).eps)
    exact = fp64(x) @ quantised.meant(kernel)
    assert found.dtype == x.dtype
    assert np.all(abs(fp64(found) - exact) <= epsilon * (roundings * bound + abs(exact)) / 2)


@pytest.mark.parametrize(
    ("qtype", "tiles", "shape", "dtype"),
    thinned(
        [
            ("nf4", (3, 160), (2, 3, 192), jnp.bfloat16),
            ("int4", (3, 5), (33, 192), jnp.float16),
            ("int8", (1, 160), (192,), jnp.bfloat16),
            ("float8_e4m3fn", (1, 160), (9, 192), jnp.bfloat16),
        ],
        [
            ("nf4", (3, 160), (2, 3, 192), jnp.bfloat16),
            ("int4", (3, 5), (33, 192), jnp.float16),
            ("int8", (1, 160), (192,), jnp.bfloat16),
        ],
    ),
)
def test_agrees_with_the_product(on_mosaic, qtype, tiles, shape, dtype):
    kernel, *_ = draw(qtype, 192, 1, 160, tiles, jnp.float32)
    if qtype == "nf4":
        kernel = kernel.replace(scale=kernel.scale.astype(dtype))
    x = jnp.asarray(np.random.default_rng(2).standard_normal(shape), dtype)
    call = (x.size // 192, 192, 160, format_of(kernel), x.dtype)
    assert refuses(*call) is None
    config = quantised_product.config(*call)
    with on_mosaic():
        found = quantised_product.launch(x, kernel.qvalue, kernel.scale, config=config, sm_count=2)
    check(x, kernel, found)


@pytest.mark.parametrize(
    ("qtype", "tiles"),
    thinned(itertools.product(STORED, [1, 128]), [("nf4", 128), ("float8_e4m3fn", 1)]),
)
def test_lowers_for_hopper_at_full_size(qtype, tiles):
    form = Format(qtype, (8192 // tiles, 1), jnp.float32, False)
    config = quantised_product.config(8, 8192, 8192, form, jnp.bfloat16)
    avals = [
        jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 8192), STORED[qtype]),
        jax.ShapeDtypeStruct((tiles, 8192), jnp.float32),
    ]
    call = jax.jit(lambda *a: quantised_product.launch(*a, config=config, sm_count=132))
    text = call.trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "dora_quantised_product" in text
    assert "8192x8192xbf16" not in text


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    nf4 = Format("nf4", (64, 1), jnp.float32, False)
    assert refuses(64, 8192, 8192, nf4, jnp.float16) is None
    assert "float32" in refuses(8, 64, 64, nf4, jnp.float32)
    assert "65 rows" in refuses(65, 64, 64, nf4, bf16)
    assert "zero points" in refuses(8, 64, 64, nf4._replace(has_zero_point=True), bf16)
    assert "in = 100" in refuses(8, 100, 64, nf4, bf16)
    assert "32×1" in refuses(8, 64, 64, nf4._replace(tile=(32, 1)), bf16)
    assert "out = 48" in refuses(8, 64, 48, nf4, bf16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taken", "qtype", "rows"), [(quantised_product, "nf4", 4), (quantised_rows, "int8", 2)]
)
def test_an_adapted_projection_of_few_rows_takes_it(on_mosaic, monkeypatch, taken, qtype, rows):
    kernel, lora_a, lora_b = draw(qtype, 128, 8, 64, (2, 64), jnp.float32)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((rows, 128)), jnp.bfloat16)
    magnitude = jnp.asarray(np.random.default_rng(4).uniform(0.5, 2, 64), jnp.float32)
    norm = ops.factored_norm(kernel, lora_a, lora_b, 0.7)

    launch, launched = taken.launch, []

    def seen(*operands, **knobs):
        launched.append(operands[0].shape)
        return launch(*operands, **knobs)

    monkeypatch.setattr(taken, "launch", seen)
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
@pytest.mark.parametrize(("rows", "n_in", "out"), [(1, 8192, 8192), (33, 2048, 1056)])
def test_agrees_at_full_size(rows, n_in, out, qtype):
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") else (1, out)
    kernel, *_ = draw(qtype, n_in, 1, out, tiles, jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((rows, n_in)), jnp.bfloat16)
    call = (rows, n_in, out, format_of(kernel), x.dtype)
    config = quantised_product.config(*call)
    launch = quantised_product.launch
    first = launch(x, kernel.qvalue, kernel.scale, config=config, sm_count=132)
    check(x, kernel, first)
    again = launch(x, kernel.qvalue, kernel.scale, config=config, sm_count=132)
    np.testing.assert_array_equal(again, first)
    assert isinstance(config, Config)
