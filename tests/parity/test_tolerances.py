"""Bounds hold for plain computations, and not for computations that are worse by a little."""

import ml_dtypes
import numpy as np
import pytest

from parity import oracle, tolerances

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(DTYPES[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_roundoff_is_half_the_spacing_at_one(dtype):
    assert tolerances.unit_roundoff(dtype) == float(ml_dtypes.finfo(DTYPES[dtype]).eps) / 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_reached_and_not_passed(dtype):
    values = np.random.default_rng(0).normal(size=10_000)
    used = np.abs(_stored(values, dtype) - values) / tolerances.rounding(values, dtype)
    assert 0.9 < used.max() <= 1


def _factored_norm(w, a, b, s, cross=1.0):
    """The paper's formula in fp32, to be bounded."""
    w, a, b = (v.astype(np.float32) for v in (w, a, b))
    u, gram = w @ a.T, a @ a.T
    square = (w * w).sum(1) + np.float32(2 * s * cross) * (b * u).sum(1)
    square += np.float32(s * s) * ((b @ gram) * b).sum(1)
    return np.sqrt(np.maximum(square, 0))


@pytest.mark.parametrize("left", [None, 0.5, 2**-5, 2**-10])
@pytest.mark.parametrize("n_in", [64, 2048])
def test_norm_bound_holds_for_the_factored_form(left, n_in):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(16, n_in)).astype(np.float32)
    b = rng.normal(size=(50, 16)).astype(np.float32)
    w = rng.normal(size=(50, n_in)).astype(np.float32)
    if left is not None:  # cancellation: only this much of W is left of W + sBA
        w = (-(1 - left) * 0.3 * (b @ a)).astype(np.float32)
    bound = tolerances.norm(w, a, b, 0.3)
    exact = oracle.norm(w, a, b, 0.3)
    assert (np.abs(_factored_norm(w, a, b, 0.3) - exact) <= bound).all()
    assert (np.abs(_factored_norm(w, a, b, 0.3, cross=0.99) - exact) > bound).any()


def test_norm_bound_of_a_zero_row_is_zero_but_for_underflow():
    bound = tolerances.norm(np.zeros((1, 8)), np.ones((2, 8)), np.zeros((1, 2)), 1.0)
    assert bound < 1e-37


@pytest.mark.parametrize("dtype", DTYPES)
def test_compose_bounds(dtype):
    rng = np.random.default_rng(2)
    base, lora, dy = (_stored(rng.normal(size=(200, 64)), dtype) for _ in range(3))
    g = (1 + 0.0015 * rng.uniform(-1, 1, size=64)).astype(np.float32)
    s = np.float32(0.7)

    delta = (g - 1) * base + g * (s * lora)
    cases = [
        (base + delta, oracle.compose, tolerances.compose),
        (delta, oracle.compose_delta, tolerances.compose_delta),
    ]
    for result, exact, bound in cases:
        missed = np.abs(_stored(result, dtype) - exact(base, lora, g, s))
        allowed = bound(base, lora, g, s, dtype)
        assert (missed <= allowed).all()
        assert (missed > allowed / 4).any()

    rounded_g = g.astype(ml_dtypes.bfloat16).astype(np.float32)
    spoilt = _stored((rounded_g - 1) * base + rounded_g * (s * lora), dtype)
    missed = np.abs(spoilt - oracle.compose_delta(base, lora, g, s))
    assert (missed > tolerances.compose_delta(base, lora, g, s, dtype)).any()

    bounds = tolerances.compose_grads(dy, base, lora, g, s, dtype)
    exact_grads = oracle.compose_grads(dy, base, lora, g, s)
    inner = _stored(base + s * lora, dtype)
    assert (np.abs((dy * inner).sum(0) - exact_grads.d_g) <= bounds.d_g).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_bounds(dtype):
    rng = np.random.default_rng(3)
    rows, n_in, n_out, rank, s = 90, 160, 72, 8, 0.5
    x, dy = (_stored(rng.normal(size=shape), dtype) for shape in ((rows, n_in), (rows, n_out)))
    w = _stored(rng.normal(size=(n_out, n_in)) / n_in**0.5, dtype)
    a = (rng.normal(size=(rank, n_in)) / n_in**0.5).astype(np.float32)
    b = (rng.normal(size=(n_out, rank)) * 0.3).astype(np.float32)
    m = oracle.norm(w, a, b, s) * (1 + 0.1 * rng.normal(size=n_out))
    bounds = tolerances.dora_linear(dy, x, w, a, b, m, s, dtype)
    exact = oracle.dora_linear(x, w, a, b, m, s, dtype=dtype)
    grads = oracle.dora_linear_grads(dy, x, w, a, b, m, s, dtype=dtype)

    def store(value):
        return _stored(value, dtype)

    g = (m / oracle.norm(w, a, b, s)).astype(np.float32)
    a_cast, b_cast = store(a), store(b)
    base, z = store(x @ w.T), store(x @ a_cast.T)
    lora = store(z @ b_cast.T)
    y = store(base + ((g - 1) * base + g * (np.float32(s) * lora)))
    d_base, d_lora = store(g * dy), store(g * (np.float32(s) * dy))
    dz = store(d_lora @ b_cast)
    got = {
        "d_x": store(store(d_base @ w) + store(dz @ a_cast)),
        "d_lora_a": store(dz.T @ x),
        "d_lora_b": store(d_lora.T @ z),
        "d_magnitude": (dy * store(base + s * lora)).sum(0) / oracle.norm(w, a, b, s),
        "d_bias": store(dy.sum(0)),
    }
    assert (np.abs(y - exact) <= bounds.y).all()
    for name, value in got.items():
        missed = np.abs(value - getattr(grads, name))
        assert (missed <= getattr(bounds, name)).all(), name
    assert (np.abs(y * 1.05 - exact) > bounds.y).any()
    for name, value in got.items():
        assert (np.abs(value * 1.2 - getattr(grads, name)) > getattr(bounds, name)).any(), name


def _layer(dtype="bfloat16"):
    """Returns x, dy, W, A, B and the magnitude of a layer; W is not representable in the dtype."""
    rng = np.random.default_rng(4)
    x, dy = (_stored(rng.normal(size=(90, n)), dtype) for n in (160, 72))
    w = (rng.normal(size=(72, 160)) / 160**0.5).astype(np.float32)
    a, b = (_stored(rng.normal(size=shape) * 0.1, dtype) for shape in ((8, 160), (72, 8)))
    return x, dy, w, a, b, oracle.norm(w, a, b, 0.5)


def test_layer_bounds_of_a_weight_that_is_rounded():
    x, dy, w, a, b, m = _layer()
    exact, rounded = (
        tolerances.dora_linear(dy, x, w, a, b, m, 0.5, "bfloat16", weight_roundings=times)
        for times in (0, 1)
    )
    missed = _stored(w, "bfloat16") - w
    for error, name in ((x @ missed.T, "y"), (dy @ missed, "d_x")):
        allowed = getattr(rounded, name) - getattr(exact, name)
        assert (np.abs(error) <= allowed).all(), name
        assert (np.abs(error) > allowed / 8).any(), name


def test_norm_bound_of_a_weight_that_is_rounded():
    *_, w, a, b, _ = _layer()
    allowed = tolerances.norm(w, a, b, 0.5, weight_roundings=1) - tolerances.norm(w, a, b, 0.5)
    scaled = (w / np.float32(3)) * np.float32(3)  # as codes times a scale
    error = np.abs(oracle.norm(scaled, a, b, 0.5) - oracle.norm(w, a, b, 0.5))
    assert (error <= allowed).all()
    assert (error > allowed / 200).any()


def test_layer_bound_of_lora():
    x, dy, w, a, b, m = _layer()
    w, s = _stored(w, "bfloat16"), 0.5
    bound = tolerances.dora_linear(dy, x, w, a, b, None, s, "bfloat16").y
    base, z = _stored(x @ w.T, "bfloat16"), _stored(x @ a.T, "bfloat16")
    y = _stored(base + s * _stored(z @ b.T, "bfloat16"), "bfloat16")
    exact = oracle.dora_linear(x, w, a, b, None, s, dtype="bfloat16")
    assert (np.abs(y - exact) <= bound).all()
    assert (np.abs(y * 1.05 - exact) > bound).any()
    # In fp32, the error of the norm, which LoRA does not have, counts.
    with_norm, without = (
        tolerances.dora_linear(dy, x, w, a, b, one, s, "float32").y for one in (m, None)
    )
    assert (without < with_norm).all()


@pytest.mark.parametrize("operands", ["float16", "float32"])
def test_attention_bound_holds_for_products_of_a_dtype(operands):
    rng = np.random.default_rng(7)
    q, keys, values = (rng.normal(size=(n, 64)).astype(np.float32) for n in (8, 300, 300))

    def attend(operands):
        unit, tau = np.abs(q).max(-1, keepdims=True), np.abs(values).max(-1)
        scores = unit * (_stored(q / unit, operands) @ keys.T) / 8
        p = np.exp(scores - scores.max(-1, keepdims=True))
        peak = (p * tau).max(-1, keepdims=True)
        weights = peak * _stored(p * tau / peak, operands) / tau
        return weights @ values / p.sum(-1, keepdims=True)

    bound = tolerances.attention(q, keys, values, operands, "float32")
    exact = oracle.attention(q, keys, values)
    assert (np.abs(attend(operands) - exact) <= bound).all()
    worse = {"float16": "bfloat16", "float32": "float16"}[operands]
    assert (np.abs(attend(worse) - exact) > bound).any()
