"""Draws the next token of every row of logits, according to the row's own settings.

A row's token depends only on its own logits, settings and position in the text. The settings of all
rows together only determine which computations can be left out since no row needs them.

Temperature, top_k, top_p and min_p are applied in this order, and leave over the tokens that
transformers' logits warpers of the same names do: top_k keeps all tokens as likely as the k-th, and
top_p keeps no more of the equally likely tokens at its limit than it needs. These are the tokens
with the lowest ids, so that the greedy choice is always among them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.lm.domains import (
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SHARE,
    Domain,
    check,
    integers,
    numbers,
)

TOP_LOGPROBS = 20  # the number of most likely tokens that are reported, as in OpenAI's interface
MAX_BIASES = 512
PENALTY = numbers("from -2 to 2", lambda value: -2 <= value <= 2)  # OpenAI's and vLLM's range
BIAS = numbers("from -100 to 100", lambda value: -100 <= value <= 100)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. By default, the most likely token is chosen.

    Attributes:
      temperature: the number that logits are divided by; 0 chooses the most likely token.
      top_k: the number of most likely tokens to draw from; 0 and -1 draw from all.
      top_p: the total probability of the most likely tokens to draw from (arXiv 1904.09751).
      min_p: the probability of the least likely token to draw from, relative to that of the most
        likely one (arXiv 2407.01082).
      seed: the random seed, with up to 64 bits. A draw depends only on the logits, these settings
        and the position in the text.
      repetition_penalty: the number that the logits of tokens in prompt and answer are divided by
        if they are positive, and else multiplied by; above 1, repetitions are less likely.
      frequency_penalty: the number that a token's logit is reduced by for each time that the answer
        has the token.
      presence_penalty: the number that a token's logit is reduced by if the answer has the token.
      min_tokens: the number of tokens before which no end token is drawn.
      logit_bias: numbers to add to the logits of tokens, by their ids.

    Raises:
      ValueError: a number is out of range. The message begins with "name=value: ".
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    DOMAINS: ClassVar[Mapping[str, Domain]] = {
        "temperature": NOT_NEGATIVE,
        "top_k": integers(-1),
        "top_p": SHARE,
        "min_p": PROBABILITY,
        "seed": integers(0, 2**64 - 1),
        "repetition_penalty": POSITIVE,
        "frequency_penalty": PENALTY,
        "presence_penalty": PENALTY,
        "min_tokens": integers(0),
    }

    def __post_init__(self) -> None:
        check(self, self.DOMAINS)
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(
                f"logit_bias={len(self.logit_bias)} tokens: expected at most {MAX_BIASES}"
            )
        for token, bias in self.logit_bias.items():
            if not integers(0).contains(token) or not BIAS.contains(bias):
                raise ValueError(
                    f"logit_bias={{{token!r}: {bias!r}}}: expected a token id, and {BIAS.expected}"
                )

    @property
    def needs_processors(self) -> bool:
        """Whether logits are changed by `LogitsProcessors`."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.min_tokens or self.logit_bias)


GREEDY = Sampling()


class RowSettings(NamedTuple):
    """The settings of all rows, as arrays."""

    temperatures: jax.Array  # f32[rows]
    top_k: jax.Array  # i32[rows]
    top_p: jax.Array  # f32[rows]
    min_p: jax.Array  # f32[rows]
    seeds: jax.Array  # u32[rows, 2]: the upper and the lower half

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "RowSettings":
        """Returns the settings of these rows, on the host."""
        arrays: dict[str, Any] = {
            "temperatures": np.array([one.temperature for one in rows], np.float32),
            "top_k": np.array([one.top_k for one in rows], np.int32),
            "top_p": np.array([one.top_p for one in rows], np.float32),
            "min_p": np.array([one.min_p for one in rows], np.float32),
            "seeds": np.array([divmod(one.seed, 2**32) for one in rows], np.uint32),
        }
        return cls(**arrays)


class DrawFeatures(NamedTuple):
    """The features that at least one row of a batch needs. Other features are not computed.

    They are static, so that the host selects the program. With a condition inside the program, the
    host would have to wait for the device before it launches the selected branch.
    """

    samples: bool = False
    sorts: bool = False
    logprobs: bool = False

    @classmethod
    def needed_by(cls, rows: Sequence[Sampling], *, logprobs: bool = False) -> "DrawFeatures":
        """Returns the features that rows with these settings need."""
        sampled = [one for one in rows if one.temperature > 0]
        sorts = any(one.top_k > 0 or one.top_p < 1 for one in sampled)
        return cls(bool(sampled), sorts, logprobs)

    @classmethod
    def all(cls) -> "tuple[DrawFeatures, ...]":
        """Returns all combinations that settings can need."""
        sampling = (False, False), (True, False), (True, True)
        return tuple(cls(*one, logprobs) for one in sampling for logprobs in (False, True))


class Drawn(NamedTuple):
    """The drawn tokens, and probabilities before the settings are applied.

    The last three fields are zero if no row needs them.
    """

    tokens: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows]: whether all logits of the row are finite
    logprobs: jax.Array  # f32[rows]
    top_tokens: jax.Array  # i32[rows, TOP_LOGPROBS]
    top_logprobs: jax.Array  # f32[rows, TOP_LOGPROBS]


def draw(
    logits: jax.Array,
    settings: RowSettings,
    positions: jax.Array,
    features: DrawFeatures,
    processed: jax.Array | None = None,
) -> Drawn:
    """Returns the next tokens of all rows.

    Args:
      logits: [rows, vocab].
      settings: the settings of the rows.
      positions: i32[rows], the positions of the drawn tokens in their texts.
      features: the features to compute.
      processed: f32[rows, vocab], the logits to draw from; by default, `logits`. Those decide what
        is reported.
    """
    logits = logits.astype(jnp.float32)
    processed = logits if processed is None else processed
    tokens = jnp.argmax(processed, axis=-1).astype(jnp.int32)
    if features.samples:
        kept = _kept_logits(processed, settings, sorts=features.sorts)
        keys = jax.random.wrap_key_data(settings.seeds, impl="threefry2x32")
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        sampled = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        tokens = jnp.where(settings.temperatures > 0, sampled, tokens)
    if features.logprobs:
        logprobs = logprobs_of(logits, tokens)
    else:
        logprobs = jax.tree.map(jnp.zeros_like, jax.eval_shape(logprobs_of, logits, tokens))
    return Drawn(tokens, jnp.all(jnp.isfinite(logits), axis=-1), *logprobs)


def _kept_logits(logits: jax.Array, settings: RowSettings, *, sorts: bool) -> jax.Array:
    """Returns logits [rows, vocab] that are divided by the temperature, and -inf for tokens that
    the settings leave out."""
    temperatures, top_k, top_p, min_p, _ = (one[:, None] for one in settings)
    # The highest logit becomes 0, so that a small temperature cannot overflow several of them.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.where(temperatures > 0, temperatures, 1.0)
    kept = logits >= jnp.log(min_p)
    if sorts:
        kept &= _in_top(logits, top_k, top_p)
    return jnp.where(kept, logits, -jnp.inf)


def _in_top(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns whether tokens are among the most likely ones, bool[rows, vocab].

    The values alone are sorted, which is faster than to sort the ids with them.
    """
    vocab = logits.shape[-1]
    ascending = jnp.sort(logits, axis=-1)
    first = vocab - jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    in_top_k = ascending >= jnp.take_along_axis(ascending, first, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(in_top_k, ascending, -jnp.inf), axis=-1)
    in_top_p = (jnp.cumsum(probabilities, axis=-1) > 1 - top_p) | (top_p >= 1)
    left_out = jnp.sum(~(in_top_k & in_top_p), axis=-1, keepdims=True, dtype=jnp.int32)
    limit = jnp.take_along_axis(ascending, jnp.minimum(left_out, vocab - 1), axis=-1)
    # Of the tokens with the logit `limit`, those with the lowest ids.
    kept_ties = jnp.sum(ascending <= limit, axis=-1, keepdims=True, dtype=jnp.int32) - left_out
    ties = logits == limit
    number = jnp.cumsum(ties, axis=-1, dtype=jnp.int32)
    return (logits > limit) | (ties & (number <= jnp.maximum(kept_ties, 1)))


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the last three fields of `Drawn`, of logits f32[rows, vocab] and tokens i32[rows]."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(TOP_LOGPROBS, logits.shape[-1])
    values, top_tokens = lax.top_k(logprobs, count)
    padding = ((0, 0), (0, TOP_LOGPROBS - count))
    drawn = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return drawn, jnp.pad(top_tokens, padding).astype(jnp.int32), jnp.pad(values, padding)
