"""The compiled programs of a server, and the arrays that they change.

On GPUs, XLA launches a program's kernels as a CUDA graph, which the host must update if the address
of any array has changed. For a decoding step, this can take longer than the device takes for the
step. So all arrays that outlive a program keep their addresses: a program that changes an array
writes the result into the memory of the old one, which it is given (`donate_argnums`). Otherwise
even XLA's temporary memory would get another address, next to the results that are still in use.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from jax_dora.bank import DECODING_OPTIONS
from jax_dora.lm.models import Cache, CausalLM, DecoderConfig, DecoderSharding, make_cache
from jax_dora.lm.models.logits_processors import LogitsProcessors, draw_processed
from jax_dora.lm.models.sampling import (
    GREEDY,
    DrawFeatures,
    Drawn,
    RowSettings,
    draw,
    logprobs_of,
)

# The number of tokens of prompts whose logits are in memory at a time.
SCORED = 64
# A result may be read until this number of further programs has run: two of the engine's turns.
RESULTS = 4


class RowArrays(NamedTuple):
    """The arrays of all rows that the programs change."""

    cache: Cache
    logits: jax.Array  # [rows, vocab], of the token after the last one in the cache
    tokens: jax.Array  # i32[rows], the latest tokens
    adapters: jax.Array  # i32[rows]: slots of the bank, -1 for the base model
    settings: RowSettings
    active: jax.Array  # i32[rows]: 1 in the rows that the latest program adds tokens to, else 0
    processors: LogitsProcessors  # used while a row's settings need them
    hidden: jax.Array  # [≥ chunk, hidden], of the tokens of the latest pieces of prompts
    drawn: tuple[Drawn, ...]  # the latest results, the oldest first


Program = Callable[..., Any]


@functools.cache
def model_programs(
    graphdef: nnx.GraphDef[CausalLM], options: tuple[tuple[str, Any], ...]
) -> tuple[Program, Program, Program]:
    """Returns the prefill program, with these compiler options, and those of `decode` and `score`.

    The programs are specific to one model definition. A program that takes the definition as a
    static argument would compare it in every call, which took a tenth of the host's time.
    """
    functions = _prefill, _decode, _score
    read, step, score = (functools.partial(function, graphdef) for function in functions)
    return (
        jax.jit(read, donate_argnums=(2, 3, 6), compiler_options=dict(options)),
        jax.jit(step, donate_argnums=(2, 3), compiler_options=DECODING_OPTIONS),
        jax.jit(score),
    )


@functools.partial(jax.jit, static_argnums=range(5))
def empty_rows(
    config: DecoderConfig, rows: int, capacity: int, chunk: int, kv_cache: str | None
) -> RowArrays:
    """Returns the arrays of rows without a request."""
    logits = jnp.zeros((rows, config.vocab_size), config.dtype)
    zeros = jnp.zeros((rows,), jnp.int32)
    settings = jax.tree.map(jnp.asarray, RowSettings.of([GREEDY] * rows))
    # XLA would compute the largest of constant logits when it compiles, which takes minutes.
    drawn = draw(jax.lax.optimization_barrier(logits), settings, zeros, DrawFeatures())
    cache = make_cache(config, rows, capacity, kv_cache)
    processors = LogitsProcessors.of([GREEDY] * rows, [()] * rows, [()] * rows, capacity)
    processors = jax.tree.map(jnp.asarray, processors)
    hidden = jnp.zeros((chunk, config.hidden_size), config.dtype)
    arrays = cache, logits, zeros, zeros - 1, settings, zeros, processors, hidden
    return RowArrays(*_constrain(config.sharding, *arrays, (drawn,) * RESULTS))


def _constrain(sharding: DecoderSharding | None, *results: Any) -> Any:
    """Returns a program's results with the shardings that the next program expects.

    Keys and values are sharded over their heads, and everything else is replicated.
    """
    if sharding is None:
        return results
    heads, replicated = cast(Any, (sharding.heads, sharding.everywhere))
    cache = Cache(heads, heads, replicated)
    shardings = tuple(cache if isinstance(one, Cache) else replicated for one in results)
    return jax.lax.with_sharding_constraint(results, shardings)


def _prefill(
    graphdef: nnx.GraphDef[CausalLM],
    state: nnx.State,
    bank: Any,
    cache: Cache,
    logits: jax.Array,
    adapters: jax.Array,
    pieces: tuple[jax.Array, jax.Array],
    all_hidden: jax.Array,
) -> tuple[jax.Array, Cache, jax.Array]:
    """Adds pieces of prompts to the cache.

    They are tokens i32[pieces, width], and i32[3, pieces] with the pieces' rows, numbers of tokens
    and start positions. Returns the logits, the cache and `all_hidden` with what they change.
    """
    tokens, places = pieces
    rows, counts, starts = places
    all_rows = cache.lengths.shape[0]
    # Padding has the first piece's adapter. With the base model's -1, the batch would be a mix for
    # which XLA computes products in addition to the kernels.
    adapters = adapters[jnp.where(rows < all_rows, rows, rows[:1])]
    model = nnx.merge(graphdef, state)
    model = model if bank is None else jax_dora.with_bank(model, bank, adapters)
    cache = cache._replace(lengths=cache.lengths.at[rows].set(starts, mode="drop"))
    hidden, cache = model.extend(tokens, cache, counts, rows)
    logits = logits.at[rows].set(model.last_logits(hidden, counts), mode="drop")
    all_hidden = all_hidden.at[: tokens.size].set(hidden.reshape(tokens.size, -1))
    return _constrain(model.config.sharding, logits, cache, all_hidden)


def _score(
    graphdef: nnx.GraphDef[CausalLM], state: nnx.State, hidden: jax.Array, following: jax.Array
) -> Any:
    """Returns the probabilities of tokens [blocks, SCORED] that follow those of hidden states.

    They are the last three fields of `Drawn`, with blocks * SCORED rows.
    """
    model = nnx.merge(graphdef, state)
    hidden = hidden[: following.size].reshape(*following.shape, -1)

    def block(one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        return logprobs_of(model.logits(one[0]).astype(jnp.float32), one[1])

    blocks = jax.lax.map(block, (hidden, following))
    results = (one.reshape(following.size, *one.shape[2:]) for one in blocks)
    return _constrain(model.config.sharding, *results)


def _decode(
    graphdef: nnx.GraphDef[CausalLM],
    state: nnx.State,
    bank: Any,
    cache: Cache,
    logits: jax.Array,
    adapters: jax.Array,
    latest: jax.Array,
    active: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Adds the latest token of each active row to the cache."""
    adapters = jnp.where(active > 0, adapters, -1)
    model = nnx.merge(graphdef, state)
    # Unrolled, since a loop would copy each layer's weights out of the stack in every step.
    model.model.config = dataclasses.replace(model.config, unroll=True)
    model = model if bank is None else jax_dora.with_bank(model, bank, adapters)
    values, cache = model.next_logits(latest[:, None], cache, active)
    logits = _written(logits, values)
    return _constrain(model.config.sharding, logits, cache)


@functools.partial(jax.jit, static_argnums=range(2), donate_argnums=(6, 7, 8))
def draw_rows(
    sharding: DecoderSharding | None,
    features: DrawFeatures,
    logits: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    settings: RowSettings,
    latest: jax.Array,
    old: Drawn,
    processors: LogitsProcessors | None,
) -> tuple[jax.Array, Drawn, LogitsProcessors | None]:
    """Returns the latest token of each row, the tokens drawn for all rows, and the processors.

    JAX gives the memory of the last three arguments to the results, in this order.
    """
    drawn, processors = draw_processed(logits, settings, positions, features, processors, active)
    latest = jnp.where(active > 0, drawn.tokens, latest)
    return _constrain(sharding, latest, _written(old, drawn), processors)


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(old: Any, new: Any) -> Any:
    """Returns the arrays `new`, in the memory of `old`."""
    return _written(old, new)


def _written(old: Any, new: Any) -> Any:
    """Returns `new`, as values that are written over those of `old`.

    With a use of `old`, JAX passes it to the program.
    """
    return jax.tree.map(lambda to, values: to.at[:].set(values), old, new)


@functools.partial(jax.jit, donate_argnums=0)
def write_row(old: Any, row: jax.Array, new: Any) -> Any:
    """Returns the arrays of all rows with one row of `new`, arrays of a single row."""
    return jax.tree.map(lambda to, values: to.at[row].set(values[0]), old, new)


@functools.partial(jax.jit, donate_argnums=0)
def wipe(cache: Cache, row: jax.Array) -> Cache:
    """Sets the keys and values of a row to zero."""
    return cache.wiped(row)
