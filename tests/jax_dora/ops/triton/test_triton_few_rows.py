"""A projection of few rows by Triton, interpreted on a CPU and, under `-m gpu`, native."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.dispatch import choose
from jax_dora.ops.quantised import Format, format_of, is_quantised
from jax_dora.ops.triton import triton_few_rows
from jax_dora.ops.triton.triton_few_rows import refuses
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.ops.mosaic.decode.test_decode_project import SCALE, check, draw, operands
from tests.tables import slow


def launched(x, kernel, lora_a, lora_b, g, bias):
    form = format_of(kernel) if is_quantised(kernel) else None
    rank = 0 if lora_b is None else lora_b.shape[0]
    call = (x.size // x.shape[-1], *kernel.shape, rank, form, x.dtype)
    assert refuses(*call) is None
    w, scales = (kernel.qvalue, kernel.scale) if is_quantised(kernel) else (kernel, None)
    capability = choose.target().capability
    knobs = {"config": triton_few_rows.config(capability, *call), "capability": capability}
    return triton_few_rows.launch(
        x, w, scales, lora_a, lora_b, g, jnp.float32(SCALE), bias, **knobs
    )


def run(qtype, tiles, shape, rank, dtype, out, scale_dtype=jnp.float32):
    kernel, lora_a, lora_b = draw(qtype, shape[-1], rank, out, tiles, dtype)
    if qtype:
        kernel = kernel.replace(scale=kernel.scale.astype(scale_dtype))
    x, g, bias = operands(kernel, shape, dtype)
    found = launched(x, kernel, lora_a, lora_b, g, bias)
    assert found.dtype == dtype
    assert found.shape == (*shape[:-1], out)

    check(x, kernel, lora_a, lora_b, g, bias, found, slack("triton", dtype))


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("qtype", "tiles", "shape", "rank", "dtype", "out"),
    [
        ("nf4", (3, 82), (2, 3, 192), 16, jnp.float16, 82),
        ("int8", (1, 70), (5, 200), 5, jnp.bfloat16, 70),
        slow("int4", (3, 4), (33, 192), 8, jnp.float16, 136),
        slow("float8_e4m3fn", (3, 40), (9, 192), 72, jnp.bfloat16, 40),
        (None, None, (1, 200), 3, jnp.float16, 33),
        slow(None, None, (64, 192), 128, jnp.float16, 72),
    ],
)
def test_agrees_with_the_projection(qtype, tiles, shape, rank, dtype, out):
    run(qtype, tiles, shape, rank, dtype, out)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("qtype", ["nf4", "int4", "int8", "float8_e4m3fn", None])
def test_triton_agrees_at_full_size(qtype, rows):
    run(qtype, (64, 2048), (rows, 4096), 64, jnp.bfloat16, 2048, jnp.bfloat16)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(("qtype", "rows"), [("nf4", 9), (None, 2)])
def test_multiplies_without_an_adapter(qtype, rows):
    kernel, _, _ = draw(qtype, 128, 1, 256, (2, 256), jnp.float16)
    x, _, _ = operands(kernel, (rows, 128), jnp.float16)
    found = launched(x, kernel, None, None, None, None)
    check(x, kernel, np.zeros((128, 1)), np.zeros((1, 256)), np.ones(256), None, found)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ((65, 64, 32, 8, None, jnp.bfloat16), "65 rows"),
        ((1, 64, 32, 129, None, jnp.bfloat16), "rank is 129"),
        ((1, 64, 32, 8, None, jnp.float32), "x has dtype float32"),
        ((1, 64, 32, 8, ("nf4", (32, 1), jnp.float32, False), jnp.bfloat16), "a multiple of 64"),
        ((1, 64, 32, 8, ("nf4", (64, 1), jnp.float32, True), jnp.bfloat16), "zero points"),
        ((1, 64, 33, 8, ("int4", (64, 1), jnp.float32, False), jnp.bfloat16), "odd"),
    ],
)
def test_refuses_with_a_reason(call, reason):
    call = [Format(*one) if isinstance(one, tuple) else one for one in call]
    assert reason in refuses(*call)
