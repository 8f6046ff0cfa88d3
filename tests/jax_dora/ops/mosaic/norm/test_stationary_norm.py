import itertools

import jax
import jax.numpy as jnp
import pytest

from jax_dora import ops
from jax_dora.ops.mosaic.norm import one_pass_norm, quantised_norm, stationary_norm
from jax_dora.ops.mosaic.norm.stationary_norm import refuses
from jax_dora.ops.mosaic.projection.strip_tiling import Config
from jax_dora.ops.quantised import Format, format_of
from tests.jax_dora.ops.mosaic.norm.test_one_pass_norm import (
    SCALE,
    adapter,
    check,
    check_special_features,
)
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import STORED, draw
from tests.jax_dora.ops.mosaic.norm.test_quantised_norm import check as check_quantised
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow, thinned

BF16, F32 = jnp.bfloat16, jnp.float32
NF4 = Format("nf4", (64, 1), jnp.float32, False)


def run(arrays, config=None, *, sm_count=2):
    kernel, lora_a, lora_b = arrays
    stored = format_of(kernel) if hasattr(kernel, "qvalue") else kernel.dtype
    call = (kernel.shape[0], lora_a.shape[1], kernel.shape[1], stored, lora_a.dtype)
    assert refuses(*call) is None
    config = config or stationary_norm.config(*call)
    arrays = (*jax.tree.leaves(kernel), lora_a, lora_b, jnp.float32(SCALE))
    squared = stationary_norm.launch(*arrays, sm_count=sm_count, config=config)
    return jax.block_until_ready(jnp.sqrt(squared))


@pytest.mark.parametrize(
    ("n_in", "rank", "out", "dtype", "adapter_dtype"),
    [
        # A rank of no whole slices, and several runs for a thread block.
        (256, 96, 384, BF16, BF16),
        slow(128, 24, 128, BF16, F32),
        slow(128, 4, 128, jnp.float16, jnp.float16),
        slow(384, 384, 256, BF16, BF16),
        ci(128, 136, 128, jnp.float16, F32),
    ],
)
def test_agrees_with_the_materialised_norm(on_mosaic, n_in, rank, out, dtype, adapter_dtype):
    arrays = adapter(0, n_in, rank, out, dtype, adapter_dtype)
    with on_mosaic():
        found = run(arrays)
    check(arrays, found)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        Config(stages=3, slots=1, splits=1),
        Config(stages=2, slots=3, splits=3),
        Config(stages=5, slots=2, splits=2),
    ],
)
def test_every_kind_of_config_agrees(on_mosaic, config):
    arrays = adapter(1, 768, 72, 256, BF16, BF16)
    with on_mosaic():
        found = run(arrays, config)
    check(arrays, found)


@pytest.mark.parametrize(
    ("qtype", "tiles"),
    [
        *(slow("nf4", (4, 128)), slow("int4", (1, 128))),
        *(("int8", (2, 128)), slow("float8_e4m3fn", (4, 4))),
    ],
)
@pytest.mark.ci
def test_codes_agree_with_the_materialised_norm(on_mosaic, qtype, tiles):
    arrays = draw(qtype, 256, 136, 128, tiles, BF16)
    with on_mosaic():
        found = run(arrays)
    check_quantised(arrays, found)


@pytest.mark.ci
def test_nothing_cancels_zero_is_zero_and_nan_stays(on_mosaic):
    with on_mosaic():
        check_special_features(run, 128)


@pytest.mark.parametrize(
    ("qtype", "rank", "adapter_dtype"),
    thinned(
        [*itertools.product([None, *STORED], [16, 384], [BF16]), (None, 192, F32), (None, 8, F32)],
        [(None, 384, BF16), ("nf4", 384, BF16), ("int8", 16, BF16), (None, 192, F32)],
    ),
)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(qtype, rank, adapter_dtype):
    stored, given = BF16, [aval(8192, 8192)]
    if qtype is not None:
        scales = 128 if "4" in qtype[-1] else 1
        stored = Format(qtype, (8192 // scales, 1), F32, False)
        given = [aval(8192, 8192, dtype=STORED[qtype]), aval(scales, 8192, dtype=F32)]
    call = (8192, rank, 8192, stored, adapter_dtype)
    assert refuses(*call) is None
    given += [aval(*shape, dtype=adapter_dtype) for shape in ((8192, rank), (rank, 8192))]
    given.append(aval(dtype=F32))
    config = stationary_norm.config(*call)
    text = for_cuda(stationary_norm.launch, *given, config=config, sm_count=132)
    assert "dora_stationary_norm" in text
    assert "8192x8192xf32" not in text


def test_refuses_with_a_reason():
    assert refuses(8192, 384, 8192, BF16, BF16) is None
    assert refuses(8192, 192, 8192, BF16, F32) is None
    assert "registers" in refuses(8192, 392, 8192, BF16, BF16)
    assert "registers" in refuses(8192, 200, 8192, BF16, F32)
    assert "float32" in refuses(128, 8, 128, F32, F32)
    assert "int8" in refuses(128, 8, 128, BF16, jnp.int8)
    assert "is 0" in refuses(128, 0, 128, BF16, BF16)
    assert "in = 64" in refuses(64, 8, 128, BF16, BF16)
    assert "out = 192" in refuses(128, 8, 192, NF4, BF16)
    assert "32×1" in refuses(128, 8, 128, NF4._replace(tile=(32, 1)), BF16)
    assert "zero points" in refuses(128, 8, 128, NF4._replace(has_zero_point=True), BF16)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ((8192, 384, 8192, BF16, BF16), stationary_norm),
        ((4096, 16, 4096, BF16, F32), stationary_norm),
        ((8192, 768, 8192, BF16, BF16), one_pass_norm),
        ((8192, 16, 8192, F32, F32), one_pass_norm),
        ((8192, 384, 8192, NF4, BF16), stationary_norm),
        ((8192, 64, 8192, NF4, BF16), quantised_norm),
        ((4096, 64, 4096, NF4._replace(qtype="int8"), BF16), stationary_norm),
        ((8200, 384, 8200, BF16, BF16), one_pass_norm),
        ((192, 8, 64, BF16, BF16), None),
    ],
)
def test_an_unnamed_call_takes_the_fastest(monkeypatch, call, kernel):
    choose = ops.norm.choose
    monkeypatch.setattr(choose, "target", lambda: choose.Target("gpu", "9.0"))
    choice = choose.choose("factored_norm", None, *ops.norm.candidates(*call))
    assert (choice and choice.kernel) is kernel


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n_in", "rank", "out", "dtype", "adapter_dtype"),
    [
        (8192, 384, 8192, BF16, BF16),
        (4096, 16, 14336, BF16, F32),
        (14336, 192, 4096, BF16, F32),
        (1024, 72, 1152, jnp.float16, jnp.float16),
        (768, 64, 768, jnp.float16, F32),
    ],
)
def test_agrees_at_full_size(n_in, rank, out, dtype, adapter_dtype):
    arrays = adapter(4, n_in, rank, out, dtype, adapter_dtype)
    check(arrays, run(arrays, sm_count=132))


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", STORED)
@pytest.mark.parametrize(("n_in", "rank", "out"), [(8192, 384, 8192), (1920, 64, 1152)])
def test_codes_agree_at_full_size(n_in, rank, out, qtype):
    tiles = (n_in // 64, out) if "4" in qtype[-1] else (1, out)
    arrays = draw(qtype, n_in, rank, out, tiles, BF16)
    check_quantised(arrays, run(arrays, sm_count=132))
