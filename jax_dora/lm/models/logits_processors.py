"""Changes the logits of a row by what its text has so far, before a token is drawn.

The changes are those of vLLM, in its order: biases, and -inf for the tokens that may not end the
text yet; the repetition penalty (arXiv 1909.05858) of the tokens of prompt and answer; and OpenAI's
penalties of the tokens that the answer has `count` times:

    logit - frequency_penalty * count - presence_penalty * (count > 0)

The probabilities that are reported do not include them.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.lm.domains import MAX_INTEGER
from jax_dora.lm.models.sampling import (
    MAX_BIASES,
    DrawFeatures,
    Drawn,
    RowSettings,
    Sampling,
    draw,
)

MAX_ENDS = 512  # the number of tokens that min_tokens can leave out


class LogitsProcessors(NamedTuple):
    """The changes of all rows, as arrays."""

    penalties: jax.Array  # f32[rows, 3]: repetition, frequency, presence
    biased_tokens: jax.Array  # i32[rows, MAX_BIASES]; padding is no token
    biases: jax.Array  # f32[rows, MAX_BIASES]
    end_tokens: jax.Array  # i32[rows, MAX_ENDS]; padding is no token
    least_ends: jax.Array  # i32[rows]: the position of the first token that may end the text
    prompts: jax.Array  # i32[rows]: the numbers of tokens of the prompts
    texts: jax.Array  # i32[rows, capacity]: the tokens up to the position of the next one

    @classmethod
    def of(
        cls,
        rows: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        ends: Sequence[Collection[int]],
        capacity: int,
    ) -> Self:
        """Returns the changes of rows, on the host, before a token is drawn.

        Args:
          rows, prompts, ends: the settings, the prompts and the end tokens of the rows.
          capacity: the maximum number of tokens of a text.

        Raises:
          ValueError: a row has more than `MAX_ENDS` end tokens, and min_tokens.
        """
        ends = [one if row.min_tokens else () for row, one in zip(rows, ends, strict=True)]
        if (most := max(map(len, ends))) > MAX_ENDS:
            raise ValueError(f"min_tokens is given, and {most} end tokens; expected {MAX_ENDS}")
        sizes = np.array([len(prompt) for prompt in prompts], np.int32)
        penalties = [(r.repetition_penalty, r.frequency_penalty, r.presence_penalty) for r in rows]
        arrays = (
            np.array(penalties, np.float32),
            _padded([list(row.logit_bias) for row in rows], MAX_BIASES, np.int32, MAX_INTEGER),
            _padded([list(row.logit_bias.values()) for row in rows], MAX_BIASES, np.float32, 0),
            _padded([list(one) for one in ends], MAX_ENDS, np.int32, MAX_INTEGER),
            sizes + np.array([row.min_tokens for row in rows], np.int32),
            sizes,
            _padded(prompts, capacity, np.int32, 0),
        )
        return cls(*arrays)  # pyright: ignore[reportArgumentType]  NumPy's arrays

    def apply(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the changed logits f32[rows, vocab] of the tokens at `positions` i32[rows]."""
        logits = logits.astype(jnp.float32)
        rows, positions = jnp.arange(len(logits))[:, None], positions[:, None]
        logits = logits.at[rows, self.biased_tokens].add(self.biases, mode="drop")
        limit = jnp.where(positions < self.least_ends[:, None], -jnp.inf, jnp.inf)
        logits = logits.at[rows, self.end_tokens].min(limit, mode="drop")
        places = jnp.arange(self.texts.shape[1])[None]
        in_text = places < positions
        in_answer = in_text & (places >= self.prompts[:, None])
        zeros = jnp.zeros_like(logits)
        is_known = zeros.at[rows, self.texts].max(in_text.astype(jnp.float32)) > 0
        counts = zeros.at[rows, self.texts].add(in_answer.astype(jnp.float32))
        repetition, frequency, presence = (one[:, None] for one in self.penalties.T)
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(is_known, repeated, logits)
        return logits - frequency * counts - presence * jnp.sign(counts)

    def with_tokens(self, tokens: jax.Array, positions: jax.Array, active: jax.Array) -> Self:
        """Returns the changes after `tokens` i32[rows] were drawn at `positions` in active rows."""
        is_new = (active > 0) & (positions >= self.prompts)
        places = jnp.where(is_new, positions, self.texts.shape[1])
        texts = self.texts.at[jnp.arange(len(tokens)), places].set(tokens, mode="drop")
        return self._replace(texts=texts)


def draw_processed(
    logits: jax.Array,
    settings: RowSettings,
    positions: jax.Array,
    features: DrawFeatures,
    processors: LogitsProcessors | None,
    active: jax.Array,
) -> tuple[Drawn, LogitsProcessors | None]:
    """Returns the next tokens of all rows, as `draw`, and the updated processors, if any.

    Args:
      active: i32[rows], 0 in the rows whose tokens are dropped.
    """
    if processors is None:
        return draw(logits, settings, positions, features), None
    processed = processors.apply(logits, positions)
    drawn = draw(logits, settings, positions, features, processed)
    return drawn, processors.with_tokens(drawn.tokens, positions, active)


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: type, padding: int) -> np.ndarray:
    array = np.full((len(rows), width), padding, dtype)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array
