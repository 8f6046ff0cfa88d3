"""Generates text token by token, greedily or by sampling."""

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
from jax_dora.lm.models.logits_processors import LogitsProcessors, draw_processed
from jax_dora.lm.models.sampling import GREEDY, DrawFeatures, RowSettings, Sampling

# Capacities are multiples of this, so that prompts of similar lengths share a compiled program.
_BLOCK = 64


class NotFiniteError(ArithmeticError):
    """Raised when logits are NaN or infinite, so that no token can be drawn."""


def generate_steps(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    *,
    ends: Collection[int] = (),
    kv_cache: str | None = None,
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, i32[batch], `count` times.

    The tokens of a row are the same in any batch. In particular, equal prompts get equal tokens,
    unless `sampling` has a setting for each row, with different seeds.

    Args:
      model: a model with or without adapters. Dropout is disabled.
      prompts: the tokens of each row, at least one per row.
      count: the number of tokens to generate.
      sampling: how to draw the tokens of all rows, or of each row; greedy by default.
      ends: tokens that end a text, which are not drawn before `Sampling.min_tokens`.
      kv_cache: the format of cached keys and values: None for the model's dtype, or
        "float8_e4m3fn".

    Raises:
      ValueError: there is no prompt, a prompt is empty, or a token is outside of the vocabulary;
        `sampling` has not one setting for each prompt; `kv_cache` is another format; or `model` is
        abstract.
      NotFiniteError: the logits of a row are not finite.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"prompts have {[len(prompt) for prompt in prompts]} tokens; expected at least one in "
            "each row"
        )
    check_has_values(model, "jax_dora.lm.models.generate", can_trace=False)
    size = model.config.vocab_size
    if isinstance(sampling, Sampling):
        sampling = [sampling] * len(prompts)
    given = {"prompts have": prompts, "logit_bias has": [one.logit_bias for one in sampling]}
    for subject, texts in given.items():
        if invalid := [token for text in texts for token in text if not 0 <= token < size]:
            raise ValueError(f"{subject} token {invalid[0]}; expected 0 to {size - 1}")
    if len(sampling) != len(prompts):
        raise ValueError(
            f"sampling has {len(sampling)} settings; expected one for all prompts, or one for each "
            f"of the {len(prompts)}"
        )
    settings, features = RowSettings.of(sampling), DrawFeatures.needed_by(sampling)
    settings = jax.tree.map(jnp.asarray, settings)
    graphdef, state = for_inference(model)
    program = _program(graphdef, loop_options(state))
    longest = max(map(len, prompts))
    padded = np.zeros((len(prompts), math.ceil(longest / _BLOCK) * _BLOCK), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    capacity = math.ceil((longest + count) / _BLOCK) * _BLOCK
    cache = make_cache(model.config, len(prompts), max(capacity, padded.shape[1]), kv_cache)
    tokens, counts, processors = jnp.asarray(padded), jnp.asarray(lengths), None
    if any(one.needs_processors for one in sampling):
        row_ends = [ends] * len(prompts)
        processors = LogitsProcessors.of(sampling, prompts, row_ends, cache.capacity)
        processors = jax.tree.map(jnp.asarray, processors)
    for number in range(count):
        drawn, finite, cache, processors = program(
            features, state, cache, tokens, counts, settings, processors
        )
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
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    *,
    ends: Collection[int] = (),
    kv_cache: str | None = None,
) -> list[list[int]]:
    """Returns the continuation of each prompt: up to `count` tokens, without the end token.

    Args:
      model, prompts, count, sampling, kv_cache: the same as in `generate_steps`.
      ends: tokens that end a text.

    Raises the same errors as `generate_steps`.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    steps = generate_steps(model, prompts, count, sampling, ends=ends, kv_cache=kv_cache)
    for tokens in steps:
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
    features: DrawFeatures,
    state: nnx.State,
    cache: Cache,
    tokens: jax.Array,
    counts: jax.Array,
    settings: RowSettings,
    processors: LogitsProcessors | None,
) -> tuple[jax.Array, jax.Array, Cache, LogitsProcessors | None]:
    """Reads the first `counts` i32[batch] tokens of each row and draws the next token.

    Returns:
      The drawn tokens i32[batch], whether the logits of each row are finite bool[batch], and the
      updated cache and processors.
    """
    model = nnx.merge(graphdef, state)
    logits, cache = model.next_logits(tokens, cache, counts)
    drawn, processors = draw_processed(
        logits, settings, cache.lengths, features, processors, jnp.ones_like(counts)
    )
    tokens, finite = drawn.tokens, drawn.finite
    if model.config.sharding is not None:
        everywhere = model.config.sharding.everywhere
        tokens, finite = jax.lax.with_sharding_constraint((tokens, finite), everywhere)
    return tokens, finite, cache, processors
