"""How tokens are drawn: as transformers' warpers say, and each row by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jax_dora.lm.models import Sampling
from jax_dora.lm.models import sampling as module
from jax_dora.lm.models.logits_processors import LogitsProcessors, draw_processed
from jax_dora.lm.models.sampling import GREEDY, DrawFeatures, RowSettings
from tests.tables import thinned

program = jax.jit(module.draw, static_argnums=3)


def draw(logits, rows, positions):
    """Draws with the settings `rows`, one a row."""
    return program(logits, RowSettings.of(rows), positions, DrawFeatures.needed_by(rows))


def logits_with_ties():
    """As those of a model in bfloat16: many tokens are exactly as likely as others."""
    return np.round(3 * np.random.default_rng(0).standard_normal((17,))).astype(np.float32) / 2


def left_over(logits, one):
    """Returns the probabilities that transformers leaves over.

    Its sort is not stable, so it may leave over other tokens with the same probability.
    """
    warpers = transformers.LogitsProcessorList()
    warpers.append(transformers.TemperatureLogitsWarper(one.temperature))
    if one.top_k:
        warpers.append(transformers.TopKLogitsWarper(one.top_k))
    if one.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(one.top_p))
    if one.min_p:
        warpers.append(transformers.MinPLogitsWarper(one.min_p))
    return torch.softmax(warpers(None, torch.from_numpy(logits[None])), -1).numpy()[0]


CASES = [
    {},
    *({"top_p": p} for p in (0.05, 0.3, 0.55, 0.7, 0.8, 0.95)),
    *({"top_k": k} for k in (1, 2, 5, 9, 16, 17, 40)),
    *({"min_p": p} for p in (0.05, 0.4, 1.0)),
    {"top_k": 9, "top_p": 0.4},
    {"top_k": 2, "top_p": 0.9, "min_p": 0.5},
    {"top_k": 12, "top_p": 0.85, "min_p": 0.1},
]
QUICK = [CASES[3], CASES[9], CASES[-1]]


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@pytest.mark.parametrize("options", thinned(CASES, QUICK))
@pytest.mark.ci
def test_draws_are_as_often_as_transformers_would(options, temperature):
    draws, logits = 4000, logits_with_ties()
    one = Sampling(temperature, **options)
    rows = [dataclasses.replace(one, seed=seed) for seed in range(draws)]
    many = jnp.asarray(np.repeat(logits[None], draws, axis=0))
    drawn = np.asarray(draw(many, rows, jnp.zeros(draws, jnp.int32)).tokens)
    values, which = np.unique(logits, return_inverse=True)
    found = np.bincount(which[drawn], minlength=len(values)) / draws
    expected = np.bincount(which, left_over(logits, one))
    assert (found[expected == 0] == 0).all()
    # Five standard deviations of a share.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.ci
def test_as_many_tokens_are_left_over_as_in_transformers(seed):
    """Among many tokens, with ties or without, and with all settings in one batch."""
    generator = np.random.default_rng(seed)
    rows = [
        Sampling(temperature, top_k, top_p, min_p)
        for temperature in (0.6, 1.3)
        for top_k in (0, 3, 60)
        for top_p in (0.2, 0.9, 1.0)
        for min_p in (0.0, 0.03)
    ]
    logits = 3 * generator.standard_normal((len(rows), 500)).astype(np.float32)
    if seed:
        logits = logits.astype(jnp.bfloat16).astype(np.float32).round(1)
    kept = np.isfinite(module._kept_logits(jnp.asarray(logits), RowSettings.of(rows), sorts=True))
    for one, row, mask in zip(rows, logits, kept, strict=True):
        expected = row[left_over(row, one) > 0]
        np.testing.assert_array_equal(np.sort(row[mask]), np.sort(expected), str(one))


def test_top_p_keeps_no_more_ties_than_it_needs():
    logits, rows = jnp.array([[3.0, 2.0, 2.0, 2.0, 2.0]]), [Sampling(1.0, top_p=0.55)]
    kept = jnp.isfinite(module._kept_logits(logits, RowSettings.of(rows), sorts=True))
    assert kept.tolist() == [[True, True, False, False, False]]


def test_a_row_is_drawn_the_same_in_any_company():
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((3, 400), np.float32))
    positions = jnp.array([5, 5, 9], jnp.int32)
    own = Sampling(0.9, seed=7)
    alone = draw(logits, [own] * 3, positions).tokens[1]
    # The others are greedy, or have limits, which takes other programs.
    for other in (GREEDY, Sampling(2.0, top_p=0.5), Sampling(0.2, 9, 0.9, 0.1, 3)):
        assert draw(logits, [other, own, other], positions).tokens[1] == alone


@pytest.mark.ci
def test_processors_leave_rows_without_their_settings_as_they_are():
    """To the last bit, among rows that have all of them."""
    logits = jnp.asarray(3 * np.random.default_rng(2).standard_normal((3, 400), np.float32))
    other = Sampling(1.0, -1, 1.0, 0.0, 3, 1.4, 0.3, -0.2, 5, {7: 3.0})
    rows, prompts = [other, Sampling(0.9, seed=7), other], [[1, 2], [3, 4, 5], [6]]
    processors = LogitsProcessors.of(rows, prompts, [[9]] * 3, 8)
    processors = jax.tree.map(jnp.asarray, processors)
    positions = jnp.array([4, 4, 4], jnp.int32)
    found = np.asarray(processors.apply(logits, positions))
    assert (found[1] == logits[1]).all()
    assert (found[::2] != logits[::2]).sum(-1).min() >= 4
    drawn, _ = draw_processed(
        logits, RowSettings.of(rows), positions, DrawFeatures(True), processors, jnp.ones(3)
    )
    assert drawn.tokens[1] == draw(logits, [rows[1]] * 3, positions).tokens[1]


@pytest.mark.ci
def test_one_penalty_counts_a_token_and_the_other_does_not():
    """In the answer [2, 2, 2, 3] to the prompt [1], of which neither speaks."""
    rows, ones = [Sampling(frequency_penalty=0.5), Sampling(presence_penalty=0.5)], jnp.ones(2)
    processors = LogitsProcessors.of(rows, [[1]] * 2, [()] * 2, 8)
    processors = jax.tree.map(jnp.asarray, processors)
    for position, token in enumerate([2, 2, 2, 3], 1):
        at = jnp.full(2, position, jnp.int32)
        processors = processors.with_tokens(jnp.full(2, token, jnp.int32), at, ones)
    found = processors.apply(jnp.zeros((2, 5)), jnp.full(2, 5, jnp.int32))
    assert (-found).tolist() == [[0, 0, 1.5, 0.5, 0], [0, 0, 0.5, 0.5, 0]]


@pytest.mark.ci
def test_probabilities_are_those_before_processors():
    logits, rows = jnp.array([[1.0, 2.0, 0.5]]), [Sampling(logit_bias={2: 100.0})]
    processors = jax.tree.map(jnp.asarray, LogitsProcessors.of(rows, [[0]], [()], 4))
    features, ones = DrawFeatures(logprobs=True), jnp.ones(1, jnp.int32)
    drawn, after = draw_processed(logits, RowSettings.of(rows), ones, features, processors, ones)
    assert drawn.tokens.tolist() == [2]
    np.testing.assert_allclose(drawn.logprobs, jax.nn.log_softmax(logits[0])[2:], rtol=1e-6)
    assert after.texts.tolist() == [[0, 2, 0, 0]]


def test_only_what_is_asked_for_is_computed():
    """Without conditions, for which a host would have to wait."""
    logits, positions = jnp.zeros((2, 400)), jnp.zeros(2, jnp.int32)
    work = {"samples": "random_bits", "sorts": "sort[", "logprobs": "top_k"}
    for one in (GREEDY, Sampling(1.0, min_p=0.1), Sampling(1.0, top_p=0.5), Sampling(0.0, 3, 0.5)):
        rows = [one, GREEDY]
        features = DrawFeatures.needed_by(rows, logprobs=not one.temperature)
        assert features in DrawFeatures.all()
        make = jax.make_jaxpr(module.draw, static_argnums=3)
        found = str(make(logits, RowSettings.of(rows), positions, features))
        assert {name: one in found for name, one in work.items()} == features._asdict()
        assert "cond[" not in found


@pytest.mark.ci
def test_draws_depend_on_seed_and_position():
    seeds = 1, 1, 2, 1, 2**63 + 1
    rows = [Sampling(1.0, seed=seed) for seed in seeds]
    drawn = draw(jnp.zeros((5, 5000)), rows, jnp.array([3, 3, 3, 4, 3], jnp.int32)).tokens
    assert drawn[0] == drawn[1]
    assert len(set(drawn.tolist())) == 4


def test_tiny_temperatures_and_ties():
    logits, positions = jnp.array([[1.0, 3.0, 3.0, 2.0]] * 2), jnp.zeros(2, jnp.int32)
    drawn = draw(logits, [Sampling(1e-30)] * 2, positions).tokens
    assert set(drawn.tolist()) <= {1, 2}
    # Of equal logits greedy takes the first.
    assert draw(logits, [GREEDY] * 2, positions).tokens.tolist() == [1, 1]


def test_what_is_not_finite_is_told():
    logits = jnp.array([[0.0, jnp.nan], [0.0, jnp.inf], [0.0, -1.0]])
    finite = draw(logits, [GREEDY] * 3, jnp.zeros(3, jnp.int32)).finite
    assert finite.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1}, "temperature=-1: expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan: expected"),
        ({"top_p": 0}, "top_p=0: expected a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k=-2: expected an integer from -1"),
        ({"top_k": 2.5}, "top_k=2.5: expected an integer from -1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: expected a number from -2 to 2"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias={-1: 1.0}: expected a token id, and a number fr"),
        ({"logit_bias": {1: 101}}, "logit_bias={1: 101}: expected a token id, and a number from"),
        ({"logit_bias": dict.fromkeys(range(513), 1)}, "logit_bias=513 tokens: expected at most"),
        ({"min_p": 1.5}, "min_p=1.5: expected a number from 0 to 1"),
        ({"seed": 2**64}, "seed=18446744073709551616: expected"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)
