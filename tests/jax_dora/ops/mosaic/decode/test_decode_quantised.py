"""The kernel for products of many rows with a quantised kernel, without an adapter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops import dora_linear, factored_norm
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode import decode_quantised, decode_sums, decode_tile
from jax_dora.ops.mosaic.decode.decode_quantised import config, launch, refuses
from jax_dora.ops.mosaic.hopper.limits import RESERVED, SHARED_MEMORY
from jax_dora.ops.quantised import Format, bits, format_of
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import STORED
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow, thinned


def drawn(qtype, rows, n_in, out, tiles, dtype, scale_dtype=jnp.float32):
    kernel = quantised.draw(qtype, (n_in, out), tiles, scale_dtype=scale_dtype)
    return jnp.asarray(np.random.default_rng(2).standard_normal((rows, n_in)), dtype), kernel


def multiplied(x, kernel, sm_count):
    call = (x.size // x.shape[-1], *kernel.shape, format_of(kernel), x.dtype)
    assert refuses(*call) is None
    knobs: dict[str, Any] = {"config": config(*call), "sm_count": sm_count}
    return launch(x, kernel.qvalue, kernel.scale, **knobs)


def check(x, kernel, found):
    """Checks that the error is at most the roundings of v(q), if that is not exact, of σ∘v(q) if
    tiles have scales, and of the result, and that of sums in fp32, of which each term is truncated.
    """
    meant, x = quantised.meant(kernel), fp64(x)
    exact, sums = x @ meant, abs(x) @ abs(meant)
    roundings = (kernel.qtype == "nf4") + (kernel.scale.shape[0] > 1)
    half = float(jnp.finfo(found.dtype).eps) / 2
    bound = half * (roundings * (1 + half) * sums + abs(exact)) + 2.0**-19 * sums
    assert np.all(abs(fp64(found) - exact) <= bound)


@pytest.mark.parametrize(
    ("qtype", "rows", "n_in", "out", "tiles", "dtype", "scale_dtype", "sm_count"),
    [
        # Two parts of the inner axis, the second shorter.
        ("nf4", 9, 1728, 128, (27, 128), jnp.bfloat16, jnp.float32, 2),
        # A strip that is not full.
        slow("nf4", 9, 192, 384, (3, 384), jnp.bfloat16, jnp.float32, 6),
        slow("nf4", 72, 192, 384, (3, 384), jnp.bfloat16, jnp.float32, 6),
        # Two blocks of rows.
        ("int8", 130, 128, 128, (1, 128), jnp.bfloat16, jnp.bfloat16, 1),
        slow("nf4", 136, 128, 256, (2, 4), jnp.bfloat16, jnp.bfloat16, 1),
        slow("nf4", 40, 64, 256, (1, 256), jnp.float16, jnp.bfloat16, 1),
        ("int4", 9, 192, 128, (3, 128), jnp.float16, jnp.float16, 1),
        slow("int8", 16, 256, 256, (2, 256), jnp.bfloat16, jnp.float16, 2),
        slow("float8_e4m3fn", 20, 128, 256, (2, 256), jnp.bfloat16, jnp.float32, 1),
        ("float8_e4m3fn", 20, 128, 256, (1, 1), jnp.float16, jnp.float32, 4),
    ],
)
@pytest.mark.ci
def test_agrees_with_fp64(on_mosaic, qtype, rows, n_in, out, tiles, dtype, scale_dtype, sm_count):
    x, kernel = drawn(qtype, rows, n_in, out, tiles, dtype, scale_dtype)
    with on_mosaic():
        found = multiplied(x, kernel, sm_count)
    assert found.dtype == dtype
    check(x, kernel, found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_rounded_whatever_follows(dtype):
    """XLA may leave out a rounding to 16 bits if the next operation is in fp32."""
    parts = jnp.asarray(np.random.default_rng(3).standard_normal((5, 7, 8)), jnp.float32)
    parts = parts.at[:, 0].mul(2.0**-18)  # Subnormal in fp16.
    scales = jnp.asarray(np.random.default_rng(4).uniform(0.5, 2, 8), jnp.float32)

    def sums(scales):
        return decode_sums.added(parts, scales, dtype)

    text = for_cuda(lambda scales: sums(scales).astype(jnp.float32) * 3, scales)
    assert ("reduce_precision" if dtype == jnp.bfloat16 else "optimization_barrier") in text
    exact = fp64(parts).sum(0)
    for given, factor in ((None, 1), (scales, fp64(scales))):
        found, eps = fp64(sums(given)), float(jnp.finfo(dtype).eps)
        smallest = float(jnp.finfo(dtype).smallest_subnormal)
        bound = eps / 2 * abs(exact * factor) + 2.0**-20 * abs(fp64(parts)).sum(0) * factor
        assert np.all(abs(found - exact * factor) <= bound + smallest / 2)


@pytest.mark.ci
def test_scales_in_fp32_are_not_rounded(on_mosaic):
    """All scales lie halfway between two numbers of bf16, so that rounding would add up."""
    x, kernel = drawn("int8", 16, 256, 128, (4, 128), jnp.bfloat16)
    x, qvalue = jnp.ones_like(x), jnp.ones_like(kernel.qvalue)
    scale = jnp.full_like(kernel.scale, 1 + 2.0**-8 - 2.0**-12)
    kernel = kernel.replace(qvalue=qvalue * 3, scale=scale)
    with on_mosaic():
        found = multiplied(x, kernel, sm_count=1)
    # 3σ is rounded once, to 3 + 2^-6; the rounded σ = 1 would give 3.
    np.testing.assert_array_equal(fp64(found), 256 * (3 + 2.0**-6))


@pytest.mark.ci
def test_maps_over_kernels(on_mosaic):
    """As for the experts of a layer."""
    kernels = [quantised.draw("nf4", (128, 128), (2, 128), seed=seed) for seed in range(3)]
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 9, 128)), jnp.bfloat16)
    stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *kernels)
    with on_mosaic():
        found = jax.vmap(lambda x, kernel: multiplied(x, kernel, sm_count=2))(x, stack)
    for one, kernel, y in zip(x, kernels, found, strict=True):
        check(one, kernel, y)


def test_an_adapted_projection_reads_the_codes(monkeypatch):
    """In training, too; gradients use a dense copy, and so does the kernel for the whole projection
    where it is chosen."""
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    form = {"qtype": "nf4", "shape": (1024, 1024), "tiles": (16, 1024)}
    kernel = quantised.draw(**form)
    arrays = kernel.qvalue, kernel.scale

    def y(x, qvalue, scale, lora_a, lora_b, magnitude):
        whole = kernel.replace(qvalue=qvalue, scale=scale)
        norm = factored_norm(whole, lora_a, lora_b, 0.5)
        return dora_linear(x, whole, lora_a, lora_b, magnitude, 0.5, norm=norm)

    trained = aval(1024, 16), aval(16, 1024), aval(1024, dtype=jnp.float32)
    codes = [aval(*one.shape, dtype=one.dtype) for one in arrays]
    text = for_cuda(y, aval(300, 1024), *codes, *trained)
    assert "dora_decode_quantised" in text
    assert "1024x1024xbf16" not in text

    def gradient(x, qvalue, scale, *trained):
        def loss(trained):
            return y(x, qvalue, scale, *trained).astype(jnp.float32).sum()

        return jax.value_and_grad(loss)(trained)

    assert "dora_decode_quantised" in for_cuda(gradient, aval(300, 1024), *codes, *trained)
    many = for_cuda(y, aval(decode_quantised.MOST_ROWS + 1, 1024), *codes, *trained)
    assert "dora_decode_quantised" not in many
    assert "1024x1024xbf16" in many


@pytest.mark.parametrize(
    ("qtype", "rows", "tiles"),
    thinned(
        [(qtype, rows, tiles) for qtype in STORED for rows in (72, 500) for tiles in (1, 128)],
        [("nf4", 500, 128), ("int8", 72, 1)],
        [("int4", 72, 128), ("float8_e4m3fn", 500, 1)],
    ),
)
def test_lowers_for_hopper_at_full_size(qtype, rows, tiles):
    call = (rows, 8192, 8192, Format(qtype, (8192 // tiles, 1), jnp.float32, False), jnp.bfloat16)
    avals = aval(8192, 8192, dtype=STORED[qtype]), aval(tiles, 8192, dtype=jnp.float32)
    text = for_cuda(launch, aval(rows, 8192), *avals, config=config(*call), sm_count=132)
    assert "dora_decode_quantised" in text
    assert "8192x8192xbf16" not in text


@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize("rows", [9, 128, 136, 896])
def test_at_least_three_tiles_are_in_flight(rows, qtype):
    form = Format(qtype, (64, 1), jnp.float32, False)
    slots = config(rows, 8192, 8192, form, jnp.bfloat16).slots
    x_bytes = 64 * 2 * decode_quantised._block_rows(rows)
    codes = 64 * 256 * bits(form.stored) // 8
    table = decode_tile.table_for(form.stored, jnp.bfloat16)
    taken = slots * (x_bytes + codes + 4 * 256) + (0 if table is None else table.nbytes)
    assert slots >= 3
    assert taken <= SHARED_MEMORY - RESERVED


def test_rows_are_divided_evenly():
    found = {rows: decode_quantised._block_rows(rows) for rows in (9, 128, 129, 200, 500, 1024)}
    assert found == {9: 16, 128: 128, 129: 72, 200: 104, 500: 128, 1024: 128}


def test_the_inner_axis_is_divided_to_occupy_the_multiprocessors():
    found = {pieces: decode_quantised._run(64, pieces, 132) for pieces in (4, 32, 112, 448)}
    assert found == {4: 4, 32: 16, 112: 64, 448: 64}
    assert decode_quantised._run(1, 1, 132) == 1


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    nf4 = Format("nf4", (64, 1), jnp.float32, False)
    assert refuses(9, 64, 128, nf4, jnp.float16) is None
    assert refuses(896, 64, 128, nf4._replace(qtype="int8"), bf16) is None
    assert "float32" in refuses(128, 64, 256, nf4, jnp.float32)
    assert "8 rows" in refuses(8, 64, 256, nf4, bf16)
    assert "897 rows" in refuses(897, 64, 256, nf4, bf16)
    assert "scales of float32" in refuses(9, 128, 256, nf4, jnp.float16)
    assert refuses(9, 128, 256, nf4._replace(scale_dtype=jnp.dtype("float16")), jnp.float16) is None
    assert "zero points" in refuses(128, 64, 256, nf4._replace(has_zero_point=True), bf16)
    assert "in = 100" in refuses(128, 100, 256, nf4, bf16)
    assert "32×1" in refuses(128, 64, 256, nf4._replace(tile=(32, 1)), bf16)
    assert "out = 192" in refuses(128, 64, 192, nf4, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize(
    ("rows", "n_in", "out"),
    [(9, 4096, 1024), (65, 2048, 1152), (128, 4096, 14336), (500, 2048, 4096), (896, 4096, 4096)],
)
def test_agrees_at_full_size(rows, n_in, out, qtype):
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") or rows == 65 else (1, out)
    x, kernel = drawn(qtype, rows, n_in, out, tiles, jnp.bfloat16)
    check(x, kernel, multiplied(x, kernel, sm_count=132))
