import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_dora.ops import Dropout, dora_linear, draw_seed, factored_norm
from parity import oracle, tolerances
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.programs import aval, equations, for_cuda
from tests.tables import slow, thinned

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
HALF_OR_FULL = [jnp.float32, jnp.bfloat16]
SIZES = ((3, 5), 33, 24, 4)
SCALE = 0.7


def layer(seed, rows, n_in, n_out, rank, dtype, adapter_dtype=jnp.float32):
    """Returns the operands and a cotangent of a layer with values like those of a trained one."""
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(n_in, n_out)) / n_in**0.5
    lora_a = rng.normal(size=(n_in, rank)) / n_in**0.5
    lora_b = rng.normal(size=(rank, n_out)) / rank**0.5
    norm = np.linalg.norm(kernel + SCALE * lora_a @ lora_b, axis=0)
    magnitude = norm * (1 + 0.1 * rng.normal(size=n_out))
    x, dy = rng.normal(size=(*rows, n_in)), rng.normal(size=(*rows, n_out))
    arrays = {
        "x": jnp.asarray(x, dtype),
        "kernel": jnp.asarray(kernel, dtype),
        "lora_a": jnp.asarray(lora_a, adapter_dtype),
        "lora_b": jnp.asarray(lora_b, adapter_dtype),
        "magnitude": jnp.asarray(magnitude, adapter_dtype),
        "bias": jnp.asarray(rng.normal(size=n_out), dtype),
    }
    return arrays, jnp.asarray(dy, dtype)


def check(arrays, dy, *implementations):
    """Compares result and gradients with the oracle, within the derived bounds."""
    trained = {k: v for k, v in arrays.items() if k != "kernel"}
    dtype = arrays["kernel"].dtype
    weight, lora_a, lora_b = oracle.from_flax(arrays["kernel"], arrays["lora_a"], arrays["lora_b"])
    arguments = (arrays["x"], weight, lora_a, lora_b, arrays["magnitude"], SCALE)
    exact = oracle.dora_linear(*arguments, bias=arrays["bias"], dtype=dtype)
    exact_ct = oracle.dora_linear_grads(dy, *arguments, dtype=dtype)
    bound = tolerances.dora_linear(dy, *arguments, dtype, bias=arrays["bias"])

    def run(implementation):
        def call(trained, kernel):
            a = trained | {"kernel": kernel}
            order = (a[k] for k in ("x", "kernel", "lora_a", "lora_b", "magnitude"))
            return dora_linear(*order, SCALE, bias=a["bias"], implementation=implementation)

        @jax.jit
        def both(trained, kernel, dy):
            y, pull = jax.vjp(lambda trained: call(trained, kernel), trained)
            return y, pull(dy)[0]

        with jax.default_matmul_precision("highest"):
            return both(trained, arrays["kernel"], dy)

    for implementation in implementations or [None]:
        y, ct = run(implementation)
        assert y.dtype == dtype
        assert all(ct[name].dtype == trained[name].dtype for name in trained)
        pairs = [(y, exact, bound.y)]
        for name in trained:
            got = ct[name].T if name in ("lora_a", "lora_b") else ct[name]
            want = getattr(exact_ct, f"d_{name}")
            tolerance = getattr(bound, f"d_{name}")
            stored = tolerances.rounding(want, trained[name].dtype).reshape(tolerance.shape)
            pairs.append((got, want, tolerance + stored))
        for got, want, tolerance in pairs:
            tolerance = slack(implementation, got.dtype) * tolerance
            got = np.asarray(got, np.float64).reshape(tolerance.shape)
            assert np.all(np.abs(got - want.reshape(tolerance.shape)) <= tolerance)


@pytest.mark.parametrize(
    ("sizes", "dtype", "adapter_dtype"),
    [
        *thinned(
            itertools.product([SIZES], DTYPES, HALF_OR_FULL),
            [(SIZES, jnp.bfloat16, jnp.float32), (SIZES, jnp.float16, jnp.bfloat16)],
        ),
        (((17,), 64, 130, 8), jnp.float32, jnp.float32),
        (((), 8, 3, 1), jnp.bfloat16, jnp.float32),
    ],
)
def test_agrees_with_the_oracle(sizes, dtype, adapter_dtype):
    check(*layer(0, *sizes, dtype, adapter_dtype))


# out = 136 selects the kernel of expand and compose, out = 320 that of the whole projection.
@pytest.mark.parametrize(
    ("n_in", "n_out", "dtype"),
    [
        slow(64, 136, jnp.bfloat16),
        slow(64, 136, jnp.float16),
        slow(64, 136, jnp.float32),
        (256, 320, jnp.bfloat16),
    ],
)
@pytest.mark.ci
def test_mosaic_agrees_with_the_oracle(on_mosaic, dtype, n_in, n_out):
    arrays, dy = layer(1, (2, 9), n_in, n_out, 16, dtype)
    with on_mosaic():
        check(arrays, dy, "mosaic")


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("dtype", thinned(DTYPES, [jnp.bfloat16]))
def test_triton_agrees_with_the_oracle(dtype):
    arrays, dy = layer(1, (2, 9), 60, 133, 13, dtype)
    check(arrays, dy, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", None, "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree_at_full_size(dtype, implementation):
    arrays, dy = layer(2, (1025,), 2048, 2048, 384, dtype)
    check(arrays, dy, implementation)


def matrices(function, operands, shape):
    """Returns the number of matrix products with a result of `shape` or its transpose."""
    return sum(
        getattr(v.aval, "shape", None) in (shape, shape[::-1])
        for eqn in equations(function, *operands)
        for v in eqn.outvars
        if eqn.primitive.name == "dot_general"
    )


def test_no_dense_product_and_no_dense_weight_gradient():
    arrays, dy = layer(3, (7,), 48, 40, 4, jnp.bfloat16)

    def loss(t):
        a = arrays | t
        operands = (a[k] for k in ("x", "kernel", "lora_a", "lora_b", "magnitude"))
        # Without "xla" each operator would be a single equation, which hides its products.
        y = dora_linear(*operands, SCALE, implementation="xla")
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

    def matrices_of_gradients(wanted):
        return matrices(jax.grad(loss), [{k: arrays[k] for k in wanted}], (48, 40))

    assert matrices_of_gradients(["x", "lora_a", "lora_b", "magnitude"]) == 0
    assert matrices_of_gradients(["kernel"]) == 1


def test_the_kernel_gradient_is_right_if_wanted():
    arrays, dy = layer(4, (7,), 24, 16, 4, jnp.float32)
    order = ("x", "kernel", "lora_a", "lora_b", "magnitude")
    with jax.default_matmul_precision("highest"):
        _, vjp = jax.vjp(
            lambda k: dora_linear(*(k if n == "kernel" else arrays[n] for n in order), SCALE),
            arrays["kernel"],
        )
        (d_kernel,) = vjp(dy)
    weight, lora_a, lora_b = oracle.from_flax(*(arrays[n] for n in order[1:4]))
    exact = oracle.dora_linear_grads(
        dy, arrays["x"], weight, lora_a, lora_b, arrays["magnitude"], SCALE
    )
    np.testing.assert_allclose(d_kernel.T, exact.d_weight, rtol=1e-4, atol=1e-5)


def test_a_given_norm_changes_no_bit():
    arrays, dy = layer(5, (7,), 96, 40, 4, jnp.bfloat16)
    kernel, lora_a, lora_b = (arrays[k] for k in ("kernel", "lora_a", "lora_b"))
    norm = jax.jit(lambda *a: factored_norm(*a, SCALE))(kernel, lora_a, lora_b)

    @jax.jit
    def run(arrays, dy, norm=None):
        def call(trained):
            return dora_linear(arrays["x"], kernel, *trained, SCALE, norm=norm)

        trained = tuple(arrays[k] for k in ("lora_a", "lora_b", "magnitude"))
        y, vjp = jax.vjp(call, trained)
        return y, vjp(dy)

    jax.tree.map(np.testing.assert_array_equal, run(arrays, dy, norm), run(arrays, dy))


def test_remat_saves_the_norm_with_and_without_a_policy():
    arrays, _ = layer(6, (7,), 48, 40, 4, jnp.float32)
    order = ("x", "kernel", "lora_a", "lora_b", "magnitude")

    def loss(lora_a):
        operands = (lora_a if n == "lora_a" else arrays[n] for n in order)
        return dora_linear(*operands, SCALE, implementation="xla").sum()

    def square_roots(policy):
        remat = jax.checkpoint(loss, policy=policy)
        return str(jax.make_jaxpr(jax.grad(remat))(arrays["lora_a"])).count("= sqrt")

    saved = jax.checkpoint_policies.save_only_these_names("dora_norm")
    assert (square_roots(None), square_roots(saved)) == (1, 1)
    plain = jax.grad(loss)(arrays["lora_a"])
    remat = jax.grad(jax.checkpoint(loss, policy=saved))(arrays["lora_a"])
    np.testing.assert_allclose(remat, plain, rtol=1e-6)


@pytest.mark.parametrize("dropout", [None, Dropout(draw_seed(jax.random.key(0)), 0.5)])
def test_remat_can_keep_what_only_the_magnitude_reads(dropout):
    arrays, dy = layer(6, (7,), 48, 40, 4, jnp.float32)
    order = ("x", "kernel", "lora_a", "lora_b", "magnitude")
    keeps = jax.checkpoint_policies.save_only_these_names("dora_inner", "dora_norm")

    def gradient(keep):
        def block(*operands):
            options = {"keep_inner": keep, "dropout": dropout, "implementation": "xla"}
            return dora_linear(*operands, SCALE, **options)

        remat = jax.checkpoint(block, policy=keeps)
        return jax.grad(lambda *operands: jnp.sum(dy * remat(*operands)), argnums=(0, 2, 3, 4))

    def products(keep):
        return str(jax.make_jaxpr(gradient(keep))(*map(arrays.get, order))).count("dot_general")

    # The products x kernel and z lora_b are not computed again.
    assert products(False) == products(True) + 2
    kept, plain = (jax.jit(gradient(keep))(*map(arrays.get, order)) for keep in (True, False))
    # Recomputed values are fused, and so rounded, differently.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), kept, plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_a_magnitude_of_zero(dtype):
    """The gradient is Σ dy∘inner / norm at any magnitude, although only y = g∘inner is kept."""
    arrays, dy = layer(9, (7,), 48, 40, 4, dtype)
    order = ("x", "kernel", "lora_a", "lora_b")
    magnitude = arrays["magnitude"].at[jnp.array([3, 5, 8])].set(jnp.array([0.0, -1e-30, -0.0]))

    def loss(magnitude):
        y = dora_linear(*(arrays[name] for name in order), magnitude, SCALE)
        return jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32)), y

    found, y = jax.grad(loss, has_aux=True)(magnitude)
    x, kernel, lora_a, lora_b = (np.float64(arrays[name]) for name in order)
    adapted = kernel + SCALE * lora_a @ lora_b
    exact = np.einsum("to,to->o", np.float64(dy), x @ adapted) / np.linalg.norm(adapted, axis=0)
    scale = np.abs(np.float64(dy)).T @ np.abs(x @ adapted)
    error = np.abs(found - exact) / (scale.diagonal() / np.linalg.norm(adapted, axis=0))
    # One rounding each of x, of the product with A, and of y.
    assert error.max() <= 3 * float(jnp.finfo(dtype).eps)
    assert np.abs(np.float64(y)[:, [3, 5, 8]]).max() < 1e-9


def test_vmap_over_adapters_and_scan_over_layers():
    arrays, _ = layer(7, (5,), 16, 16, 4, jnp.float32)
    a = jnp.stack([arrays["lora_a"], 2 * arrays["lora_a"]])
    x, kernel, lora_b, magnitude = (arrays[k] for k in ("x", "kernel", "lora_b", "magnitude"))

    def one(x, lora_a):
        return dora_linear(x, kernel, lora_a, lora_b, magnitude, SCALE)

    each = [one(x, lora_a) for lora_a in a]
    np.testing.assert_allclose(jax.jit(jax.vmap(one, (None, 0)))(x, a), each, rtol=1e-5, atol=1e-6)
    scanned, _ = jax.lax.scan(lambda x, lora_a: (one(x, lora_a), None), x, a)
    np.testing.assert_allclose(scanned, one(each[0], a[1]), rtol=1e-5, atol=1e-6)


def test_fp64_gradients_agree_with_finite_differences():
    with jax.enable_x64(True):
        arrays, _ = layer(8, (3,), 6, 5, 2, jnp.float64, jnp.float64)
        order = ("x", "lora_a", "lora_b", "magnitude", "bias")
        # The norm is a constant for the gradient, so it must be for finite differences too.
        norm = factored_norm(arrays["kernel"], arrays["lora_a"], arrays["lora_b"], SCALE)

        def call(x, lora_a, lora_b, magnitude, bias):
            return dora_linear(
                x, arrays["kernel"], lora_a, lora_b, magnitude, SCALE, bias=bias, norm=norm
            )

        check_grads(call, [arrays[n] for n in order], 1, modes=["rev"])


X, KERNEL, A, B, M = (np.zeros(s, np.float32) for s in ((3, 24), (24, 16), (24, 4), (4, 16), (16,)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X[:, :5], KERNEL, A, B, M, 1.0), {}, ValueError, r"x has shape \(3, 5\)"),
        ((X, KERNEL, A, B, M[:3], 1.0), {}, ValueError, r"magnitude has shape \(3,\)"),
        ((X, KERNEL, A, B, M, 1.0), {"bias": M[:3]}, ValueError, r"bias has shape \(3,\)"),
        ((X, KERNEL, A, B, M, 1.0), {"norm": M[:3]}, ValueError, r"norm has shape \(3,\)"),
        ((X, KERNEL, A, B, M, 1.0), {"implementation": "fast"}, ValueError, "is 'fast'"),
        ((X.astype(int), KERNEL, A, B, M, 1.0), {}, TypeError, "x has dtype int"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        dora_linear(*arguments, **options)


@pytest.mark.parametrize("rank", thinned([16, 384], [16]))
def test_layers_of_one_shape_share_what_is_lowered(rank):
    """Otherwise lowering a model without a scan over its layers takes minutes."""

    def kernels(depth):
        def loss(adapters, x, kernel):
            for a, b, magnitude in adapters:
                x = dora_linear(x, kernel, a, b, magnitude, SCALE, implementation="mosaic")
            return jnp.sum(x.astype(jnp.float32))

        adapter = aval(4096, rank), aval(rank, 4096), aval(4096, dtype=jnp.float32)
        text = for_cuda(jax.grad(loss), [adapter] * depth, aval(1024, 4096), aval(4096, 4096))
        return text.count("custom_call @mosaic_gpu")

    assert 0 < kernels(2) == kernels(5)
