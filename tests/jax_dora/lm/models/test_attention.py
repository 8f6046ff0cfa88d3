"""Attention within the texts of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.lm.models import attention
from parity import tolerances

LENGTHS = ((5, 1, 42, 16), (64,), (3, 61))
TIME, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 64


def ids() -> jax.Array:
    """Texts of `LENGTHS`; neighbours alone differ."""
    return jnp.asarray([np.repeat(np.arange(len(one)) % 2, one) for one in LENGTHS])


def drawn() -> tuple[jax.Array, ...]:
    shapes = [(3, TIME, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return tuple(
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)
    )


def by_definition(q, k, v, numbers):
    """softmax(q kᵀ / sqrt(width)) v within texts, in the dtype that it is given."""
    k, v = (jnp.repeat(one, HEADS // KV_HEADS, axis=2) for one in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * WIDTH**-0.5
    seen = (numbers[:, :, None] == numbers[:, None, :]) & np.tri(TIME, dtype=bool)[None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def with_gradient(function, q, k, v, dy):
    y, pullback = jax.vjp(function, q, k, v)
    return [np.asarray(one, np.float64) for one in (y, *pullback(dy.astype(y.dtype)))]


def test_where_texts_begin_and_how_long_they_are():
    found = attention.find_segments(ids(), 4)
    assert found.lengths.tolist() == [[5, 1, 42, 16], [64, -1, -1, -1], [3, 61, -1, -1]]
    assert found.starts.tolist() == [[0, 5, 6, 48, -1], [0, -1, -1, -1, -1], [0, 3, -1, -1, -1]]
    assert found.complete.tolist() == [True, True, True]
    assert attention.find_segments(ids(), 2).complete.tolist() == [False, True, True]


@pytest.mark.gpu
def test_agrees_with_fp64():
    """As near as cuDNN's own causal attention of one text is, by flash-attention's rule."""
    q, k, v, dy = drawn()
    numbers = np.stack([np.repeat(np.arange(len(one)), one) for one in LENGTHS])
    texts = attention.find_segments(ids(), 4)
    found = with_gradient(lambda q, k, v: attention.attend_segments(q, k, v, texts), q, k, v, dy)
    plain = with_gradient(lambda *qkv: by_definition(*qkv, numbers), q, k, v, dy)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(one, np.float64)) for one in (q, k, v, dy)]
        exact = with_gradient(lambda *qkv: by_definition(*qkv, numbers), *wide)
    for one, theirs, expected in zip(found, plain, exact, strict=True):
        bound = tolerances.flash_rule(
            np.abs(theirs - expected).max(), np.abs(expected).max(), "bfloat16"
        )
        assert np.abs(one - expected).max() <= bound


@pytest.mark.gpu
def test_a_row_of_more_texts_than_were_told_is_nan():
    q, k, v, _ = drawn()
    y = attention.attend_segments(q, k, v, attention.find_segments(ids(), 2))
    assert jnp.isnan(y[0]).all()
    assert jnp.isfinite(y[1:]).all()
