import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dora.ops import swiglu
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import divisible
from jax_dora.ops.mosaic.rows import swiglu_codes
from jax_dora.ops.mosaic.rows.swiglu_backward import config, launch
from jax_dora.ops.operands import Gating, GatingSettings
from jax_dora.ops.row_scaled import RowScaled
from jax_dora.ops.swiglu import SWIGLU_BACKWARD, SWIGLU_CODES, swiglu_of_results
from parity import oracle, tolerances
from tests.jax_dora.ops.interpreter import slack
from tests.jax_dora.ops.mosaic.rows.test_row_codes import check as check_codes
from tests.jax_dora.programs import aval, for_cuda
from tests.tables import slow, thinned

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
BIASES = ("gate_bias", "up_bias")


def operands(seed, shape, dtype, biased=False, spread=1.0):
    """Returns dh and the arguments of `swiglu`, with values like those of trained layers."""
    rng = np.random.default_rng(seed)
    dh, gate, up = (jnp.asarray(spread * rng.normal(size=shape), dtype) for _ in range(3))
    gs = [jnp.asarray(1 + 0.1 * rng.normal(size=shape[-1]), jnp.float32) for _ in range(2)]
    biases = [jnp.asarray(rng.normal(size=shape[-1]), dtype) for _ in range(2)]
    return dh, (gate, up, *gs, *(biases if biased else ()))


def knobs(like):
    return {"config": config(*like.shape, like.dtype), "sm_count": 1}


def check(dh, values, implementation=None, train_biases=True, *, with_codes=False):
    """Compares result and gradients with the oracle, within the derived bounds, and codes with
    NumPy's of the result itself."""
    names = ("gate", "up", "gate_g", "up_g", *BIASES)[: len(values)]
    count = len(values) if train_biases else 4

    def call(*moving):
        gate, up, gate_g, up_g, *biases = (*moving, *values[count:])
        given = dict(zip(BIASES, biases, strict=False))
        options = {"implementation": implementation, "with_codes": with_codes}
        return swiglu(gate, up, gate_g, up_g, **options, **given)

    @jax.jit
    def both(dh, *values):
        h, pull = jax.vjp(call, *values)
        if with_codes:
            ones = map(jnp.ones_like, h[1:4])
            return h, pull(RowScaled(dh, *ones))
        return h, pull(dh)

    h, found = both(dh, *values[:count])
    if with_codes:
        check_codes(h.x, *map(np.asarray, h[1:3]))
        h = h.x
    dtype = values[0].dtype
    bounds = tolerances.swiglu(
        *(dh, *values[:4], dtype), **dict(zip(BIASES, values[4:], strict=False))
    )
    exact = oracle.swiglu_grads(dh, *values)
    assert [h.dtype, *(one.dtype for one in found)] == [dtype, *(v.dtype for v in values[:count])]
    pairs = [("h", h, oracle.swiglu(*values))]
    pairs += [(f"d_{n}", got, want) for n, got, want in zip(names, found, exact, strict=False)]
    for name, got, want in pairs:
        bound = getattr(bounds, name)
        if name.endswith("bias"):
            bound = bound + tolerances.rounding(want, dtype)
        bound = slack(implementation, got.dtype) * bound
        excess = np.abs(np.asarray(got, np.float64) - want) - bound
        assert np.all(excess <= 0), f"{name} exceeds its bound by {np.max(excess)}"


@pytest.mark.parametrize(
    ("shape", "dtype", "biased"),
    [
        *itertools.product([(2, 3, 17)], DTYPES, [False, True]),
        *itertools.product([(5,), (0, 8), (1, 1)], [jnp.bfloat16], [True]),
    ],
)
def test_xla_agrees_with_the_oracle(shape, dtype, biased):
    check(*operands(0, shape, dtype, biased), "xla")


@pytest.mark.ci
@settings(max_examples=6)
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 40),
    spread=st.sampled_from([0.01, 1.0, 12.0, 60.0]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
)
def test_agrees_at_any_shape_and_spread(rows, out, spread, dtype, biased):
    check(*operands(1, (rows, out), dtype, biased, spread))


@pytest.mark.parametrize(
    ("rows", "out", "spread", "dtype", "biased", "train_biases"),
    [
        (37, 200, 1.0, jnp.bfloat16, True, True),
        (9, 1032, 12.0, jnp.float16, False, False),
        slow(1, 8, 1.0, jnp.bfloat16, True, False),
        slow(37, 200, 1.0, jnp.bfloat16, False, False),
        slow(37, 200, 1.0, jnp.float16, True, False),
        slow(37, 200, 1.0, jnp.float16, True, True),
        slow(9, 1032, 12.0, jnp.bfloat16, True, False),
        slow(1, 8, 1.0, jnp.bfloat16, True, True),
        slow(6, 40, 0.01, jnp.float16, True, True),
    ],
)
@pytest.mark.ci
def test_mosaic_agrees_with_the_oracle(on_mosaic, rows, out, spread, dtype, biased, train_biases):
    dh, values = operands(2, (rows, out), dtype, biased, spread)
    with on_mosaic():
        check(dh, values, "mosaic", train_biases=train_biases)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("dtype", "biased", "train_biases"),
    thinned(
        itertools.product(DTYPES, [True, False], [True, False]),
        [(jnp.bfloat16, True, True), (jnp.float32, False, False)],
    ),
)
def test_triton_agrees_with_the_oracle(dtype, biased, train_biases):
    check(*operands(2, (3, 13, 203), dtype, biased, 12.0), "triton", train_biases=train_biases)


@pytest.mark.parametrize(
    ("shape", "dtype", "biased", "implementation"),
    [
        ((2, 3, 17), jnp.bfloat16, True, None),
        ((7, 40), jnp.float32, False, "eager"),
        slow((0, 128), jnp.bfloat16, False, "xla"),
    ],
)
def test_with_codes(shape, dtype, biased, implementation):
    check(*operands(0, shape, dtype, biased), implementation, with_codes=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "biased"),
    [
        ((2, 3, 384), jnp.bfloat16, True),
        slow((7, 3584), jnp.float16, False),
        slow((1, 128), jnp.bfloat16, False),
    ],
)
@pytest.mark.ci
def test_with_codes_by_mosaic(on_mosaic, shape, dtype, biased):
    with on_mosaic():
        check(*operands(2, shape, dtype, biased), "mosaic", with_codes=True)


def test_codes_of_rows_in_several_steps(on_mosaic):
    """The thread blocks have no row left in the last step, and one layer only has a bias."""
    _, (gate, up, *vectors) = operands(2, (5, 1024), jnp.bfloat16, biased=True)
    vectors[3] = None
    with on_mosaic():
        config = swiglu_codes.Config(blocks_per_sm=2)
        h, *codes = map(
            np.asarray, swiglu_codes.launch(gate, up, *vectors, config=config, sm_count=1)
        )
    check_codes(jnp.asarray(h), *codes)
    vectors[3] = jnp.zeros_like(vectors[2])
    exact = oracle.swiglu(gate, up, *vectors)
    bound = tolerances.swiglu(
        *(gate, gate, up, *vectors[:2], jnp.bfloat16), **dict(zip(BIASES, vectors[2:], strict=True))
    )
    assert np.all(np.abs(h.astype(np.float64) - exact) <= bound.h)


def test_zeros_and_nan_with_codes(on_mosaic):
    _, (gate, up, *vectors) = operands(2, (3, 256), jnp.bfloat16)
    gate = gate.at[0].set(0).at[1, 3].set(jnp.nan)
    with on_mosaic():
        h = swiglu(gate, up, *vectors, implementation="mosaic", with_codes=True)
    h, codes, scales = (np.asarray(one, np.float32) for one in h[:3])
    assert not codes[0].any()
    assert np.isnan(codes[1]).all()
    assert np.isnan(scales[1])
    check_codes(jnp.asarray(h[2:]), codes[2:], scales[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("rows", "out"), [(1031, 14336), (517, 16384), (2049, 384), (333, 28672)])
def test_with_codes_at_full_size(rows, out, dtype, implementation):
    check(*operands(3, (rows, out), dtype, biased=rows == 517), implementation, with_codes=True)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("rows", "out"), [(4096, 12288), (2049, 8192), (517, 8200)])
def test_kernels_agree_at_full_size(rows, out, dtype, implementation):
    check(*operands(3, (rows, out), dtype), implementation)


@pytest.mark.parametrize("biased", [slow(False), True])
def test_lowers_for_cuda_without_a_gpu(biased):
    vector = aval(12288, dtype=jnp.float32)
    arrays = [aval(4096, 12288)] * 3 + [vector] * (4 if biased else 2)

    def forward_and_backward(dh, gate, up, *vectors):
        names = ("gate_g", "up_g", *BIASES)[: len(vectors)]

        def call(*operands):
            given = dict(zip(names, operands[2:], strict=True))
            return swiglu(*operands[:2], **given, implementation="mosaic")

        h, vjp = jax.vjp(call, gate, up, *vectors)
        return h, vjp(dh)

    text = for_cuda(forward_and_backward, *arrays)
    assert "dora_swiglu_backward" in text
    assert text.count("custom_call @mosaic_gpu") == 1
    options = {"implementation": "mosaic", "with_codes": True}
    gate, up, *vectors = arrays[1:]

    def forward(gate, up, *vectors):
        names = ("gate_g", "up_g", *BIASES)[: len(vectors)]
        return swiglu(gate, up, **dict(zip(names, vectors, strict=True)), **options)

    assert "dora_swiglu_codes" in for_cuda(forward, gate, up, *vectors)


@pytest.mark.parametrize("value", [200.0, slow(-200.0), slow(1e38), -1e38])
def test_mosaic_saturates_where_the_exponential_overflows(on_mosaic, value):
    shape = (4, 8)
    dh, up = jnp.full(shape, 2, jnp.bfloat16), jnp.full(shape, 3, jnp.bfloat16)
    gate, ones = jnp.full(shape, value, jnp.bfloat16), jnp.ones(8)
    with on_mosaic():
        d_gate, d_up, *_ = launch(dh, gate, up, ones, ones, **knobs(dh))
    np.testing.assert_array_equal(d_gate, 6.0 if value > 0 else 0.0)
    want = 2 * np.asarray(gate, np.float32) if value > 0 else np.zeros(shape)
    np.testing.assert_array_equal(d_up, np.asarray(want, jnp.bfloat16))


def test_keeps_nothing_but_its_operands():
    dh, values = operands(4, (16, 24), jnp.bfloat16)
    _, vjp = jax.vjp(jax.jit(swiglu), *values)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "shape", None) == dh.shape]
    assert len(kept) == 2


@pytest.mark.ci
def test_transformations_agree_with_the_plain_call(on_mosaic):
    dh, (gate, up, g1, g2) = operands(5, (3, 5, 16), jnp.bfloat16)

    def grads(dh, gate, up, implementation):
        _, vjp = jax.vjp(lambda *a: swiglu(*a, g1, g2, implementation=implementation), gate, up)
        return vjp(dh)

    want = grads(dh, gate, up, "xla")
    with on_mosaic():
        found = jax.vmap(lambda *a: grads(*a, "mosaic"))(dh, gate, up)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-8
        )


def test_fp64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(6)
        dh, gate, up = (jnp.asarray(rng.normal(size=(5, 7))) for _ in range(3))
        gs = [jnp.asarray(1 + rng.normal(size=7)) for _ in range(2)]
        h, vjp = jax.vjp(swiglu, gate, up, *gs)
        np.testing.assert_allclose(h, oracle.swiglu(gate, up, *gs), rtol=1e-12, atol=1e-13)
        exact = oracle.swiglu_grads(dh, gate, up, *gs)
        for got, want in zip(vjp(dh), exact, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_a_named_kernel_raises_for_unsupported_calls():
    wide = operands(7, (4, 16), jnp.float32)[1]
    with pytest.raises(NotImplementedError, match="dtype float32 is neither"):
        swiglu(*wide, implementation="mosaic")


X = np.zeros((4, 16), np.float32)
G = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X[:3], G, G), {}, ValueError, r"up has shape \(3, 16\); expected gate's, \(4, 16\)"),
        ((X, None, G, G), {}, TypeError, "up must be an array"),
        ((X, [1, 2], G, G), {}, TypeError, "up must be an array"),
        ((X, X, None, G), {}, TypeError, "gate_g must be an array"),
        ((X, X, G, None), {}, TypeError, "up_g must be an array"),
        ((X, X, G[:3], G), {}, ValueError, r"gate_g has shape \(3,\)"),
        ((X, X, G, G), {"up_bias": G[:2]}, ValueError, r"up_bias has shape \(2,\)"),
        ((X[0, 0], X[0, 0], G, G), {}, ValueError, r"gate has shape \(\)"),
        ((X, X.astype(np.float16), G, G), {}, TypeError, "up has dtype float16"),
        ((X.astype(np.int32), X, G, G), {}, TypeError, "gate has dtype int32"),
        ((X, X, G, G), {"implementation": "cuda"}, ValueError, "implementation is 'cuda'"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        swiglu(*arguments, **options)


def of_results(dh, gate, up, gate_g, up_g):
    """The result and the gradients of `swiglu_of_results`."""

    def call(*operands):
        return swiglu_of_results(*operands)

    h, pull = jax.vjp(call, gate, up, gate_g, up_g)
    return h, *pull(dh)


def test_of_results_that_are_multiplied_by_g_already():
    """The same gradients; a g of zero is a small one."""
    dh, (gate, up, gate_g, up_g) = operands(5, (9, 24), jnp.float32)
    gate_g = gate_g.at[3].set(0)
    h, pull = jax.vjp(swiglu, gate, up, gate_g, up_g)
    wanted = h, *pull(dh)
    small = divisible(gate_g)
    found = jax.jit(of_results)(dh, small[None] * gate, up_g[None] * up, gate_g, up_g)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_of_results_by_the_kernels(on_mosaic):
    dh, (gate, up, *gs) = operands(6, (5, 4096), jnp.bfloat16)
    wanted = of_results(dh, gate, up, *gs)
    settings = GatingSettings("mosaic", scaled=True, want_result=True)
    with on_mosaic():
        gradients = SWIGLU_BACKWARD.run(
            settings, Shard(), Gating(gate, up, gs[0], None, gs[1], None, dh)
        )
        codes = SWIGLU_CODES.run(settings, Shard(), Gating(gate, up, gs[0], None, gs[1], None))
    d_gate, d_up, of_gate, _, of_up, _, again = gradients
    np.testing.assert_array_equal(again, codes[0])
    check_codes(codes[0], *map(np.asarray, codes[1:]))
    found = codes[0], d_gate, d_up, of_gate / gs[0], of_up / gs[1]
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
def test_of_results_at_full_size():
    dh, (gate, up, *gs) = operands(7, (4096, 28672), jnp.bfloat16)
    found, wanted = [], []
    for implementation, results in (("mosaic", found), ("xla", wanted)):
        settings = GatingSettings(implementation, scaled=True, want_result=True)
        arrays = Gating(gate, up, gs[0], None, gs[1], None)
        backward = jax.jit(
            lambda dh, a, s=settings: SWIGLU_BACKWARD.run(s, Shard(), a._replace(dh=dh))
        )
        results += [one for one in backward(dh, arrays) if one is not None]
        h, codes, scales = jax.jit(lambda a, s=settings: SWIGLU_CODES.run(s, Shard(), a))(arrays)
        results += [h, codes.astype(jnp.float32) * scales[:, None]]
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        assert np.linalg.norm(one - other) <= 2.0**-7 * np.linalg.norm(other)
