"""The two kernels of a projection of few rows, for every format of the base."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import jax_dora
from jax_dora import ops
from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode import decode_finish, decode_project, decode_tile, decode_tiling
from jax_dora.ops.mosaic.decode.decode_project import refuses
from jax_dora.ops.mosaic.hopper import codebook
from jax_dora.ops.mosaic.hopper.limits import SHARED_MEMORY
from jax_dora.ops.quantised import Format, format_of, is_quantised
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import STORED
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import draw as draw_quantised
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow, thinned

SCALE = 0.7


def draw(qtype, n_in, rank, out, tiles, dtype):
    """Returns a kernel of format `qtype` (of `dtype` if None), and lora_a and lora_b of `dtype`."""
    kernel, *adapter = draw_quantised(qtype or "int8", n_in, rank, out, tiles or (1, 1), dtype)
    if qtype is None:
        kernel = jnp.asarray(np.random.default_rng(5).standard_normal((n_in, out)), dtype)
    return kernel, *adapter


def operands(kernel, shape, dtype):
    """Returns x of a shape and dtype, and g and bias for the kernel's output features."""
    rng, out = np.random.default_rng(2), kernel.shape[1]
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    g = jnp.asarray(rng.uniform(0.5, 2, out), jnp.float32)
    return x, g, jnp.asarray(rng.standard_normal(out), jnp.float32)


def launched(x, kernel, lora_a, lora_b, g, bias, sm_count):
    """Returns the kernels' result for a call that they support."""
    form = format_of(kernel) if is_quantised(kernel) else None
    rank = 0 if lora_b is None else lora_b.shape[0]
    call = (x.size // x.shape[-1], *kernel.shape, rank, form, x.dtype)
    assert refuses(*call) is None
    w, scales = (kernel.qvalue, kernel.scale) if is_quantised(kernel) else (kernel, None)
    knobs: dict[str, Any] = {"config": decode_project.config(*call), "sm_count": sm_count}
    return decode_project.launch(x, w, scales, lora_a, lora_b, g, jnp.float32(SCALE), bias, **knobs)


def multiplied(x, kernel, sm_count):
    """Returns the kernels' product of x and a kernel, without an adapter."""
    return launched(x, kernel, None, None, None, None, sm_count)


def check(x, kernel, lora_a, lora_b, g, bias, found, slack=1.0):
    """Checks that the error is at most one rounding of W, of z and of the result to x's dtype, and
    that of sums in fp32, of which each of up to 8192 terms is truncated."""
    is_stored = not is_quantised(kernel)
    meant = fp64(kernel) if is_stored else quantised.meant(kernel)
    x, lora_a, lora_b, g = (fp64(one) for one in (x, lora_a, lora_b, g))
    bias = 0.0 if bias is None else fp64(bias)
    exact = g * (x @ meant + SCALE * (x @ lora_a) @ lora_b) + bias
    bound = g * SCALE * (abs(x @ lora_a) @ abs(lora_b)) + abs(exact)
    sums = g * (abs(x) @ abs(meant))
    bound = bound + (0 if is_stored else sums)
    error = slack * float(jnp.finfo(found.dtype).eps) * bound / 2 + 2.0**-19 * sums
    assert np.all(abs(fp64(found) - exact) <= error)


@pytest.mark.parametrize(
    ("qtype", "tiles", "shape", "rank", "dtype", "scale_dtype"),
    [
        ("nf4", (3, 512), (2, 3, 192), 16, jnp.bfloat16, jnp.bfloat16),
        ci("int4", (3, 4), (33, 192), 8, jnp.float16, jnp.float32),
        slow("nf4", (1, 512), (64, 192), 16, jnp.bfloat16, jnp.bfloat16),
        slow("nf4", (3, 384), (5, 192), 16, jnp.bfloat16, jnp.bfloat16),
        slow("nf4", (1, 512), (2, 192), 3, jnp.float16, jnp.float16),
        ci("int8", (1, 384), (192,), 64, jnp.bfloat16, jnp.bfloat16),
        slow("int8", (3, 384), (12, 192), 64, jnp.float16, jnp.float32),
        ci("float8_e4m3fn", (3, 384), (9, 192), 72, jnp.bfloat16, jnp.float32),
        (None, None, (5, 192), 24, jnp.bfloat16, None),
        slow(None, None, (1, 192), 8, jnp.float16, None),
        slow(None, None, (64, 192), 128, jnp.float16, None),
    ],
)
def test_agrees_with_the_projection(on_mosaic, qtype, tiles, shape, rank, dtype, scale_dtype):
    out = tiles[1] if tiles and tiles[1] > 4 else 512 if qtype else 192
    kernel, lora_a, lora_b = draw(qtype, 192, rank, out, tiles, dtype)
    if qtype:
        kernel = kernel.replace(scale=kernel.scale.astype(scale_dtype))
    x, g, bias = operands(kernel, shape, dtype)
    with on_mosaic():
        found = launched(x, kernel, lora_a, lora_b, g, bias, sm_count=2)
    assert found.dtype == dtype
    check(x, kernel, lora_a, lora_b, g, bias, found)


@pytest.mark.parametrize(
    ("qtype", "rows", "tiles"),
    [("nf4", 9, 2), ("int8", 2, 1), slow("int8", 9, 2), slow("nf4", 40, 1), slow(None, 8, 1)],
)
@pytest.mark.ci
def test_multiplies_without_an_adapter(on_mosaic, qtype, rows, tiles):
    kernel, _, _ = draw(qtype, 128, 1, 256, (tiles, 256), jnp.bfloat16)
    x, _, _ = operands(kernel, (rows, 128), jnp.bfloat16)
    with on_mosaic():
        found = multiplied(x, kernel, sm_count=2)
    check(x, kernel, np.zeros((128, 1)), np.zeros((1, 256)), np.ones(256), None, found)


@pytest.mark.ci
@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_maps_over_kernels(on_mosaic, qtype):
    """As for the experts of a layer."""
    kernels = [
        quantised.draw(qtype, (128, 256), (2, 256), seed=seed, scale_dtype=jnp.bfloat16)
        for seed in range(3)
    ]
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 9, 128)), jnp.bfloat16)
    stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *kernels)
    with on_mosaic():
        found = jax.vmap(lambda x, kernel: multiplied(x, kernel, sm_count=2))(x, stack)
    for one, kernel, y in zip(x, kernels, found, strict=True):
        check(one, kernel, np.zeros((128, 1)), np.zeros((1, 256)), np.ones(256), None, y)


@pytest.mark.parametrize("qtype", [slow("nf4"), None])
@pytest.mark.ci
def test_two_consumers_add_their_sums_of_a_strip(on_mosaic, qtype):
    out = 256 if qtype else 64
    kernel, lora_a, lora_b = draw(qtype, 256, 16, out, (4, out), jnp.bfloat16)
    tiling, of_a = decode_tiling.tilings(256, out, 16, 8, decode_project.Config(tile_cols=out), 6)
    assert decode_tiling.in_pairs(tiling)
    assert decode_tiling.in_pairs(of_a)
    x, g, bias = operands(kernel, (8, 256), jnp.bfloat16)
    with on_mosaic():
        found = launched(x, kernel, lora_a, lora_b, g, bias, sm_count=6)
    check(x, kernel, lora_a, lora_b, g, bias, found)


@pytest.mark.parametrize(
    ("rows", "rank", "dtype"),
    [(72, 16, jnp.bfloat16), slow(5, 24, jnp.float16), slow(128, 72, jnp.bfloat16)],
)
def test_finishes_a_projection_with_a_given_base(on_mosaic, rows, rank, dtype):
    kernel, lora_a, lora_b = draw(None, 64, rank, 128, None, dtype)
    x, g, bias = operands(kernel, (rows, 64), dtype)
    base, z = x @ kernel, x @ lora_a
    scale = jnp.float32(SCALE)
    with on_mosaic():
        found = decode_finish.launch(base, z, lora_b, g, scale, bias, config=None, sm_count=2)
    exact = fp64(g) * (fp64(base) + SCALE * fp64(z) @ fp64(lora_b)) + fp64(bias)
    rounded = fp64(g) * SCALE * (abs(fp64(z)) @ abs(fp64(lora_b)))  # Of s·z, in the kernel.
    bound = float(jnp.finfo(dtype).eps) / 2 * (rounded + abs(exact))
    assert found.dtype == dtype
    assert np.all(abs(fp64(found) - exact) <= bound)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("qtype", STORED)
def test_the_table_has_every_code_or_pair(qtype, dtype):
    numbers = {
        "nf4": quantised.nf4_codebook(),
        "int4": np.array([*range(8), *range(-8, 0)]),
        "int8": np.arange(256, dtype=np.uint8).view(np.int8),
        "float8_e4m3fn": np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn),
    }[qtype].astype(np.float32)
    table = decode_tile.table(codebook.numbers(STORED[qtype]), dtype)
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
        [*itertools.product(STORED, [1, 128], [1, 32, 64]), (None, 1, 8), (None, 1, 64)],
        [
            ("nf4", 128, 64),
            ("int4", 128, 1),
            ("int8", 1, 1),
            ("float8_e4m3fn", 1, 32),
            (None, 1, 64),
        ],
    ),
)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(qtype, tiles, rows):
    form = Format(qtype, (8192 // tiles, 1), jnp.bfloat16, False) if qtype else None
    rank = 2 * rows
    config = decode_project.config(rows, 8192, 8192, rank, form, jnp.bfloat16)
    avals = [
        aval(rows, 8192),
        aval(8192, 8192, dtype=STORED[qtype] if qtype else jnp.bfloat16),
        aval(tiles, 8192) if qtype else None,
        *(aval(8192, rank), aval(rank, 8192), aval(8192, dtype=jnp.float32)),
        aval(dtype=jnp.float32),
    ]
    text = for_cuda(decode_project.launch, *avals, config=config, sm_count=132)
    assert "dora_decode_project" in text
    assert "dora_decode_finish" in text
    assert qtype is None or "8192x8192xbf16" not in text
    config = decode_project.config(rows, 8192, 8192, 0, form, jnp.bfloat16)
    without = [*avals[:3], None, None, None, avals[-1]]
    assert "dora_decode_project" in for_cuda(
        decode_project.launch, *without, config=config, sm_count=132
    )


@pytest.mark.parametrize("rank", [0, 8, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
def test_the_tiles_fit_into_shared_memory(rows, rank):
    forms = [Format(qtype, (64, 1), jnp.float32, False) for qtype in STORED]
    for form in (*forms, None):
        config = decode_project.config(rows, 8192, 8192, rank, form, jnp.bfloat16)
        stored = form.stored if form else jnp.dtype(jnp.bfloat16)
        taken = decode_tiling.shared_memory(rows, rank, stored, form is not None, config)
        assert taken <= SHARED_MEMORY


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("out", [1024, 4096, 14336])
def test_xla_adds_few_partial_sums(out, rows):
    """Without an adapter, even if that leaves multiprocessors idle, as for 1024 columns."""
    form = Format("nf4", (64, 1), jnp.float32, False)
    config = decode_project.config(rows, 4096, out, 0, form, jnp.bfloat16)
    tiling, _ = decode_tiling.tilings(4096, out, 0, rows, config, 132)
    assert decode_tiling.parts(tiling) <= decode_tiling.MOST_PARTS


def test_more_rows_take_narrower_tiles_of_4_bit_codes():
    """Otherwise a thread's sums would not fit into its registers."""
    form = Format("nf4", (64, 1), jnp.float32, False)
    found = {
        (rows, out): decode_project.config(rows, 1024, out, 8, form, jnp.bfloat16).tile_cols
        for rows in (32, 33)
        for out in (256, 384)
    }
    assert found == {(32, 256): 256, (32, 384): 128, (33, 256): 128, (33, 384): 128}


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    nf4 = Format("nf4", (64, 1), jnp.float32, False)
    assert refuses(64, 8192, 8192, 16, nf4, jnp.float16) is None
    assert refuses(1, 64, 128, 1, nf4._replace(qtype="int8"), bf16) is None
    assert refuses(1, 64, 64, 1, None, bf16) is None
    assert "float32" in refuses(8, 64, 256, 8, nf4, jnp.float32)
    assert "65 rows" in refuses(65, 64, 256, 8, nf4, bf16)
    assert "rank is 129" in refuses(8, 64, 256, 129, nf4, bf16)
    assert "zero points" in refuses(8, 64, 256, 8, nf4._replace(has_zero_point=True), bf16)
    assert "in = 100" in refuses(8, 100, 256, 8, nf4, bf16)
    assert "32×1" in refuses(8, 64, 256, 8, nf4._replace(tile=(32, 1)), bf16)
    assert "out = 192" in refuses(8, 64, 192, 8, nf4, bf16)
    assert "out = 96" in refuses(8, 64, 96, 8, None, bf16)


def test_finish_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    assert decode_finish.refuses(256, 128, 64, jnp.float16) is None
    assert "float32" in decode_finish.refuses(8, 8, 64, jnp.float32)
    assert "257 rows" in decode_finish.refuses(257, 8, 64, bf16)
    assert "65 rows" in decode_finish.refuses(65, 8, 64, bf16)
    assert "rank is 0" in decode_finish.refuses(8, 0, 64, bf16)
    assert "out = 100" in decode_finish.refuses(8, 8, 100, bf16)


@pytest.mark.ci
@pytest.mark.parametrize(("qtype", "rows"), [("nf4", 4), ("int8", 2), (None, 8)])
def test_a_projection_of_few_rows_uses_the_kernels(on_mosaic, watched, qtype, rows):
    kernel, lora_a, lora_b = draw(qtype, 128, 8, 256, (2, 256), jnp.float32)
    x, magnitude, bias = operands(kernel, (rows, 128), jnp.bfloat16)
    if qtype is None:
        kernel = kernel.astype(jnp.bfloat16)
    norm = ops.factored_norm(kernel, lora_a, lora_b, SCALE)
    seen = watched(decode_project)
    with on_mosaic():
        found = ops.dora_linear(
            *(x, kernel, lora_a, lora_b, magnitude, SCALE),
            bias=bias,
            norm=norm,
            implementation="mosaic",
        )
    assert seen
    assert set(seen) == {(rows, 128)}
    adapted = (quantised.meant(kernel) if qtype else fp64(kernel)) + SCALE * fp64(lora_a) @ fp64(
        lora_b
    )
    exact = fp64(x) @ (adapted * fp64(magnitude) / np.linalg.norm(adapted, axis=0)) + fp64(bias)
    np.testing.assert_allclose(fp64(found), exact, atol=0.03 * abs(exact).max())


@pytest.mark.ci
def test_gradients_do_not_use_the_kernels():
    """The gradients agree; only the result uses the kernels for few rows."""
    kernel, lora_a, lora_b = draw(None, 64, 8, 64, None, jnp.bfloat16)
    x, magnitude, _ = operands(kernel, (9, 64), jnp.bfloat16)
    dy = jnp.asarray(np.random.default_rng(6).standard_normal((9, 64)), jnp.bfloat16)
    norm = ops.factored_norm(kernel, lora_a, lora_b, SCALE)

    def gradients(implementation):
        def y(*trained):
            options = {"norm": norm, "implementation": implementation}
            return ops.dora_linear(x, kernel, *trained, SCALE, **options)

        result, pull = jax.vjp(y, lora_a, lora_b, magnitude)
        return result, *pull(dy)

    with plgpu.force_gpu_interpret_mode():
        found = gradients("mosaic")
    for one, other in zip(found, gradients("xla"), strict=True):
        np.testing.assert_allclose(fp64(one), fp64(other), atol=0.02 * abs(fp64(other)).max())


@pytest.mark.parametrize(("rows", "kernels"), [slow(1, 2), (8, 2), slow(128, 1)])
def test_a_frozen_layer_uses_the_kernels_on_a_hopper(monkeypatch, rows, kernels):
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    options = {"rank": 16, "alpha": 16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layer = jax_dora.freeze(jax_dora.DoRALinear(1024, 1024, implementation="xla", **options))
    layer.implementation = None
    graphdef, state = nnx.split(layer)
    text = for_cuda(lambda state, x: nnx.merge(graphdef, state)(x), state, aval(rows, 1024))
    assert text.count("custom_call @mosaic_gpu") == kernels
    assert "dora_decode_finish" in text


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", [*STORED, None])
@pytest.mark.parametrize(
    ("rows", "n_in", "out", "rank"),
    [
        (1, 8192, 8192, 16),
        (2, 2048, 1280, 64),
        (12, 4096, 1024, 8),
        (24, 2048, 1152, 16),
        (64, 2048, 5120, 128),
    ],
)
def test_agrees_at_full_size(rows, n_in, out, rank, qtype):
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") or rows == 2 else (1, out)
    kernel, lora_a, lora_b = draw(qtype, n_in, rank, out, tiles, jnp.bfloat16)
    x, g, bias = operands(kernel, (rows, n_in), jnp.bfloat16)
    given = (x, kernel, lora_a, lora_b, g, bias)
    check(*given, launched(*given, sm_count=132))
    product = multiplied(x, kernel, sm_count=132)
    check(x, kernel, np.zeros((n_in, 1)), np.zeros((1, out)), np.ones(out), None, product)
