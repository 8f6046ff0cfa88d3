import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from jax_dora.ops import factored_norm
from jax_dora.ops.mosaic.norm import quantised_norm
from jax_dora.ops.mosaic.norm.quantised_norm import refuses
from jax_dora.ops.mosaic.projection.strip_tiling import Config
from jax_dora.ops.quantised import Format, dequantise, format_of
from parity.oracle import fp64
from tests import quantised
from tests.jax_dora.programs import aval, for_cuda, largest_floats
from tests.tables import slow, thinned

SCALE = 0.7
STORED = {"nf4": jnp.uint4, "int4": jnp.int4, "int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn}


def draw(qtype, n_in, rank, out, tiles, adapter_dtype):
    kernel = quantised.draw(qtype, (n_in, out), tiles)
    rng = np.random.default_rng(1)
    lora_a = jnp.asarray(rng.standard_normal((n_in, rank)) * n_in**-0.5, adapter_dtype)
    lora_b = jnp.asarray(rng.standard_normal((rank, out)) * rank**-0.5, adapter_dtype)
    return kernel, lora_a, lora_b


def run(arrays, config=None, *, sm_count=2):
    kernel, *adapter = arrays
    call = (kernel.shape[0], adapter[0].shape[1], kernel.shape[1])
    config = config or quantised_norm.config(*call, format_of(kernel), adapter[0].dtype)
    operands = kernel.qvalue, kernel.scale, *adapter, jnp.float32(SCALE)
    return jnp.sqrt(quantised_norm.launch(*operands, config=config, sm_count=sm_count))


def check(arrays, found):
    kernel, lora_a, lora_b = arrays
    adapted = quantised.meant(kernel) + SCALE * fp64(lora_a) @ fp64(lora_b)
    np.testing.assert_allclose(fp64(found), np.linalg.norm(adapted, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("qtype", "tiles", "adapter_dtype"),
    [
        ("nf4", (2, 160), jnp.float32),
        slow("int4", (1, 160), jnp.bfloat16),
        slow("int8", (1, 160), jnp.bfloat16),
        ("float8_e4m3fn", (2, 5), jnp.bfloat16),
    ],
)
def test_agrees_with_the_materialised_norm(on_mosaic, qtype, tiles, adapter_dtype):
    arrays = draw(qtype, 128, 24, 160, tiles, adapter_dtype)
    with on_mosaic():
        found = run(arrays)
    check(arrays, found)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        Config(tile_cols=64, stages=2, slots=2, splits=1),
        Config(stages=2, slots=1, consumers=3, splits=2),
        Config(tile_cols=192, stages=2, slots=1),
    ],
)
def test_every_kind_of_config_agrees(on_mosaic, config):
    arrays = draw("nf4", 256, 72, 224, (2, 224), jnp.bfloat16)
    with on_mosaic():
        found = run(arrays, config)
    check(arrays, found)


@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(qtype):
    tiles = (128, 8192) if qtype == "nf4" else (1, 8192)
    form = Format(qtype, (8192 // tiles[0], 1), jnp.float32, False)
    config = quantised_norm.config(8192, 384, 8192, form, jnp.bfloat16)
    operands = (
        *(aval(8192, 8192, dtype=STORED[qtype]), aval(*tiles, dtype=jnp.float32)),
        *(aval(8192, 384), aval(384, 8192), aval(dtype=jnp.float32)),
    )
    text = for_cuda(quantised_norm.launch, *operands, config=config, sm_count=132)
    assert "dora_quantised_norm" in text
    assert "8192x8192xf32" not in text
    assert "8192x8192xbf16" not in text


def test_refuses_with_a_reason():
    bf16 = jnp.bfloat16
    nf4 = Format("nf4", (64, 1), jnp.float32, False)
    assert refuses(8192, 100, 8192, nf4, jnp.float32) is None
    assert "zero points" in refuses(64, 8, 64, nf4._replace(has_zero_point=True), bf16)
    assert "32×1" in refuses(64, 8, 64, nf4._replace(tile=(32, 1)), bf16)
    assert "float64" in refuses(64, 8, 64, nf4, jnp.float64)
    assert "is 0" in refuses(64, 0, 64, nf4, bf16)
    assert "out = 48" in refuses(64, 8, 48, nf4, bf16)
    assert refuses(64, 8, 48, nf4._replace(qtype="int8"), bf16) is None
    assert "shared memory" in refuses(64, 4096, 64, nf4, bf16)


SIZES = (2048, 64, 2048)


def compiled(norm, qtype):
    """Returns the compiled program of the norm of a kernel [2048, 2048], for the device."""
    n_in, rank, out = SIZES
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") else (1, out)
    kernel = quantised.draw(qtype, (n_in, out), tiles)
    adapter = aval(n_in, rank), aval(rank, out)
    return jax.jit(norm).lower(kernel, *adapter).compile().as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", STORED)
def test_the_compiled_program_has_no_floats_of_the_kernels_size(qtype):
    text = compiled(lambda *arrays: factored_norm(*arrays, SCALE), qtype)
    assert "mosaic_gpu" in text
    assert largest_floats(text) < SIZES[0] * SIZES[2]


@pytest.mark.parametrize("qtype", thinned(STORED, ["nf4"]))
def test_a_dense_norm_is_seen_in_the_compiled_program(qtype):
    """Otherwise the test above would show nothing."""

    def dense(kernel, lora_a, lora_b):
        change = (SCALE * lora_a @ lora_b).astype(jnp.float32)
        return jnp.linalg.norm(dequantise(kernel, jnp.float32) + change, axis=0)

    assert largest_floats(compiled(dense, qtype)) == SIZES[0] * SIZES[2]


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize(("n_in", "rank", "out"), [(8192, 384, 8192), (2048, 64, 1056)])
def test_agrees_at_full_size(n_in, rank, out, qtype):
    tiles = (n_in // 64, out) if qtype in ("nf4", "int4") else (1, out)
    arrays = draw(qtype, n_in, rank, out, tiles, jnp.bfloat16)
    assert isinstance(arrays[0], qwix.QArray)
    assert refuses(n_in, rank, out, format_of(arrays[0]), jnp.bfloat16) is None
    check(arrays, run(arrays, sm_count=132))
