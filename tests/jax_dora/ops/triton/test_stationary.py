"""The norm and expand and compose with a strip in registers, which a Hopper's config chooses."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dora_common.triton import compilation, stationary, strips
from jax_dora.ops import factored_norm
from jax_dora.ops.triton import kernel_call, triton_expand_compose, triton_norm
from parity import oracle, tolerances
from parity.oracle import fp64
from tests.jax_dora.ops.test_norm import adapter
from tests.jax_dora.ops.triton.test_strips import check_expand_and_compose, check_norm
from tests.jax_dora.programs import aval, for_cuda


def launch_norm(operands, rank, config=None):
    kernel, _, lora_b = operands
    call = (kernel.shape[0], rank, lora_b.shape[1], kernel.dtype, lora_b.dtype)
    config = config or triton_norm.config(90, *call)
    assert isinstance(config, stationary.Config)
    return triton_norm.launch(*operands, jnp.float32(0.7), config=config, capability=90)


@pytest.mark.parametrize("sizes", [(136, 200, 136), (24, 8, 384), (328, 136, 264)])
def test_the_norm_agrees_with_the_oracle(sizes):
    check_norm(adapter(0, *sizes, jnp.bfloat16, jnp.bfloat16), stationary.Config)


def test_a_row_of_nan_stays_one():
    kernel, *rest = adapter(0, 136, 24, 136, jnp.bfloat16, jnp.bfloat16)
    found = launch_norm((kernel.at[130, 3].set(jnp.nan), *rest), 136)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(150, 136, 72), (3, 384, 200)])
def test_expand_and_compose_agree_with_fp64(sizes, with_bias):
    options = {"with_bias": with_bias, "want_inner": with_bias}
    check_expand_and_compose(sizes, stationary.Config, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [136, 384])
def test_agrees_at_full_size(rank):
    operands = adapter(0, 4096, 2056, rank, jnp.bfloat16, jnp.bfloat16)
    found = factored_norm(*operands, 0.7, implementation="triton")
    exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
    assert np.all(abs(fp64(found) - exact) <= tolerances.norm(*oracle.from_flax(*operands), 0.7))


@pytest.mark.parametrize(("rank", "out"), [(128, 2048), (392, 2048), (200, 2044)])
def test_other_calls_have_other_kernels(rank, out):
    config = triton_expand_compose.config(90, 64, rank, out, jnp.bfloat16)
    assert not isinstance(config, stationary.Config)
    config = triton_norm.config(90, 2048, rank, out, jnp.bfloat16, jnp.bfloat16)
    assert not isinstance(config, stationary.Config)
    assert rank > 128 or isinstance(config, strips.Config)


def test_descriptors_have_memory(monkeypatch):
    """A program's result beside the others, and as much as the compiled kernel needs."""
    code = compilation.Compiled("kernel", "", b"", 128, 0, stationary.SCRATCH + 1)
    monkeypatch.setattr(kernel_call, "interpreted", lambda: False)
    monkeypatch.setattr(compilation, "compiled", lambda *call: code)
    operands = aval(1024, 1024), aval(1024, 384), aval(384, 1024), aval(dtype=jnp.float32)
    config = triton_norm.config(90, 1024, 384, 1024, jnp.bfloat16, jnp.bfloat16)

    launch: Any = triton_norm.launch

    def run(*operands):
        return launch.__wrapped__(*operands, config=config, capability=90)

    with pytest.raises(ValueError, match=f"has scratch = {stationary.SCRATCH}; raise it"):
        for_cuda(run, *operands)
    code = compilation.Compiled("kernel", "", b"", 128, 0, stationary.SCRATCH)
    programs, *_ = config.walk(1024, 1024, 90)
    assert f"tensor<{programs * stationary.SCRATCH}xi8>" in for_cuda(run, *operands)
