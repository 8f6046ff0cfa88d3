import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.ops.mosaic.norm import one_pass_norm
from jax_dora.ops.mosaic.norm.one_pass_norm import pieces, refuses
from parity import oracle, tolerances
from parity.oracle import fp64
from tests.jax_dora.drawn import normals
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import ci, slow, thinned

SCALE = 0.7


def adapter(seed, n_in, rank, out, dtype, adapter_dtype):
    normal = normals(seed)
    kernel = normal(n_in, out, deviation=n_in**-0.5).astype(dtype)
    lora_a = normal(n_in, rank, deviation=n_in**-0.5).astype(adapter_dtype)
    return kernel, lora_a, normal(rank, out, deviation=rank**-0.5).astype(adapter_dtype)


def run(arrays, config=None, *, sm_count=2):
    kernel, lora_a, _ = arrays
    call = (kernel.shape[0], lora_a.shape[1], kernel.shape[1], kernel.dtype, lora_a.dtype)
    config = config or one_pass_norm.config(*call)
    squared = one_pass_norm.launch(*arrays, jnp.float32(SCALE), sm_count=sm_count, config=config)
    return jax.block_until_ready(jnp.sqrt(squared))


def check(arrays, found):
    flipped = oracle.from_flax(*arrays)
    exact = oracle.norm(*flipped, SCALE)
    bound = tolerances.norm(*flipped, SCALE) + cut_off(*arrays)
    assert found.dtype == jnp.float32
    assert np.all(abs(fp64(found) - exact) <= bound)


def cut_off(kernel, lora_a, lora_b):
    """Returns the error bound of splitting fp32 adapters into bf16 pieces (see the kernel)."""
    count = pieces(kernel.dtype, lora_a.dtype)
    if count == 1:
        return 0.0
    products = abs(fp64(lora_a)) @ abs(fp64(lora_b))
    return (count + 1) * 2.0 ** (-8 * count) * SCALE * (products**2).sum(0) ** 0.5


@pytest.mark.parametrize(
    ("n_in", "rank", "out", "dtype", "adapter_dtype"),
    [
        (200, 96, 136, jnp.bfloat16, jnp.bfloat16),
        slow(40, 4, 24, jnp.float16, jnp.float16),
        # A test below covers fp32 adapters.
        slow(136, 24, 72, jnp.bfloat16, jnp.float32),
        ci(72, 72, 40, jnp.float32, jnp.float32),
    ],
)
def test_agrees_with_the_materialised_norm(on_mosaic, n_in, rank, out, dtype, adapter_dtype):
    arrays = adapter(0, n_in, rank, out, dtype, adapter_dtype)
    with on_mosaic():
        found = run(arrays)
    check(arrays, found)


@pytest.mark.ci
def test_every_kind_of_config_agrees(on_mosaic, low_rank_config):
    arrays = adapter(1, 264, 128, 200, jnp.bfloat16, jnp.bfloat16)
    with on_mosaic():
        found = run(arrays, low_rank_config)
    check(arrays, found)


@pytest.mark.parametrize(("dtype", "nearer"), [(jnp.bfloat16, 100), slow(jnp.float32, 4_000)])
@pytest.mark.ci
def test_fp32_adapters_are_not_rounded_to_bf16(on_mosaic, dtype, nearer):
    kernel, lora_a, lora_b = adapter(2, 64, 16, 64, dtype, jnp.float32)
    exact = oracle.norm(*oracle.from_flax(kernel, lora_a, lora_b), SCALE)
    with on_mosaic():
        found = run((kernel, lora_a, lora_b), sm_count=1)
    rounded = oracle.norm(
        *oracle.from_flax(kernel, *(x.astype(jnp.bfloat16) for x in (lora_a, lora_b))), SCALE
    )
    error, lost = (np.max(abs(fp64(n) - exact)) for n in (found, rounded))
    assert error < lost / nearer


@pytest.mark.ci
def test_nothing_cancels_zero_is_zero_and_nan_stays(on_mosaic):
    with on_mosaic():
        check_special_features(run, 64)


def check_special_features(run, out):
    """Features where s·AB undoes the kernel, where both are zero, and where the kernel is NaN."""
    kernel, lora_a, lora_b = adapter(3, 128, 16, out, jnp.bfloat16, jnp.bfloat16)
    undone = (-SCALE * fp64(lora_a) @ fp64(lora_b)).astype(jnp.bfloat16)
    kernel = kernel.at[:, :8].set(undone[:, :8])
    kernel, lora_b = kernel.at[:, 8].set(0), lora_b.at[:, 8].set(0)
    kernel = kernel.at[5, 9].set(jnp.nan)
    found = np.asarray(run((kernel, lora_a, lora_b), sm_count=1))
    exact = oracle.norm(*oracle.from_flax(kernel, lora_a, lora_b), SCALE)
    # Only the kernel's rounding error remains, which fp32 resolves to 16 bits.
    np.testing.assert_allclose(found[:8], exact[:8], rtol=2**-14)
    assert np.all(found[:8] < 2**-7)
    assert found[8] == 0
    np.testing.assert_array_equal(np.isnan(found), np.arange(out) == 9)


@pytest.mark.parametrize(
    ("rank", "adapter_dtype"),
    thinned(
        # An fp32 adapter of rank 768 is not supported.
        [*itertools.product([8, 64, 384], [jnp.bfloat16, jnp.float32]), (768, jnp.bfloat16)],
        [(8, jnp.float32), (64, jnp.bfloat16), (384, jnp.float32), (768, jnp.bfloat16)],
    ),
)
@pytest.mark.ci
def test_lowers_for_hopper_at_full_size(rank, adapter_dtype):
    config = one_pass_norm.config(8192, rank, 8192, jnp.bfloat16, adapter_dtype)
    adapter = [aval(*shape, dtype=adapter_dtype) for shape in ((8192, rank), (rank, 8192))]
    operands = (aval(8192, 8192), *adapter, aval(dtype=jnp.float32))
    text = for_cuda(one_pass_norm.launch, *operands, config=config, sm_count=132)
    assert "dora_one_pass_norm" in text


def test_refuses_with_a_reason():
    bf16, f32 = jnp.bfloat16, jnp.float32
    assert refuses(8192, 100, 8200, bf16, f32) is None
    assert "float64" in refuses(64, 8, 64, jnp.float64, f32)
    assert "int8" in refuses(64, 8, 64, bf16, jnp.int8)
    assert "is 0" in refuses(64, 0, 64, bf16, bf16)
    assert "in = 60" in refuses(60, 8, 64, bf16, bf16)
    assert "out = 60" in refuses(64, 8, 60, bf16, bf16)
    assert "shared memory" in refuses(64, 4096, 64, bf16, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "adapter_dtype"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)],
)
@pytest.mark.parametrize(
    ("n_in", "rank", "out"), [(8192, 384, 8192), (4096, 64, 28672), (2048, 768, 1032)]
)
def test_agrees_at_full_size(n_in, rank, out, dtype, adapter_dtype):
    if refuses(n_in, rank, out, dtype, adapter_dtype):
        rank //= 2
    arrays = adapter(4, n_in, rank, out, dtype, adapter_dtype)
    check(arrays, run(arrays, sm_count=132))
