"""How tokens are drawn: as often as transformers' processors say, and each row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora.lm.serve import draw as module
from jax_dora.lm.serve.draw import DrawFeatures, DrawSettings
from tests.jax_dora.lm.models.test_generation import check_draws
from tests.tables import thinned

program = jax.jit(module.draw, static_argnums=3)


def draw(logits, settings, places):
    return program(logits, settings, places, DrawFeatures.needed_by(settings))


def settings(count, temperature=0.0, top_p=1.0, seeds=None, logprobs=False):
    seeds = np.arange(count) if seeds is None else seeds
    return DrawSettings(
        jnp.zeros(count, jnp.int32),
        jnp.asarray(np.stack([np.zeros(count), seeds], axis=1), jnp.uint32),
        jnp.full(count, temperature, jnp.float32),
        jnp.full(count, top_p, jnp.float32),
        jnp.full(count, logprobs),
    )


@pytest.mark.parametrize(
    ("temperature", "top_p"), thinned([(0.7, 1.0), (0.7, 0.6), (1.6, 0.05)], [(0.7, 0.6)])
)
def test_draws_are_as_often_as_transformers_would(temperature, top_p):
    def tokens(logits, places):
        return draw(logits, settings(len(logits), temperature, top_p), places).tokens

    check_draws(tokens, temperature, top_p)


def test_a_row_is_drawn_the_same_in_any_company():
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((3, 400), np.float32))
    places = jnp.array([5, 5, 9], jnp.int32)
    alone = draw(logits, settings(3, temperature=0.9), places).tokens
    # The others become greedy, or have a top_p and probabilities, which takes other programs.
    for others in (
        settings(3),
        settings(3, temperature=2.0, top_p=0.5),
        settings(3, 0.2, 0.9, logprobs=True),
    ):
        mixed = DrawSettings(
            *(b.at[1].set(a[1]) for a, b in zip(settings(3, 0.9), others, strict=True))
        )
        assert draw(logits, mixed, places).tokens[1] == alone[1]


def test_only_what_is_asked_for_is_computed():
    """Without conditions, for which a host would have to wait."""
    logits, places = jnp.zeros((3, 400)), jnp.zeros(3, jnp.int32)
    work = {"samples": "random_bits", "top_p": "cumsum", "logprobs": "top_k"}
    for some in (
        settings(3),
        settings(3, 1.0),
        settings(3, 1.0, 0.5),
        settings(3, 0.0, 0.5, logprobs=True),
    ):
        features = DrawFeatures.needed_by(some)
        found = str(jax.make_jaxpr(module.draw, static_argnums=3)(logits, some, places, features))
        assert {name: one in found for name, one in work.items()} == features._asdict()
        assert "cond[" not in found


@pytest.mark.slow
def test_draws_depend_on_seed_and_place():
    logits = jnp.zeros((4, 5000))
    seeds = np.array([1, 1, 2, 1])
    drawn = draw(
        logits, settings(4, temperature=1.0, seeds=seeds), jnp.array([3, 3, 3, 4], jnp.int32)
    ).tokens
    assert drawn[0] == drawn[1]
    assert len(set(drawn.tolist())) == 3


@pytest.mark.slow
def test_tiny_temperatures_and_ties():
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0]] * 2)
    drawn = draw(logits, settings(2, temperature=1e-30), jnp.zeros(2, jnp.int32)).tokens
    assert set(drawn.tolist()) <= {1, 2}
    # Of equal logits greedy takes the first.
    assert draw(logits, settings(2), jnp.zeros(2, jnp.int32)).tokens.tolist() == [1, 1]


def test_what_is_not_finite_is_told():
    logits = jnp.array([[0.0, jnp.nan], [0.0, jnp.inf], [0.0, -1.0]])
    assert draw(logits, settings(3), jnp.zeros(3, jnp.int32)).finite.tolist() == [
        False,
        False,
        True,
    ]
