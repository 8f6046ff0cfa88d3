"""The next token of every row, each by its own request's wishes.

A row's draw depends on its logits, its seed and its place in the text, and on no other row: what
other rows ask for decides only whether work is left out whose result would not be used.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.serve.request import TOP_LOGPROBS


class Wishes(NamedTuple):
    """What the requests in the rows of a batch ask for; an array each."""

    adapters: jax.Array  # i32[rows]: slots of the bank, -1 for the base alone
    seeds: jax.Array  # u32[rows, 2]
    temperatures: jax.Array  # f32[rows]
    top_p: jax.Array  # f32[rows]
    logprobs: jax.Array  # bool[rows]

    def of(self, rows: jax.Array) -> "Wishes":
        """Returns the wishes of some rows; a row that does not exist asks for the base and the
        likeliest token."""
        take = {"mode": "fill", "fill_value": 0}
        adapters = self.adapters.at[rows].get(mode="fill", fill_value=-1)
        return Wishes(adapters, *(one.at[rows].get(**take) for one in self[1:]))


class Drawn(NamedTuple):
    """The tokens drawn, and what is told about them; the last three are zero where nobody asks."""

    tokens: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows]: whether the row's logits are numbers
    logprobs: jax.Array  # f32[rows]
    likeliest: jax.Array  # i32[rows, TOP_LOGPROBS]
    their_logprobs: jax.Array  # f32[rows, TOP_LOGPROBS]


def draw(logits: jax.Array, wishes: Wishes, positions: jax.Array) -> Drawn:
    """Returns the next tokens from logits [rows, vocab], for these places i32[rows]."""
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    samples = wishes.temperatures > 0
    sampled = lax.cond(
        jnp.any(samples), lambda: _sample(logits, wishes, positions), lambda: jnp.zeros_like(best)
    )
    tokens = jnp.where(samples, sampled, best)
    told = lax.cond(
        jnp.any(wishes.logprobs), lambda: _logprobs(logits, tokens), lambda: _no_logprobs(logits)
    )
    return Drawn(tokens, jnp.all(jnp.isfinite(logits), axis=-1), *told)


def _sample(logits: jax.Array, wishes: Wishes, positions: jax.Array) -> jax.Array:
    temperatures = jnp.where(wishes.temperatures > 0, wishes.temperatures, 1.0)[:, None]
    # From the highest down, so that no temperature makes two infinities of them.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperatures
    top_p = wishes.top_p[:, None]
    least = lax.cond(
        jnp.any((wishes.temperatures > 0) & (wishes.top_p < 1)),
        lambda: jnp.where(top_p < 1, _least_kept(logits, top_p), -jnp.inf),
        lambda: jnp.full_like(top_p, -jnp.inf),
    )
    kept = jnp.where(logits >= least, logits, -jnp.inf)
    keys = jax.random.wrap_key_data(wishes.seeds, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


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


def _no_logprobs(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = logits.shape[0]
    return (
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, TOP_LOGPROBS), jnp.int32),
        jnp.zeros((rows, TOP_LOGPROBS), jnp.float32),
    )
