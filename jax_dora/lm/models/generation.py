"""Generates text token by token, greedily or by sampling."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dora.layers.base_layer import check_has_values
from jax_dora.lm.models.cache import Cache, make_cache
from jax_dora.lm.models.decoder import CausalLM, for_inference, loop_options

# Capacities are multiples of this, so that prompts of similar lengths share a compiled program.
_BLOCK = 64


class NotFiniteError(ArithmeticError):
    """Raised when logits are NaN or infinite, so that no token can be drawn."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. By default, the most likely token is chosen.

    Attributes:
      temperature: the number that logits are divided by; 0 chooses the most likely token.
      top_k: draws only from the `top_k` most likely tokens; 0 draws from all tokens.
      top_p: draws only from the smallest set of most likely tokens with at least this total
        probability (arXiv 1904.09751).
      seed: the random seed. The draws of a row depend only on the seed and on the row's index in
        the batch.

    Raises:
      ValueError: a number is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
        }
        for name, (is_valid, expected) in ranges.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and is_valid):
                raise ValueError(f"{name} is {value}; expected a number {expected}")

    def draw(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        """Draws the tokens i32[batch] at `positions` i32[batch] from logits [batch, vocab]."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # The sort is stable: of equal logits, the token with the lower id ranks first.
        order = jnp.argsort(-logits, axis=-1, stable=True)
        logits = jnp.take_along_axis(logits, order, axis=-1) / self.temperature
        ranks = jnp.arange(logits.shape[-1])[None, :]
        if self.top_k:
            logits = jnp.where(ranks < self.top_k, logits, -jnp.inf)
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where((before < self.top_p) | (ranks == 0), logits, -jnp.inf)
        key = jax.random.key(self.seed)
        rows = jnp.arange(logits.shape[0])
        keys = jax.vmap(
            lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position)
        )
        drawn = jax.vmap(jax.random.categorical)(keys(rows, positions), logits)
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate_steps(
    model: CausalLM, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling | None = None
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, i32[batch], `count` times.

    Args:
      model: a model with or without adapters. Dropout is disabled.
      prompts: the tokens of each row, at least one per row.
      count: the number of tokens to generate.
      sampling: how to draw tokens; greedy by default.

    Raises:
      ValueError: there is no prompt, a prompt is empty, or a token is outside of the vocabulary; or
        `model` is abstract.
      NotFiniteError: the logits of a row are not finite.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"prompts have {[len(prompt) for prompt in prompts]} tokens; expected at least one in "
            "each row"
        )
    check_has_values(model, "jax_dora.lm.models.generate", can_trace=False)
    size = model.config.vocab_size
    if invalid := [token for prompt in prompts for token in prompt if not 0 <= token < size]:
        raise ValueError(f"prompts have token {invalid[0]}; expected 0 to {size - 1}")
    sampling = sampling or Sampling()
    graphdef, state = for_inference(model)
    program = _program(graphdef, loop_options(state))
    longest = max(map(len, prompts))
    padded = np.zeros((len(prompts), math.ceil(longest / _BLOCK) * _BLOCK), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    capacity = math.ceil((longest + count) / _BLOCK) * _BLOCK
    cache = make_cache(model.config, len(prompts), max(capacity, padded.shape[1]))
    tokens, counts = jnp.asarray(padded), jnp.asarray(lengths)
    for number in range(count):
        drawn, finite, cache = program(sampling, state, cache, tokens, counts)
        if not np.asarray(finite).all():
            raise NotFiniteError(
                f"the logits of row {np.argmin(finite)} are not finite at new token {number}; "
                "expected finite logits: check the weights of the model and its adapter for NaN, "
                f"and the activations for overflow in {jnp.dtype(model.config.dtype).name}"
            )
        yield np.asarray(drawn)
        tokens, counts = drawn[:, None], jnp.ones_like(counts)


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling | None = None,
    *,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """Returns the continuation of each prompt: up to `count` tokens, without the end token.

    Args:
      model, prompts, count, sampling: the same as in `generate_steps`.
      ends: tokens that end a text.

    Raises the same errors as `generate_steps`.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    for tokens in generate_steps(model, prompts, count, sampling):
        for row in sorted(active):
            if tokens[row] in ends:
                active.discard(row)
            else:
                texts[row].append(int(tokens[row]))
        if not active:
            break
    return texts


@functools.cache
def _program(graphdef: nnx.GraphDef[CausalLM], options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns `_step`, compiled for one model."""
    step = functools.partial(_step, graphdef)
    return jax.jit(step, static_argnums=0, donate_argnums=2, compiler_options=dict(options))


def _step(
    graphdef: nnx.GraphDef[CausalLM],
    sampling: Sampling,
    state: nnx.State,
    cache: Cache,
    tokens: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Reads the first `counts` i32[batch] tokens of each row and draws the next token.

    Returns:
      The drawn tokens i32[batch], whether the logits of each row are finite bool[batch], and the
      updated cache.
    """
    model = nnx.merge(graphdef, state)
    hidden, cache = model.extend(tokens, cache, counts)
    last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
    logits = model.logits(last)
    drawn, finite = sampling.draw(logits, cache.lengths), jnp.isfinite(logits).all(axis=-1)
    if model.config.sharding is not None:
        everywhere = model.config.sharding.everywhere
        drawn, finite = jax.lax.with_sharding_constraint((drawn, finite), everywhere)
    return drawn, finite, cache
