"""Draws the next token of every row, according to the settings of the row's request.

The result of a row depends only on its own logits, settings and position in the text. The settings
of all rows together only determine which computations can be left out since no row needs them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.lm.serve.request import TOP_LOGPROBS


class DrawSettings(NamedTuple):
    """The settings of the requests in all rows of a batch."""

    adapters: jax.Array  # i32[rows]: slots of the bank, -1 for the base model
    seeds: jax.Array  # u32[rows, 2]
    temperatures: jax.Array  # f32[rows]
    top_p: jax.Array  # f32[rows]
    logprobs: jax.Array  # bool[rows]


class DrawFeatures(NamedTuple):
    """The features that at least one row of a batch needs. Other features are not computed.

    They are static, so that the host selects the program. With a condition inside the program, the
    host would have to wait for the device before it launches the selected branch.
    """

    samples: bool
    top_p: bool
    logprobs: bool

    @classmethod
    def needed_by(cls, settings: DrawSettings) -> "DrawFeatures":
        """Returns the features that the settings, which are NumPy arrays, need."""
        samples = np.asarray(settings.temperatures) > 0
        return cls(
            samples=bool(samples.any()),
            top_p=bool((samples & (np.asarray(settings.top_p) < 1)).any()),
            logprobs=bool(np.asarray(settings.logprobs).any()),
        )

    @classmethod
    def all(cls) -> "tuple[DrawFeatures, ...]":
        """Returns all combinations that settings can need."""
        sampling = (False, False), (True, False), (True, True)
        return tuple(cls(*one, logprobs) for one in sampling for logprobs in (False, True))


class Drawn(NamedTuple):
    """The drawn tokens and their probabilities. The last three fields are zero if no row needs
    them."""

    tokens: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows]: whether all logits of the row are finite
    logprobs: jax.Array  # f32[rows]
    top_tokens: jax.Array  # i32[rows, TOP_LOGPROBS]
    top_logprobs: jax.Array  # f32[rows, TOP_LOGPROBS]


def draw(
    logits: jax.Array, settings: DrawSettings, positions: jax.Array, features: DrawFeatures
) -> Drawn:
    """Returns the next tokens of all rows.

    Args:
      logits: [rows, vocab].
      settings: the settings of the rows.
      positions: i32[rows], the positions of the drawn tokens in their texts.
      features: the features to compute.
    """
    logits = logits.astype(jnp.float32)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if features.samples:
        sampled = _sample(logits, settings, positions, features.top_p)
        tokens = jnp.where(settings.temperatures > 0, sampled, tokens)
    if features.logprobs:
        logprobs = _logprobs(logits, tokens)
    else:
        logprobs = jax.tree.map(jnp.zeros_like, jax.eval_shape(_logprobs, logits, tokens))
    return Drawn(tokens, jnp.all(jnp.isfinite(logits), axis=-1), *logprobs)


def _sample(
    logits: jax.Array, settings: DrawSettings, positions: jax.Array, by_top_p: bool
) -> jax.Array:
    temperatures = jnp.where(settings.temperatures > 0, settings.temperatures, 1.0)[:, None]
    # The highest logit becomes 0, so that a small temperature cannot overflow several of them.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperatures
    if by_top_p:
        top_p = settings.top_p[:, None]
        threshold = jnp.where(top_p < 1, _top_p_threshold(logits, top_p), -jnp.inf)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    keys = jax.random.wrap_key_data(settings.seeds, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _top_p_threshold(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the lowest logit [rows, 1] of the most likely tokens with total probability `top_p`.

    All tokens with exactly this logit are kept, even if their total probability is larger.
    """
    descending = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = jnp.sum(before < top_p, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.take_along_axis(descending, jnp.maximum(count - 1, 0), axis=-1)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the last three fields of `Drawn`."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(TOP_LOGPROBS, logits.shape[-1])
    values, top_tokens = lax.top_k(logprobs, count)
    padding = ((0, 0), (0, TOP_LOGPROBS - count))
    drawn = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return drawn, jnp.pad(top_tokens, padding).astype(jnp.int32), jnp.pad(values, padding)
