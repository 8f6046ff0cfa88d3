"""The norm of quantised kernels by Triton, interpreted on a CPU and, under `-m gpu`, native."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops import factored_norm
from jax_dora.ops.quantised import Format
from jax_dora.ops.triton.triton_quantised_norm import refuses
from parity.oracle import fp64
from tests import quantised
from tests.tables import slow

SCALE = 0.7


def check(qtype, sizes, tiles, adapter_dtype, scale_dtype=jnp.float32):
    n_in, rank, out = sizes
    kernel = quantised.draw(qtype, (n_in, out), tiles, scale_dtype=scale_dtype)
    rng = np.random.default_rng(1)
    lora_a = jnp.asarray(rng.standard_normal((n_in, rank)) * n_in**-0.5, adapter_dtype)
    lora_b = jnp.asarray(rng.standard_normal((rank, out)) * rank**-0.5, adapter_dtype)
    found = factored_norm(kernel, lora_a, lora_b, SCALE, implementation="triton")
    adapted = quantised.meant(kernel) + SCALE * fp64(lora_a) @ fp64(lora_b)
    np.testing.assert_allclose(fp64(found), np.linalg.norm(adapted, axis=0), rtol=1e-5)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("qtype", "sizes", "tiles", "adapter_dtype"),
    [
        # Ragged sizes, a scale for every 64 rows, 8 rows, and column.
        ("nf4", (128, 24, 160), (2, 160), jnp.float32),
        ("int4", (152, 3, 34), (19, 34), jnp.bfloat16),
        slow("int8", (137 * 8, 70, 33), (1, 33), jnp.bfloat16),
        ("int8", (200, 5, 7), (1, 7), jnp.float16),
        # Scales for several columns.
        ("float8_e4m3fn", (128, 24, 160), (2, 5), jnp.bfloat16),
    ],
)
def test_agrees_with_the_materialised_norm(qtype, sizes, tiles, adapter_dtype):
    check(qtype, sizes, tiles, adapter_dtype)


@pytest.mark.usefixtures("on_triton")
def test_scales_may_be_bf16():
    check("nf4", (128, 8, 32), (2, 32), jnp.bfloat16, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("adapter_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("qtype", ["nf4", "int4", "int8", "float8_e4m3fn"])
def test_agrees_at_full_size(qtype, adapter_dtype):
    check(qtype, (4096, 64, 2048), (64, 2048), adapter_dtype)


@pytest.mark.parametrize(
    ("form", "dtype", "reason"),
    [
        (("nf4", (64, 1), jnp.float32, True), jnp.bfloat16, "zero points"),
        (("nf4", (4, 1), jnp.float32, False), jnp.bfloat16, "a multiple of 8 rows"),
        (("nf4", (64, 1), jnp.float32, False), jnp.float64, "adapter has dtype float64"),
        (("int4", (64, 1), jnp.float32, False), jnp.bfloat16, "out = 33 is odd"),
    ],
)
def test_refuses_with_a_reason(form, dtype, reason):
    assert reason in refuses(64, 8, 33, Format(*form), jnp.dtype(dtype))
    assert refuses(64, 8, 33, Format("int8", (64, 1), jnp.float32, False), jnp.bfloat16) is None
