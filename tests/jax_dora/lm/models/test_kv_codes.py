"""A KV cache in FP8: the transform, the codes, and what a decoder reads from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora.lm.models import generate, kv_codes, make_cache, make_model
from parity import tolerances
from tests.jax_dora.lm.models.conftest import SMALL
from tests.tables import slow

FP8 = "float8_e4m3fn"
WINDOWED = dataclasses.replace(SMALL, sliding_window=5)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_the_transform_keeps_products(size):
    q, k = np.random.default_rng(0).normal(size=(2, 50, size)).astype(np.float32)
    both = (np.asarray(kv_codes.transformed(jnp.asarray(x)), np.float64) for x in (q, k))
    expected = q.astype(np.float64) @ k.T
    error = np.abs(next(both) @ next(both).T - expected)
    lengths = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(k, axis=1)
    assert (error <= 4 * tolerances.accumulation(size, lengths, lengths)).all()


def test_the_transform_spreads_a_channel():
    whole = np.abs(kv_codes.transformed(8 * jnp.eye(128)[5]))
    assert np.allclose(whole, 8 * 128**-0.5)
    # 96 is three blocks of 32.
    blocks = np.abs(kv_codes.transformed(8 * jnp.eye(96)[40]))
    assert np.allclose(blocks, np.repeat([0, 8 * 32**-0.5, 0], 32))


def test_codes_are_the_nearest_of_their_scale():
    x = np.random.default_rng(0).normal(size=(3, 7, 64)) * np.exp(np.arange(7.0))[:, None]
    x[0, 0] = 0
    found = kv_codes.coded(jnp.asarray(x, jnp.bfloat16))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    assert found.codes.dtype == FP8
    assert found.scales.shape == x.shape[:-1]
    unit = np.abs(x).max(-1, keepdims=True) / 448
    bound = np.abs(x) * 2.0**-22 + unit * tolerances.rounding(x / np.where(unit, unit, 1), FP8)
    assert (np.abs(np.asarray(found.decoded(jnp.float32), np.float64) - x) <= bound).all()
    # A row that failed stays known as such.
    broken = kv_codes.coded(jnp.asarray([[1.0, np.nan], [2.0, 1.0]]))
    assert np.isnan(broken.scales).tolist() == [True, False]


def test_another_format_is_an_error():
    expected = "kv_cache='int8': expected None, for the model's dtype, or float8_e4m3fn"
    with pytest.raises(ValueError, match=expected):
        make_cache(SMALL, 1, 8, "int8")
    with pytest.raises(ValueError, match=expected):
        generate(make_model(SMALL), [[1]], 1, kv_cache="int8")


def test_takes_about_half_of_the_memory():
    config = dataclasses.replace(SMALL, head_dim=128, dtype=jnp.bfloat16)

    def size(kv_cache):
        cache = jax.eval_shape(lambda: make_cache(config, 4, 256, kv_cache))
        return sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(cache))

    assert 0.5 < size(FP8) / size(None) <= 0.52


@pytest.mark.ci
@pytest.mark.parametrize(
    ("config", "unroll"),
    [
        (WINDOWED, True),
        *(slow(*case) for case in ((WINDOWED, False), (SMALL, True), (SMALL, False))),
    ],
)
def test_a_decoder_reads_what_it_stored(config, unroll):
    """The prompt in pieces of some rows, then token by token, of all rows or of rows by number."""
    model = make_model(dataclasses.replace(config, unroll=unroll))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 14)), jnp.int32)

    @nnx.jit
    def extend(model, *given):
        hidden, cache = model.extend(*given)
        return model.logits(hidden)[:, -1], cache

    exact, cache = make_cache(config, 3, 20), make_cache(config, 3, 20, FP8)
    rows = jnp.asarray([2, 0])
    for part in (tokens[:, :6], tokens[:, 6:12]):
        expected, exact = extend(model, part, exact, None, rows)
        found, cache = extend(model, part, cache, None, rows)
    for name in ("keys", "values"):
        stored = kv_codes.coded(
            kv_codes.transformed(getattr(exact, name)[0]) if name == "keys" else exact.values[0]
        )
        # Of the first layer, whose keys and values do not depend on the cache.
        mine = jax.tree.map(lambda x: x[0, rows, :, :12], getattr(cache, name))
        theirs = jax.tree.map(lambda x: x[rows, :, :12], stored)
        same = np.asarray(mine.codes, np.float32) == np.asarray(theirs.codes, np.float32)
        assert same.mean() > 0.999
        assert np.allclose(mine.scales, theirs.scales, rtol=1e-5)
    assert cache.lengths.tolist() == [12, 0, 12]
    for step in range(12, 14):
        part = jnp.stack([tokens[1, step], 0, tokens[0, step]])[:, None]
        counts = jnp.asarray([1, 0, 1])
        expected, exact = extend(model, part, exact, counts)
        by_number, _ = extend(model, tokens[:, step : step + 1], cache, None, rows)
        found, cache = extend(model, part, cache, counts)
        peak = np.abs(expected).max()
        # The kernel's definition and attention over the decoded cache are the same function.
        assert np.abs(found[rows] - by_number).max() <= 1e-5 * peak
        error = np.abs(found - expected)[np.asarray(rows)].max() / peak
        assert 1e-5 < error < 2.0**-4
    assert cache.lengths.tolist() == [14, 0, 14]
    assert not np.asarray(cache.wiped(jnp.asarray(2)).keys.scales[:, 2]).any()


@pytest.mark.slow
def test_a_row_gets_the_same_tokens_in_any_batch():
    model = make_model(SMALL)
    prompts = [[1, 2, 3], [4] * 30, [5]]
    together = generate(model, prompts, 6, kv_cache=FP8)
    assert [generate(model, [one], 6, kv_cache=FP8)[0] for one in prompts] == together
