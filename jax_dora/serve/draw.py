"""The next token of every row, each by its own request's settings.

A row's draw depends on its logits, its seed and its place in the text, and on no other row: what
other rows ask for decides only whether work is left out whose result would not be used.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.serve.request import TOP_LOGPROBS


class DrawSettings(NamedTuple):
    """The settings that the requests in the rows of a batch ask for; an array each."""

    adapters: jax.Array  # i32[rows]: slots of the bank, -1 for the base alone
    seeds: jax.Array  # u32[rows, 2]
    temperatures: jax.Array  # f32[rows]
    top_p: jax.Array  # f32[rows]
    logprobs: jax.Array  # bool[rows]


class DrawFeatures(NamedTuple):
    """The features of drawing that some row of a batch needs; the others are not computed.

    The host knows them and picks the program: it would have to wait for the device before it could
    launch what a condition in a program chooses.
    """

    samples: bool
    top_p: bool
    logprobs: bool

    @classmethod
    def by(cls, settings: DrawSettings) -> "DrawFeatures":
        """Returns the features that these settings, NumPy's arrays, need."""
        samples = np.asarray(settings.temperatures) > 0
        return cls(
            samples=bool(samples.any()),
            top_p=bool((samples & (np.asarray(settings.top_p) < 1)).any()),
            logprobs=bool(np.asarray(settings.logprobs).any()),
        )

    @classmethod
    def all(cls) -> "tuple[DrawFeatures, ...]":
        """Returns every combination that settings can need."""
        drawn = (False, False), (True, False), (True, True)
        return tuple(cls(*one, logprobs) for one in drawn for logprobs in (False, True))


class Drawn(NamedTuple):
    """The tokens drawn, and their probabilities; the last three fields are zero where no row needs
    them."""

    tokens: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows]: whether the row's logits are numbers
    logprobs: jax.Array  # f32[rows]
    likeliest: jax.Array  # i32[rows, TOP_LOGPROBS]
    top_logprobs: jax.Array  # f32[rows, TOP_LOGPROBS]


def draw(
    logits: jax.Array, settings: DrawSettings, positions: jax.Array, features: DrawFeatures
) -> Drawn:
    """Returns the next tokens from logits [rows, vocab], for these positions i32[rows]."""
    logits = logits.astype(jnp.float32)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if features.samples:
        sampled = _sample(logits, settings, positions, features.top_p)
        tokens = jnp.where(settings.temperatures > 0, sampled, tokens)
    if features.logprobs:
        told = _logprobs(logits, tokens)
    else:
        told = jax.tree.map(jnp.zeros_like, jax.eval_shape(_logprobs, logits, tokens))
    return Drawn(tokens, jnp.all(jnp.isfinite(logits), axis=-1), *told)


def _sample(
    logits: jax.Array, settings: DrawSettings, positions: jax.Array, by_top_p: bool
) -> jax.Array:
    temperatures = jnp.where(settings.temperatures > 0, settings.temperatures, 1.0)[:, None]
    # From the highest down, so that no temperature makes two infinities of them.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperatures
    if by_top_p:
        top_p = settings.top_p[:, None]
        least = jnp.where(top_p < 1, _least_kept(logits, top_p), -jnp.inf)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    keys = jax.random.wrap_key_data(settings.seeds, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _least_kept(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the lowest logit [rows, 1] of the likeliest tokens of `top_p` together; of equal
    ones at the border all are kept."""
    falling = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = jnp.sum(before < top_p, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.take_along_axis(falling, jnp.maximum(count - 1, 0), axis=-1)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(TOP_LOGPROBS, logits.shape[-1])
    values, likeliest = lax.top_k(logprobs, count)
    room = ((0, 0), (0, TOP_LOGPROBS - count))
    drawn = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return drawn, jnp.pad(likeliest, room).astype(jnp.int32), jnp.pad(values, room)
