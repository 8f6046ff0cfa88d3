import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dora.ops import compose, compose_delta
from jax_dora.ops.compose import define
from jax_dora.ops.mosaic.rows import compose_backward
from jax_dora.ops.mosaic.rows import compose_forward as mosaic_compose
from jax_dora.ops.mosaic.rows.elementwise import Config
from parity import oracle, tolerances
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.programs import aval, equations
from tests.tables import slow, thinned

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
OPS = {"compose": compose, "compose_delta": compose_delta}


def operands(seed, shape, dtype, spread=0.1):
    rng = np.random.default_rng(seed)
    base, lora, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(3))
    return base, lora, jnp.asarray(1 + spread * rng.normal(size=shape[-1]), jnp.float32), dy


def result_and_gradients(call, operands, dy):
    y, pull = jax.vjp(call, *operands)
    return y, pull(dy)


def check(op, base, lora, g, dy, scale, implementation=None):
    """Compares result and gradients of `op` with the oracle, within the derived bounds."""

    def call(base, lora, g):
        return OPS[op](base, lora, g, scale, implementation=implementation)

    y, ct = jax.jit(result_and_gradients, static_argnums=0)(call, (base, lora, g), dy)
    delta = op == "compose_delta"
    dtype = base.dtype
    exact = getattr(oracle, op)(base, lora, g, scale)
    bound = getattr(tolerances, op)(base, lora, g, scale, dtype)
    exact_ct = getattr(oracle, f"{op}_grads")(dy, base, lora, g, scale)
    bound_ct = tolerances.compose_grads(dy, base, lora, g, scale, dtype, delta=delta)
    assert (y.dtype, ct[0].dtype, ct[1].dtype, ct[2].dtype) == (dtype, dtype, dtype, jnp.float32)
    for got, want, tolerance in [
        (y, exact, bound),
        (ct[0], exact_ct.d_base, bound_ct.d_base),
        (ct[1], exact_ct.d_lora, bound_ct.d_lora),
        (ct[2], exact_ct.d_g, bound_ct.d_g),
    ]:
        error = np.abs(np.asarray(got, np.float64) - want)
        assert np.all(error <= slack(implementation, got.dtype) * tolerance)
    return y


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        *itertools.product(OPS, [(2, 3, 17)], DTYPES),
        *itertools.product(OPS, [(5,), (0, 8), (1, 1)], [jnp.bfloat16]),
    ],
)
def test_xla_agrees_with_the_oracle(op, shape, dtype):
    check(op, *operands(0, shape, dtype), 0.7, "xla")


@pytest.mark.ci
@settings(max_examples=6)
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 40),
    scale=st.floats(-4, 4, width=32),
    spread=st.sampled_from([0.0, 0.0015, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_agrees_at_any_shape_scale_and_spread(rows, out, scale, spread, dtype):
    check("compose", *operands(1, (rows, out), dtype, spread), scale)


@pytest.mark.parametrize(
    ("rows", "out", "op", "dtype"),
    [
        *thinned(itertools.product([37], [200], OPS, DTYPES), [(37, 200, "compose", DTYPES[0])]),
        slow(9, 1032, "compose", jnp.bfloat16),
        (9, 1032, "compose_delta", jnp.float32),
        slow(1, 8, "compose_delta", jnp.bfloat16),
    ],
)
@pytest.mark.ci
def test_mosaic_agrees_with_the_oracle(on_mosaic, op, rows, out, dtype):
    arrays = operands(2, (rows, out), dtype)
    with on_mosaic():
        check(op, *arrays, 0.7, "mosaic")


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("op", "dtype"),
    thinned(itertools.product(OPS, DTYPES), [("compose", DTYPES[0]), ("compose_delta", DTYPES[2])]),
)
def test_triton_agrees_with_the_oracle(op, dtype):
    check(op, *operands(2, (3, 13, 203), dtype), 0.7, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out"), [(4096, 4096), (2049, 8192), (517, 28672), (1024, 2880), (517, 8200)]
)
def test_kernels_agree_at_full_size(rows, out, dtype, implementation):
    check("compose", *operands(3, (rows, out), dtype, 0.0015), 0.7, implementation)


@pytest.mark.ci
def test_mosaic_adds_many_rows_without_drift(on_mosaic):
    """A plain sum of 0.1 drifts by half an ulp of the sum per row, always in one direction."""
    rows, out, g = 256, 8, jnp.ones(8)
    dy, inner = jnp.ones((rows, out)), jnp.full((rows, out), 0.1, jnp.float32)
    with on_mosaic():
        options = {"delta": False, "want_base": False, "want_lora": False}
        options |= {"config": Config(), "sm_count": 1}
        _, _, d_g = compose_backward.launch(dy, inner, g, jnp.float32(1), **options)
    np.testing.assert_allclose(
        np.asarray(d_g, np.float64), rows * float(np.float32(0.1)), rtol=3e-7
    )


@pytest.mark.ci
@pytest.mark.parametrize(("features", "out"), [(128, 136), (512, 1024)])
def test_mosaic_adds_the_rows_that_threads_compute_at_a_time(on_mosaic, features, out):
    rows = 37
    base, _, g, dy = operands(7, (rows, out), jnp.bfloat16)
    with on_mosaic():
        options = {"delta": False, "want_base": True, "want_lora": False, "sm_count": 4}
        options |= {"config": Config(2048, stages=2, features=features, most_sums=2)}
        d_base, _, d_g = compose_backward.launch(dy, base, g, jnp.float32(1), **options)
    np.testing.assert_array_equal(d_base, (g[None] * dy.astype(jnp.float32)).astype(jnp.bfloat16))
    want = (np.asarray(dy, np.float64) * np.asarray(base, np.float64)).sum(0)
    np.testing.assert_allclose(d_g, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out", [768, 1024, 2048, 3072, 4096, 12288])
@pytest.mark.parametrize("rows", [1024, 8192])
def test_partial_sums_are_few_enough_for_xla_to_add_them_where_it_reads_them(rows, out):
    """XLA adds 32 or more in a kernel of their own."""
    arrays = 2 * [aval(rows, out)]
    vectors = [aval(out, dtype=jnp.float32), aval(dtype=jnp.float32)]
    options = {"delta": False, "want_base": True, "want_lora": False, "sm_count": 132}
    options |= {"config": compose_backward.config(rows, out, jnp.bfloat16)}
    found = equations(
        lambda *operands: compose_backward.launch(*operands, **options), *arrays, *vectors
    )
    [sums] = [one for one in found if one.primitive.name == "reduce_sum"]
    assert 8 <= sums.invars[0].aval.shape[1] < 32


@pytest.mark.ci
def test_mosaic_keeps_leading_axes_and_adds_the_bias(on_mosaic):
    base, lora, g, bias = operands(5, (2, 3, 40), jnp.bfloat16)
    bias = bias[0, 0]
    with on_mosaic():
        options = {"delta": False, "want_inner": True, "config": Config(), "sm_count": 4}
        y, inner = mosaic_compose.launch(base, lora, g, jnp.float32(0.7), bias, **options)
    want, want_inner = define(base, lora, g, jnp.float32(0.7), bias, delta=False, want_inner=True)
    assert y.shape == base.shape
    # Before they round, the two may contract multiplications and additions differently.
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-9
    )
    np.testing.assert_allclose(
        np.asarray(inner, np.float32), np.asarray(want_inner, np.float32), rtol=2**-7, atol=2**-9
    )


@pytest.mark.ci
def test_mosaic_under_vmap(on_mosaic):
    base, lora, g, _ = operands(6, (3, 5, 16), jnp.float32)
    with on_mosaic():
        mapped = jax.vmap(lambda b, lo: compose(b, lo, g, 0.7, implementation="mosaic"))(base, lora)
    plain = compose(base, lora, g, 0.7, implementation="xla")
    np.testing.assert_allclose(mapped, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_stable_near_one(op):
    """ΔY is several times nearer to fp64 than the naive formula in bf16; y is no worse."""
    base, lora, g, dy = operands(7, (64, 256), jnp.bfloat16, spread=0.0015)
    lora = lora * jnp.bfloat16(1e-2)
    y = check(op, base, lora, g, dy, 0.7)
    low = g.astype(jnp.bfloat16)[None]
    naive = low * (jnp.bfloat16(0.7) * lora + base)
    if op == "compose_delta":
        naive = naive - base
    exact = getattr(oracle, op)(base, lora, g, 0.7)

    def peak(value):
        return np.max(np.abs(np.asarray(value, np.float64) - exact))

    factor = tolerances.caps.STABLE_OVER_NAIVE if op == "compose_delta" else 1
    assert factor * peak(y) <= peak(naive)


def test_a_frozen_magnitude_keeps_no_inner():
    base, lora, g, _ = operands(8, (4, 16), jnp.bfloat16)

    def kept(*wanted):
        def loss(*trained):
            b, lo, m = (
                t if w else f for t, w, f in zip(trained, wanted, (base, lora, g), strict=True)
            )
            return compose(b, lo, m, 0.7).astype(jnp.float32).sum()

        _, vjp = jax.vjp(jax.jit(loss), base, lora, g)
        return [leaf.shape for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "shape")]

    assert (4, 16) not in kept(True, True, False)
    assert (4, 16) in kept(True, True, True)


def test_transformations_agree_with_the_plain_call():
    base, lora, g, _ = operands(9, (6, 16), jnp.float32)

    def loss(lora, g):
        return jnp.sum(jnp.sin(compose(base, lora, g, 0.7)))

    want = jax.grad(loss, (0, 1))(lora, g)
    rows = jax.checkpoint(loss)
    for got in (jax.jit(jax.grad(loss, (0, 1)))(lora, g), jax.grad(rows, (0, 1))(lora, g)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def body(carry, row):
        return carry + jnp.sum(jnp.sin(compose(row[0], row[1], g, 0.7))), None

    scanned = jax.grad(lambda lora: jax.lax.scan(body, 0.0, (base, lora))[0])(lora)
    np.testing.assert_allclose(scanned, want[0], rtol=1e-5, atol=1e-6)


def test_fp64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(10)
        base, lora, dy = (jnp.asarray(rng.normal(size=(5, 7))) for _ in range(3))
        g = jnp.asarray(1 + rng.normal(size=7))
        y, vjp = jax.vjp(lambda *a: compose(*a, 0.7), base, lora, g)
        np.testing.assert_allclose(y, oracle.compose(base, lora, g, 0.7), rtol=1e-13)
        want = oracle.compose_grads(dy, base, lora, g, 0.7)
        for got, exact in zip(vjp(dy), (want.d_base, want.d_lora, want.d_g), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-13)


def test_the_scale_has_no_gradient():
    base, lora, g, _ = operands(11, (4, 16), jnp.float32)
    with pytest.raises(TypeError, match="scale is being differentiated"):
        jax.grad(lambda s: compose(base, lora, g, s).sum())(0.7)


X = np.zeros((4, 16), np.float32)
G = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("arguments", "implementation", "error", "message"),
    [
        ((X, X[:3], G, 1.0), None, ValueError, r"lora has shape \(3, 16\)"),
        ((X, X, G[:3], 1.0), None, ValueError, r"g has shape \(3,\)"),
        ((X[0, 0], X[0, 0], G, 1.0), None, ValueError, r"base has shape \(\)"),
        ((X.astype(np.int32), X, G, 1.0), None, TypeError, "base has dtype int32"),
        ((X, X, G, float("inf")), None, ValueError, "scale is inf"),
        ((X, X, G, 1.0), "cuda", ValueError, "implementation is 'cuda'"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_bad_input(op, arguments, implementation, error, message):
    with pytest.raises(error, match=message):
        OPS[op](*arguments, implementation=implementation)
