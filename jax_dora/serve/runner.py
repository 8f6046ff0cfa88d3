"""The arrays that a server computes on, and the programs that it consists of.

A row of the cache is a slot for one request. `read` adds a piece of prompts to some rows, `step`
the latest token of every row that is going; a program of its own then draws each row's next token,
so that what requests ask for changes nothing of how logits are computed. All shapes are fixed when
this is made: a row's result depends on the program and on the row, never on the others', and
nothing is compiled after `warm_up`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from jax_dora.bank import DECODING_OPTIONS
from jax_dora.bank.slot_cache import SlotCache
from jax_dora.models import Cache, CausalLM, DecoderConfig, DecoderSharding, make_cache
from jax_dora.models.decoder import for_inference, loop_options
from jax_dora.serve.draw import DrawFeatures, Drawn, DrawSettings, draw
from jax_dora.serve.request import Request

# The layers' projections; a head and an embedding have no adapters here.
PATH = "model/layers/.*_proj"


def make_bank(model: CausalLM, slots: int, max_rank: int) -> SlotCache:
    """Returns the slots of an empty bank beside a model without adapters."""
    return SlotCache(jax_dora.AdapterBank(model, slots, max_rank, path=PATH))


def warm_up(bank: SlotCache, model: CausalLM) -> None:
    """Compiles what changes slots, with an adapter of zeros that is gone afterwards."""
    layers, n_in, out = model.model.layers.mlp.up_proj.kernel.shape
    path = "model/layers/mlp/up_proj"
    arrays = {
        "lora_a": np.zeros((layers, n_in, 1), np.float32),
        "lora_b": np.zeros((layers, 1, out), np.float32),
        "magnitude": np.ones((layers, out), np.float32),
    }
    rule = jax_dora.DoRARule(re.escape(path), rank=1, alpha=1.0)
    bank.bank = bank.bank.load(0, jax_dora.Adapter((rule,), {path: arrays})).evict(0)
    jax.block_until_ready(bank.bank)


class PromptPiece(NamedTuple):
    """A piece of a prompt: `tokens` of the request in `row`, before which stand `begin` others."""

    row: int
    tokens: Sequence[int]
    begin: int


class Logits(NamedTuple):
    """The logits that the next tokens are drawn from, a row of the cache each. Those that are not
    `active` are zeros, or have no meaning."""

    values: jax.Array  # [rows, vocab]
    positions: jax.Array  # i32[rows]: of the tokens that are drawn, in their texts
    active: jax.Array  # i32[rows]


Program = Callable[..., tuple[Logits, Cache]]


class ModelRunner:
    """The rows, on the device.

    Attributes:
      widths: of the programs that read prompts, falling: tokens that a row gets at once.
      together: how many prompts each reads at once, by its width.
    """

    def __init__(
        self, model: CausalLM, bank: SlotCache | None, rows: int, capacity: int, chunk: int
    ) -> None:
        """Makes rows for `rows` requests of `capacity` tokens, beside a model without adapters;
        `chunk` of their prompts are read at a time."""
        graphdef, self._state = for_inference(model)
        self._prefill, self._decode = _programs(graphdef, loop_options(self._state))
        self._sharding = model.config.sharding
        self._bank = bank
        self.rows, self.capacity = rows, capacity
        chunk = min(chunk, capacity)
        self.widths = tuple(_widths(chunk))
        self.prompts_per_call = {width: min(chunk // width, rows) for width in self.widths}
        self._cache, self._tokens = _empty(model.config, rows, capacity)
        self._host = _default_settings(rows)
        self._sent: tuple[DrawFeatures, DrawSettings] | None = None
        self._going: tuple[int, ...] | None = None

    def width(self, left: int) -> int:
        """Returns the width of the program for a prompt with so many tokens left to read.

        It depends on the prompt alone, so that a prompt is always cut in the same places.
        """
        return next((one for one in reversed(self.widths) if one >= left), self.widths[0])

    def assign_row(self, row: int, request: Request, slot: int) -> None:
        """Puts a request's settings into a row; `slot` is its adapter's in the bank, or -1."""
        style = request.sampling
        seed = np.array([style.seed >> 32, style.seed & 0xFFFF_FFFF], np.uint32)
        values = (slot, seed, style.temperature, style.top_p, style.logprobs is not None)
        for array, value in zip(self._host, values, strict=True):
            array[row] = value
        self._sent = None

    def free_row(self, row: int) -> None:
        """Frees a row, and wipes it: what is masked counts with a probability of 0, which makes 0
        of any number but of NaN."""
        for array, value in zip(self._host, _default_settings(1), strict=True):
            array[row] = value[0]
        self._sent = None
        self._cache = _wipe(self._cache, np.int32(row))

    def prefill(self, parts: Sequence[PromptPiece], width: int) -> Drawn:
        """Reads pieces of prompts and draws the token after each."""
        count = self.prompts_per_call[width]
        tokens = np.zeros((count, width), np.int32)
        # A row that there is not: padding.
        places = np.full((3, count), [[self.rows], [0], [0]], np.int32)
        for number, part in enumerate(parts):
            tokens[number, : len(part.tokens)] = part.tokens
            places[:, number] = part.row, len(part.tokens), part.begin
        return self._run(self._prefill, tokens, places)

    def decode(self, going: Iterable[int]) -> Drawn:
        """Draws the next token of these rows; what is drawn for other rows has no meaning."""
        rows = tuple(going)
        if rows != self._going:
            active = np.zeros((self.rows,), np.int32)
            active[list(rows)] = 1
            self._going, self._active = rows, jnp.array(active)
        return self._run(self._decode, self._tokens, self._active)

    def warm_up(self) -> None:
        """Compiles every program, by calls for rows that do not exist."""
        # The first one again: beside weights that are committed to a device it returns a cache that
        # is committed too, and for such a cache it is another program.
        for width in (*self.widths, self.widths[0]):
            self.prefill((), width)
        settings = self._sent_settings()[1]
        for features in DrawFeatures.all():
            self._sent = features, settings
            self.decode(())
        self.free_row(0)
        jax.block_until_ready(self._cache)

    def _sent_settings(self) -> tuple[DrawFeatures, DrawSettings]:
        """Returns the rows' settings on the device, and what they need."""
        if self._sent is None:
            # Copies: the host's go on changing.
            copies = DrawSettings(*(one.copy() for one in self._host))
            self._sent = DrawFeatures.by(copies), jax.device_put(copies)
        return self._sent

    def _run(self, program: Callable[..., tuple[Logits, Cache]], *given: Any) -> Drawn:
        features, settings = self._sent_settings()
        bank = None if self._bank is None else self._bank.bank
        logits, self._cache = program(self._state, bank, self._cache, settings.adapters, *given)
        drawn, self._tokens = _draw(self._sharding, features, logits, settings, self._tokens)
        return drawn


@functools.cache
def _programs(
    graphdef: nnx.GraphDef[CausalLM], loop: tuple[tuple[str, Any], ...]
) -> tuple[Program, Program]:
    """Returns the program that reads prompts, with these options of its loop, and the one that
    takes a step, of one model: to compare its definition with others' in every call took a tenth of
    the host's time."""
    read, step = (functools.partial(function, graphdef) for function in (_prefill, _decode))
    return (
        jax.jit(read, donate_argnums=2, compiler_options=dict(loop)),
        jax.jit(step, donate_argnums=2, compiler_options=DECODING_OPTIONS),
    )


def _widths(chunk: int) -> Iterable[int]:
    """Yields the chunk and its quarters down to 16 tokens: short prompts are read several at once,
    long ones piece by piece, and either is about as much work."""
    yield chunk
    while chunk > 16:
        chunk = max(chunk // 4, 16)
        yield chunk


def _default_settings(rows: int) -> DrawSettings:
    """Returns the settings of rows that hold no request, on the host."""
    arrays: dict[str, Any] = {
        "adapters": np.full((rows,), -1, np.int32),
        "seeds": np.zeros((rows, 2), np.uint32),
        "temperatures": np.zeros((rows,), np.float32),
        "top_p": np.ones((rows,), np.float32),
        "logprobs": np.zeros((rows,), np.bool_),
    }
    return DrawSettings(**arrays)


@functools.partial(jax.jit, static_argnums=range(3))
def _empty(config: DecoderConfig, rows: int, capacity: int) -> tuple[Cache, jax.Array]:
    """Returns an empty cache, and the latest token of each row."""
    cache, latest = make_cache(config, rows, capacity), jnp.zeros((rows,), jnp.int32)
    return _placed(config.sharding, cache, latest)


def _placed(sharding: DecoderSharding | None, *results: Any) -> Any:
    """Returns a program's results where the next program takes them: keys and values with their
    heads, the rest on every device."""
    if sharding is None:
        return results
    heads, everywhere = cast(Any, (sharding.heads, sharding.everywhere))
    cache = Cache(heads, heads, everywhere)
    places = tuple(cache if isinstance(one, Cache) else everywhere for one in results)
    return jax.lax.with_sharding_constraint(results, places)


def _prefill(
    graphdef: nnx.GraphDef[CausalLM],
    state: nnx.State,
    bank: Any,
    cache: Cache,
    adapters: jax.Array,
    tokens: jax.Array,
    places: jax.Array,
) -> tuple[Logits, Cache]:
    """Reads tokens [parts, width]; places i32[3, parts] are their rows, counts and beginnings."""
    rows, counts, begins = places
    every = cache.lengths.shape[0]
    # Padding has the first part's: a row of the base would have XLA multiply beside the kernels.
    adapters = adapters[jnp.where(rows < every, rows, rows[:1])]
    model = nnx.merge(graphdef, state)
    model = model if bank is None else jax_dora.with_bank(model, bank, adapters)
    cache = cache._replace(lengths=cache.lengths.at[rows].set(begins, mode="drop"))
    hidden, cache = model.extend(tokens, cache, counts, rows)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    logits = model.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])

    def in_rows(values: jax.Array) -> jax.Array:
        of_all = jnp.zeros((every, *values.shape[1:]), values.dtype)
        return of_all.at[rows].set(values, mode="drop")

    read = Logits(*map(in_rows, (logits, begins + counts, jnp.ones_like(counts))))
    return _placed(model.config.sharding, read, cache)


def _decode(
    graphdef: nnx.GraphDef[CausalLM],
    state: nnx.State,
    bank: Any,
    cache: Cache,
    adapters: jax.Array,
    latest: jax.Array,
    active: jax.Array,
) -> tuple[Logits, Cache]:
    adapters = jnp.where(active > 0, adapters, -1)
    model = nnx.merge(graphdef, state)
    # A loop would copy the weights of each layer out of their stack, for one token to read them.
    model.model.config = dataclasses.replace(model.config, unroll=True)
    model = model if bank is None else jax_dora.with_bank(model, bank, adapters)
    hidden, cache = model.extend(latest[:, None], cache, active)
    logits = Logits(model.logits(hidden[:, 0]), cache.lengths, active)
    return _placed(model.config.sharding, logits, cache)


@functools.partial(jax.jit, static_argnums=range(2), donate_argnums=4)
def _draw(
    sharding: DecoderSharding | None,
    features: DrawFeatures,
    logits: Logits,
    settings: DrawSettings,
    latest: jax.Array,
) -> tuple[Drawn, jax.Array]:
    """Returns the tokens drawn for every row, and the latest token of each."""
    drawn = draw(logits.values, settings, logits.positions, features)
    return _placed(sharding, drawn, jnp.where(logits.active > 0, drawn.tokens, latest))


@functools.partial(jax.jit, donate_argnums=0)
def _wipe(cache: Cache, row: jax.Array) -> Cache:
    return cache._replace(keys=cache.keys.at[:, row].set(0), values=cache.values.at[:, row].set(0))
