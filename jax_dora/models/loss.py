"""Cross-entropy of the next token, with logits only where the loss is taken."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.models.model import CausalLM


class Loss(NamedTuple):
    """total / weight is the mean; the two are apart so that micro-batches can be added up."""

    total: jax.Array  # f32[]: weighted sum of the cross-entropies, in nats
    weight: jax.Array  # f32[]: sum of the weights


def last_tokens_loss(
    model: CausalLM, tokens: jax.Array, last: int, *, chunk: int | None = None
) -> Loss:
    """Returns the loss of the last `last` tokens of every row of `tokens` i32[batch, time], each
    predicted from the tokens before it.

    Args:
      model, tokens: the model and what it reads; the last token is a target only.
      last: at least 1 and less than time.
      chunk: tokens whose logits exist at a time; all of them if not given.

    Raises:
      ValueError: `last` is out of range.
    """
    time = tokens.shape[1]
    if not 1 <= last < time:
        raise ValueError(f"last is {last}; expected at least 1 and less than the {time} tokens")
    hidden = model.model(tokens[:, :-1])[:, -last:]
    targets = tokens[:, -last:]
    weights = jnp.ones(targets.shape, jnp.float32)
    return _cross_entropy(model.logits, hidden, targets, weights, chunk)


def next_token_loss(
    model: CausalLM,
    tokens: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk: int | None = 1024,
) -> Loss:
    """Returns the loss of targets i32[batch, time], weighted by weights f32[batch, time].

    Tokens of weight 0 are moved behind the others, and chunks that hold nothing else are skipped:
    at most `chunk` logits are ever computed in vain.

    Args:
      model, tokens, positions, segment_ids: as in `CausalLM.__call__`.
      targets: the token that should follow each token.
      weights: 0 where a token's loss does not count.
      chunk: tokens whose logits exist at a time; all of them if None.
    """
    hidden = model.model(tokens, positions, segment_ids)
    return _cross_entropy(model.logits, hidden, targets, weights, chunk)


def _cross_entropy(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk: int | None,
) -> Loss:
    hidden = hidden.reshape(-1, hidden.shape[-1])
    targets, weights = targets.reshape(-1), weights.reshape(-1).astype(jnp.float32)
    count = targets.shape[0]
    weight = jnp.sum(weights)
    if chunk is None or chunk >= count:
        return Loss(_chunk_total(head, hidden, targets, weights), weight)

    order = jnp.argsort(weights == 0, stable=True)
    # Padding repeats the first token at weight 0.
    order = jnp.concatenate((order, jnp.zeros((-count % chunk,), order.dtype)))
    weights = weights[order].at[count:].set(0).reshape(-1, chunk)
    hidden = hidden[order].reshape(-1, chunk, hidden.shape[-1])
    targets = targets[order].reshape(-1, chunk)

    # Around the cond: what leaves a branch to be kept would be kept for every chunk, and the head's
    # kernel is among it.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(hidden, targets, weights):
        return lax.cond(
            jnp.any(weights != 0),
            lambda: _chunk_total(head, hidden, targets, weights),
            lambda: jnp.zeros((), jnp.float32),
        )

    def add(total, chunk):
        return total + one_chunk(*chunk), None

    total, _ = lax.scan(add, jnp.zeros((), jnp.float32), (hidden, targets, weights))
    return Loss(total, weight)


def _chunk_total(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    logits = head(hidden).astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    cross_entropy = jax.nn.logsumexp(logits, axis=-1) - target_logits
    # A token that does not count may have any loss, infinity included.
    return jnp.sum(jnp.where(weights == 0, 0, weights * cross_entropy))
