import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops import factored_norm, magnitude_scale
from jax_dora.ops.dispatch import choose
from parity import oracle, tolerances
from tests.tables import thinned

HALF_OR_FULL = [jnp.bfloat16, jnp.float16, jnp.float32]
# Of lora_a and lora_b.
UNLIKE = [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)]


def adapter(seed, n_in, n_out, rank, dtype=jnp.float32, adapter_dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    kernel = jnp.asarray(rng.normal(size=(n_in, n_out)) / n_in**0.5, dtype)
    lora_a = jnp.asarray(rng.normal(size=(n_in, rank)) / n_in**0.5, adapter_dtype)
    lora_b = jnp.asarray(rng.normal(size=(rank, n_out)) / rank**0.5, adapter_dtype)
    return kernel, lora_a, lora_b


def assert_near_oracle(norm, kernel, lora_a, lora_b, scale):
    exact = oracle.norm(*oracle.from_flax(kernel, lora_a, lora_b), scale)
    bound = tolerances.norm(*oracle.from_flax(kernel, lora_a, lora_b), scale)
    assert norm.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(norm, np.float64) - exact) <= bound)


@pytest.mark.parametrize(
    ("sizes", "dtype", "adapter_dtype"),
    thinned(
        itertools.product([(192, 56, 8), (33, 130, 5), (1, 1, 1)], HALF_OR_FULL, HALF_OR_FULL),
        [
            *(((33, 130, 5), dtype, jnp.float32) for dtype in HALF_OR_FULL),
            ((192, 56, 8), jnp.bfloat16, jnp.bfloat16),
            ((192, 56, 8), jnp.float32, jnp.bfloat16),
            ((1, 1, 1), jnp.float16, jnp.float16),
        ],
    ),
)
def test_agrees_with_the_materialised_norm(sizes, dtype, adapter_dtype):
    operands = adapter(0, *sizes, dtype, adapter_dtype)
    assert_near_oracle(factored_norm(*operands, 0.7), *operands, 0.7)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("sizes", "dtype", "adapter_dtype"),
    thinned(
        itertools.product([(192, 56, 8), (33, 130, 45)], HALF_OR_FULL[:2], HALF_OR_FULL),
        [((33, 130, 45), jnp.bfloat16, jnp.float32), ((33, 130, 45), jnp.float16, jnp.bfloat16)],
    ),
)
def test_triton_agrees_with_the_materialised_norm(sizes, dtype, adapter_dtype):
    operands = adapter(0, *sizes, dtype, adapter_dtype)
    norm = factored_norm(*operands, 0.7, implementation="triton")
    assert_near_oracle(norm, *operands, 0.7)


@pytest.mark.gpu
@pytest.mark.parametrize("adapter_dtype", HALF_OR_FULL)
@pytest.mark.parametrize("sizes", [(4096, 4096, 384), (1000, 3001, 16), (8192, 1024, 64)])
def test_triton_agrees_at_full_size(sizes, adapter_dtype):
    operands = adapter(0, *sizes, jnp.bfloat16, adapter_dtype)
    norm = factored_norm(*operands, 0.7, implementation="triton")
    assert_near_oracle(norm, *operands, 0.7)


@pytest.mark.ci
@settings(max_examples=8)
@given(
    n_in=st.integers(1, 70),
    n_out=st.integers(1, 70),
    rank=st.integers(1, 9),
    scale=st.floats(-3, 3, width=32),
    seed=st.integers(0, 9),
)
def test_agrees_at_any_shape_and_scale(n_in, n_out, rank, scale, seed):
    operands = adapter(seed, n_in, n_out, rank)
    assert_near_oracle(factored_norm(*operands, scale), *operands, scale)


@pytest.mark.parametrize(
    ("implementation", "dtypes"),
    thinned(
        itertools.product(choose.KERNELS, UNLIKE),
        [("mosaic", UNLIKE[0]), *itertools.product(["triton"], UNLIKE)],
    ),
)
@pytest.mark.ci
def test_kernels_do_not_round_the_wider_of_two_dtypes(dtypes, implementation):
    kernel, lora_a, lora_b = adapter(1, 136, 72, 8, jnp.bfloat16)
    operands = kernel, lora_a.astype(dtypes[0]), 1e5 * lora_b.astype(dtypes[1])
    with plgpu.force_gpu_interpret_mode():
        norm = factored_norm(*operands, 0.7, implementation=implementation)
    exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
    np.testing.assert_allclose(norm, exact, rtol=1e-4)


def test_fp32_adapters_on_a_bf16_kernel_are_not_rounded_to_bf16():
    kernel, lora_a, lora_b = adapter(1, 512, 64, 16, jnp.bfloat16)
    exact = oracle.norm(*oracle.from_flax(kernel, lora_a, lora_b), 1.5)

    def error(a, b):
        return np.max(np.abs(np.asarray(factored_norm(kernel, a, b, 1.5), np.float64) - exact))

    rounded = error(lora_a.astype(jnp.bfloat16), lora_b.astype(jnp.bfloat16))
    assert error(lora_a, lora_b) < rounded / 50


def test_the_product_cancelling_the_kernel_gives_a_small_finite_norm():
    _, lora_a, lora_b = adapter(2, 96, 40, 6)
    kernel = (-0.5 * np.asarray(lora_a, np.float64) @ np.asarray(lora_b)).astype(np.float32)
    kernel = jnp.asarray(kernel)
    norm = factored_norm(kernel, lora_a, lora_b, 0.5)
    assert_near_oracle(norm, kernel, lora_a, lora_b, 0.5)
    assert np.all(np.asarray(norm) < 1e-2)


@pytest.mark.parametrize("dtype", HALF_OR_FULL)
def test_zero_features_are_zero_and_give_a_finite_scale(dtype):
    kernel, lora_a, lora_b = adapter(3, 24, 16, 4, dtype)
    kernel, lora_b = kernel.at[:, 3].set(0), lora_b.at[:, 3].set(0)
    norm = factored_norm(kernel, lora_a, lora_b, 2.0)
    assert norm[3] == 0
    g = magnitude_scale(jnp.full(16, 0.5), norm, dtype)
    assert np.all(np.isfinite(g))
    assert g[3] == pytest.approx(0.5 / (1e-12 if dtype == jnp.float32 else 1e-6))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_stays_nan(which):
    operands = list(adapter(4, 24, 16, 4))
    operands[which] = operands[which].at[2, 3].set(jnp.nan)
    norm = factored_norm(*operands, 2.0)
    assert np.isnan(norm[3])
    assert np.isnan(magnitude_scale(jnp.ones(16), norm, jnp.bfloat16)[3])


def test_scale_zero_skips_the_adapter():
    kernel, lora_a, lora_b = adapter(5, 24, 16, 4)
    norm = jax.jit(lambda *operands: factored_norm(*operands, 0.0))
    assert "dot_general" not in norm.lower(kernel, lora_a, lora_b).as_text()
    norm = factored_norm(kernel, lora_a * jnp.inf, lora_b, 0.0)
    np.testing.assert_allclose(norm, jnp.linalg.norm(kernel, axis=0), rtol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_gradient_flows_through_the_norm(implementation):
    operands = adapter(8, 24, 16, 4)

    def norm(*arrays):
        return factored_norm(*arrays, 0.7, implementation=implementation)

    def total(operands):
        batch = jax.tree.map(lambda array: jnp.stack([array, 2 * array]), operands)
        return norm(*operands).sum() + jax.vmap(norm)(*batch).sum()

    gradients = jax.grad(total)(operands)
    assert all(np.all(np.asarray(gradient) == 0) for gradient in gradients)


def test_works_under_jit_vmap_scan_and_a_traced_scale():
    one, two = adapter(9, 24, 16, 4), adapter(10, 24, 16, 4)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), one, two)
    each = jnp.stack([factored_norm(*one, 0.7), factored_norm(*two, 0.7)])
    mapped = jax.jit(jax.vmap(lambda *o: factored_norm(*o, jnp.float32(0.7))))(*stacked)
    _, scanned = jax.lax.scan(lambda c, o: (c, factored_norm(*o, 0.7)), None, stacked)
    np.testing.assert_allclose(mapped, each, rtol=1e-6)
    np.testing.assert_allclose(scanned, each, rtol=1e-6)


def test_fp64_stays_fp64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(11)
        operands = [jnp.asarray(rng.normal(size=s)) for s in ((24, 16), (24, 4), (4, 16))]
        norm = factored_norm(*operands, 0.7)
        exact = oracle.norm(*oracle.from_flax(*operands), 0.7)
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, exact, rtol=1e-13)
        assert magnitude_scale(operands[0][0], norm, jnp.float64).dtype == jnp.float64


def test_an_fp64_kernel_takes_fp32_adapters():
    with jax.enable_x64(True):
        operands = adapter(12, 24, 16, 4, jnp.float64)
        norm = factored_norm(*operands, 0.7)
        assert norm.dtype == jnp.float64
        assert_near_oracle(norm.astype(jnp.float32), *operands, 0.7)


def test_magnitude_scale_is_differentiable_in_the_magnitude_alone():
    norm = jnp.asarray([2.0, 0.0, 4.0])
    d_m, d_norm = jax.grad(
        lambda m, n: magnitude_scale(m, n, jnp.bfloat16)[jnp.array([0, 2])].sum(), (0, 1)
    )(jnp.ones(3), norm)
    np.testing.assert_array_equal(d_m, [0.5, 0.0, 0.25])
    np.testing.assert_array_equal(d_norm, 0)


KERNEL, A, B = (np.zeros(s, np.float32) for s in ((24, 16), (24, 4), (4, 16)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((KERNEL, A.T, B, 1.0), {}, ValueError, r"lora_a has shape \(4, 24\)"),
        ((KERNEL, A, B.T, 1.0), {}, ValueError, r"lora_b has shape \(16, 4\)"),
        ((KERNEL[0], A, B, 1.0), {}, ValueError, r"kernel has shape \(16,\)"),
        ((KERNEL, A[:, :0], B[:0], 1.0), {}, ValueError, "rank is 0"),
        ((KERNEL.astype(np.int8), A, B, 1.0), {}, TypeError, "kernel has dtype int8"),
        (([[1.0]], A, B, 1.0), {}, TypeError, "kernel must be an array, got list"),
        ((KERNEL, A, B, float("nan")), {}, ValueError, "scale is nan"),
        ((KERNEL, A, B, "half"), {}, TypeError, "scale must be a number, got 'half'"),
        ((KERNEL, A, B, np.ones(2, np.float32)), {}, TypeError, "one real number"),
        ((KERNEL, A, B, 0), {"implementation": "mosaic"}, NotImplementedError, "Hopper"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        factored_norm(*arguments, **options)


def test_bad_magnitude():
    with pytest.raises(ValueError, match=r"norm has shape \(3,\)"):
        magnitude_scale(jnp.ones(4), jnp.ones(3), jnp.float32)
    with pytest.raises(TypeError, match="dtype is int32"):
        magnitude_scale(jnp.ones(4), jnp.ones(4), jnp.int32)
