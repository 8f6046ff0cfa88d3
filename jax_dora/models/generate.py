"""Texts, token by token: the likeliest, or sampled."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dora.models.cache import Cache, make_cache
from jax_dora.models.decoder import CausalLM, for_inference, loop_options

# Capacities are multiples of this, so that prompts of similar lengths share a compiled program.
_BLOCK = 64


class NotFiniteError(ArithmeticError):
    """Logits that are NaN or infinite, of which no token can be drawn."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings by which the next token is drawn; by default the likeliest is taken.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: of the so many likeliest tokens alone; 0 for all.
      top_p: of the likeliest tokens alone that have this probability together (arXiv 1904.09751).
      seed: of the draws. A row's draws depend on the seed and its place in the batch alone.

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
            "top_p": (0 < self.top_p <= 1, "above 0, to 1"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
        }
        for name, (is_right, told) in ranges.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and is_right):
                raise ValueError(f"{name} is {value}; expected a number {told}")

    def draw(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns tokens i32[batch] from logits [batch, vocab], for these places i32[batch]."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Of equal logits the first comes first.
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
        keys = jax.vmap(lambda row, place: jax.random.fold_in(jax.random.fold_in(key, row), place))
        drawn = jax.vmap(jax.random.categorical)(keys(rows, positions), logits)
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate_steps(
    model: CausalLM, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling | None = None
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, i32[batch], `count` times.

    Args:
      model: with or without adapters; dropout plays no part.
      prompts: the tokens of each row, at least one.

    Raises:
      ValueError: there is no prompt, an empty one, or one of tokens that the model does not know.
      NotFiniteError: a row's logits are not finite.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"prompts have {[len(one) for one in prompts]} tokens; expected one or more of each row"
        )
    size = model.config.vocab_size
    if odd := [token for prompt in prompts for token in prompt if not 0 <= token < size]:
        raise ValueError(f"prompts have token {odd[0]}; expected 0 to {size - 1}")
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
    tokens, given = jnp.asarray(padded), jnp.asarray(lengths)
    for number in range(count):
        drawn, finite, cache = program(sampling, state, cache, tokens, given)
        if not np.asarray(finite).all():
            raise NotFiniteError(
                f"the logits of row {np.argmin(finite)} at its new token {number} are not finite; "
                "expected numbers to draw from: look for NaN in the model's weights and its "
                f"adapter, and for overflows in {jnp.dtype(model.config.dtype).name}"
            )
        yield np.asarray(drawn)
        tokens, given = drawn[:, None], jnp.ones_like(given)


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling | None = None,
    *,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """Returns the continuation of each prompt: up to `count` tokens, without the one that ends it.

    Args:
      model, prompts, sampling: as in `generate_steps`.
      ends: tokens that end a text.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    for tokens in generate_steps(model, prompts, count, sampling):
        for row in sorted(going):
            if tokens[row] in ends:
                going.discard(row)
            else:
                texts[row].append(int(tokens[row]))
        if not going:
            break
    return texts


@functools.cache
def _program(graphdef: nnx.GraphDef[CausalLM], options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns `_step` for one model."""
    step = functools.partial(_step, graphdef)
    return jax.jit(step, static_argnums=0, donate_argnums=2, compiler_options=dict(options))


def _step(
    graphdef: nnx.GraphDef[CausalLM],
    sampling: Sampling,
    state: nnx.State,
    cache: Cache,
    tokens: jax.Array,
    given: jax.Array,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Reads `given` i32[batch] tokens of each row, and draws the next; returns these, whether each
    row's logits are finite, and the cache."""
    model = nnx.merge(graphdef, state)
    hidden, cache = model.extend(tokens, cache, given)
    last = jnp.take_along_axis(hidden, (given - 1)[:, None, None], axis=1)[:, 0]
    logits = model.logits(last)
    drawn, finite = sampling.draw(logits, cache.lengths), jnp.isfinite(logits).all(axis=-1)
    if model.config.sharding is not None:
        everywhere = model.config.sharding.everywhere
        drawn, finite = jax.lax.with_sharding_constraint((drawn, finite), everywhere)
    return drawn, finite, cache
