"""The norm and expand and compose by rings of tiles, which a Hopper's config chooses. Triton's
interpreter does not run them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dora_common.triton import compilation, rings, strips
from jax_dora.ops import factored_norm
from jax_dora.ops.triton import kernel_call, triton_expand_compose, triton_norm
from parity import oracle, tolerances
from parity.oracle import fp64
from tests.jax_dora.ops.test_norm import adapter
from tests.jax_dora.ops.triton.test_strips import check_expand_and_compose, check_norm
from tests.jax_dora.programs import aval, for_cuda

BF16, F32 = jnp.bfloat16, jnp.float32
SCRATCH = 3 * rings.DESCRIPTOR_BYTES


def launch_norm(operands, rank):
    kernel, _, lora_b = operands
    call = (kernel.shape[0], rank, lora_b.shape[1], kernel.dtype, lora_b.dtype)
    config = triton_norm.config(90, *call)
    assert isinstance(config, rings.Config)
    return triton_norm.launch(*operands, jnp.float32(0.7), config=config, capability=90)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *(((136, 200, 136), dtype) for dtype in (BF16, jnp.float16)),
        *(((24, 8, 384), BF16), ((328, 136, 264), BF16), ((4104, 4104, 136), BF16)),
        *(((136, 200, 136), F32), ((71, 328, 192), F32), ((24, 8, 72), F32)),
        *(((200, 136, 40), F32), ((4104, 328, 64), F32), ((7, 8, 8), F32)),
    ],
)
def test_the_norm_agrees_with_the_oracle(sizes, dtype):
    check_norm(adapter(0, *sizes, BF16, dtype), rings.Config)


@pytest.mark.usefixtures("hopper")
def test_a_row_of_nan_stays_one():
    kernel, *rest = adapter(0, 136, 24, 136, BF16, BF16)
    found = launch_norm((kernel.at[130, 3].set(jnp.nan), *rest), 136)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(150, 136, 72), (3, 384, 200), (4104, 136, 4104)])
def test_expand_and_compose_agree_with_fp64(sizes, with_bias):
    options = {"with_bias": with_bias, "want_inner": with_bias}
    check_expand_and_compose(sizes, rings.Config, **options)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rank", "dtype"), [(136, BF16), (384, BF16), (192, F32)])
def test_agrees_at_full_size(rank, dtype):
    operands = adapter(0, 4096, 2056, rank, BF16, dtype)
    found = factored_norm(*operands, 0.7, implementation="triton")
    again = factored_norm(*operands, 0.7, implementation="triton")
    exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
    assert np.all(abs(fp64(found) - exact) <= tolerances.norm(*oracle.from_flax(*operands), 0.7))
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize(
    ("rank", "out", "dtype"),
    [(128, 2048, BF16), (392, 2048, BF16), (200, 2044, BF16), (64, 2044, F32), (200, 2048, F32)],
)
def test_other_calls_have_other_kernels(rank, out, dtype):
    config = triton_norm.config(90, 2048, rank, out, BF16, dtype)
    assert not isinstance(config, rings.Config)
    assert rank > 128 or isinstance(config, strips.Config)
    if dtype == BF16:
        config = triton_expand_compose.config(90, 64, rank, out, BF16)
        assert not isinstance(config, rings.Config)


def test_descriptors_have_memory(monkeypatch):
    """A program's result beside the others, and as much as the compiled kernel needs."""
    code = compilation.Compiled("kernel", "", b"", 384, 0, SCRATCH + 1)
    monkeypatch.setattr(kernel_call, "interpreted", lambda: False)
    monkeypatch.setattr(compilation, "compiled", lambda *call: code)
    operands = aval(1024, 1024), aval(1024, 384), aval(384, 1024), aval(dtype=F32)
    config = triton_norm.config(90, 1024, 384, 1024, BF16, BF16)

    launch: Any = triton_norm.launch

    def run(*operands):
        return launch.__wrapped__(*operands, config=config, capability=90)

    with pytest.raises(ValueError, match=f"has scratch = {SCRATCH}; raise it"):
        for_cuda(run, *operands)
    code = compilation.Compiled("kernel", "", b"", 384, 0, SCRATCH)
    programs, *_ = config.walk(1024, 1024, 90)
    text = for_cuda(run, *operands)
    assert f"tensor<{programs * SCRATCH}xi8>" in text
    assert "block_x = 384 : i32" in text
