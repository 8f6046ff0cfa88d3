"""Runs the programs of a server's model on the rows of its requests.

Each row of the cache serves one request at a time. `ModelRunner.prefill` adds pieces of prompts to
some rows, and `ModelRunner.decode` adds the latest token of every active row. A separate program
then draws each row's next token, so that sampling settings do not change how logits are computed.

All shapes are fixed from the start. Therefore a row's result depends only on the program and the
row itself, and nothing is compiled after `warm_up`.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_dora
from jax_dora.bank import DECODING_OPTIONS, MOST_PROMPT_TOKENS, AdapterStore
from jax_dora.lm.models import CausalLM
from jax_dora.lm.models.decoder import for_inference, loop_options
from jax_dora.lm.models.logits_processors import LogitsProcessors
from jax_dora.lm.models.sampling import (
    GREEDY,
    DrawFeatures,
    Drawn,
    RowSettings,
    Sampling,
)
from jax_dora.lm.serve import programs
from jax_dora.lm.serve.programs import SCORED, Program, RowArrays
from jax_dora.lm.serve.request import Request

# The projections in the layers. The server supports no adapters on embedding and head.
PATH = "model/layers/.*_proj"
# The largest header that safetensors reads.
HEADER_BYTES = 100_000_000


def make_store(
    model: CausalLM, slots: int, max_rank: int, host_bytes: int | None = None
) -> AdapterStore:
    """Returns an empty store, with a bank for a model without adapters."""
    bank = jax_dora.AdapterBank(model, slots, max_rank, path=PATH)
    return AdapterStore(bank, host_bytes=host_bytes)


def largest_file(bank: jax_dora.AdapterBank) -> int:
    """Returns the size in bytes that no file of an adapter for the bank exceeds, even in fp64."""
    numbers = 0
    for one in bank.projections.values():
        n_in, out = one.sizes
        numbers += math.prod(one.stack.shape) * (bank.max_rank * (n_in + out) + out)
    return 8 * numbers + HEADER_BYTES


def warm_up(store: AdapterStore, model: CausalLM) -> None:
    """Compiles the programs that change slots, by loading and evicting an adapter of zeros."""
    layers, n_in, out = model.model.layers.mlp.up_proj.kernel.shape
    path = "model/layers/mlp/up_proj"
    arrays = {
        "lora_a": np.zeros((layers, n_in, 1), np.float32),
        "lora_b": np.zeros((layers, 1, out), np.float32),
        "magnitude": np.ones((layers, out), np.float32),
    }
    rule = jax_dora.DoRARule(re.escape(path), rank=1, alpha=1.0)
    store.add("zeros", jax_dora.Adapter((rule,), {path: arrays}))
    store.acquire("zeros")
    store.remove("zeros")
    store.release("zeros")
    jax.block_until_ready(store.bank)


class PromptPiece(NamedTuple):
    """A piece of the prompt of the request in `row`, which starts at position `start`.

    `following` has the token of the prompt that follows each token of the piece, if there is one.
    """

    row: int
    tokens: Sequence[int]
    start: int
    following: Sequence[int] = ()


class Row(NamedTuple):
    """What the host knows about a row; by default, that it has no request."""

    slot: int = -1  # of its adapter in the bank; -1 for the base model
    sampling: Sampling = GREEDY
    logprobs: bool = False


class ModelRunner:
    """Runs a model for a fixed number of rows.

    The arrays that `prefill` and `decode` return are deleted by the `programs.RESULTS`-th call
    after them.

    Attributes:
      rows: the number of rows.
      capacity: the maximum number of tokens of a prompt and its answer together.
      widths: the widths of the prefill programs, in descending order. The width is the number of
        tokens that a program adds to a row.
      prompts_per_call: the number of prompts that a prefill program processes at once, by width.
    """

    def __init__(
        self,
        model: CausalLM,
        adapters: AdapterStore | None,
        rows: int,
        capacity: int,
        chunk: int,
        kv_cache: str | None = None,
    ) -> None:
        """
        Args:
          model: the base model.
          adapters: the adapters; None for the base model only.
          rows: the number of requests at a time.
          capacity: the maximum number of tokens of a prompt and its answer together.
          chunk: the number of prompt tokens that one call of `prefill` processes.
          kv_cache: the format of cached keys and values, the same as in `make_cache`.
        """
        graphdef, self._state = for_inference(model)
        self._sharding = model.config.sharding
        self._adapters = adapters
        self.rows, self.capacity = rows, capacity
        chunk = min(chunk, capacity)
        options = loop_options(self._state)
        if chunk <= MOST_PROMPT_TOKENS:
            options += tuple(DECODING_OPTIONS.items())
        self._prefill, self._decode, self._score = programs.model_programs(graphdef, options)
        self.widths = tuple(_widths(chunk))
        self.prompts_per_call = {width: min(chunk // width, rows) for width in self.widths}
        self._arrays = programs.empty_rows(
            model.config, rows, capacity, math.ceil(chunk / SCORED) * SCORED, kv_cache
        )
        self._rows = [Row()] * rows
        # The features that the settings on the device need; None if `_rows` has changed since.
        self._features: DrawFeatures | None = None
        self._active_rows: tuple[int, ...] = ()
        self._needs_processors = False
        self._no_processors = LogitsProcessors.of([GREEDY], [()], [()], capacity)

    def width(self, left: int) -> int:
        """Returns the width of the prefill program for a prompt with `left` remaining tokens.

        It does not depend on other prompts, so that a prompt is always split at the same positions.
        """
        return next((one for one in reversed(self.widths) if one >= left), self.widths[0])

    def assign_row(self, row: int, request: Request, slot: int, ends: Collection[int]) -> None:
        """Assigns a row to a request.

        Args:
          slot: the slot of its adapter in the bank, or -1.
          ends: the tokens that end its answer.
        """
        self._rows[row] = Row(slot, request.sampling, request.logprobs is not None)
        self._features = None
        if request.sampling.needs_processors:
            one = LogitsProcessors.of([request.sampling], [request.prompt], [ends], self.capacity)
            self._set_processors(row, one)

    def free_row(self, row: int) -> None:
        """Frees a row, and sets its part of the cache to zero.

        Masked positions have an attention probability of 0, but 0 times NaN is NaN. So values of a
        failed request must not remain in the cache.
        """
        if self._rows[row].sampling.needs_processors:
            self._set_processors(row, self._no_processors)
        self._rows[row] = Row()
        self._features = None
        self._replace(cache=programs.wipe(self._arrays.cache, np.int32(row)))

    def prefill(self, pieces: Sequence[PromptPiece], width: int) -> Drawn:
        """Adds pieces of prompts to the cache, and draws the token after each piece."""
        count = self.prompts_per_call[width]
        tokens = np.zeros((count, width), np.int32)
        # Padding has the number of a row that does not exist.
        places = np.full((3, count), [[self.rows], [0], [0]], np.int32)
        for number, piece in enumerate(pieces):
            tokens[number, : len(piece.tokens)] = piece.tokens
            places[:, number] = piece.row, len(piece.tokens), piece.start
        self._activate(tuple(piece.row for piece in pieces))
        return self._run(self._prefill, (tokens, places), self._arrays.hidden)

    def score(self, pieces: Sequence[PromptPiece], width: int) -> Any:
        """Returns the probabilities of what follows each token of the latest pieces.

        They are the last three fields of `Drawn`. Those of token t of piece p are in row
        p * width + t.
        """
        following = np.zeros((math.ceil(self.prompts_per_call[width] * width / SCORED), SCORED))
        flat = following.reshape(-1)
        for number, piece in enumerate(pieces):
            flat[number * width :][: len(piece.following)] = piece.following
        return self._score(self._state, self._arrays.hidden, following.astype(np.int32))

    def decode(self, rows: Iterable[int]) -> Drawn:
        """Draws the next token of each of these rows. The results for other rows are arbitrary."""
        self._activate(tuple(rows))
        return self._run(self._decode, self._arrays.tokens, self._arrays.active)

    def warm_up(self) -> None:
        """Compiles all programs, by calling them without rows."""
        # The first program is called again. If the weights are committed to a device, then its
        # first call returns a committed cache, and for a committed cache it is compiled again.
        for width in (*self.widths, self.widths[0]):
            self.prefill((), width)
            self.score((), width)
        for self._needs_processors in (False, True):
            for self._features in DrawFeatures.all():
                self.decode(())
        self._set_processors(0, self._no_processors)
        self.free_row(0)
        # Compiles the programs for changed rows and settings.
        self.decode((0,))
        self.free_row(0)
        jax.block_until_ready(self._arrays)

    def _activate(self, rows: tuple[int, ...]) -> None:
        """Makes these rows the active ones."""
        if rows != self._active_rows:
            active = np.zeros((self.rows,), np.int32)
            active[list(rows)] = 1
            self._active_rows = rows
            self._replace(active=programs.overwrite(self._arrays.active, active))

    def _replace(self, **arrays: Any) -> None:
        self._arrays = self._arrays._replace(**arrays)

    def _set_processors(self, row: int, one: LogitsProcessors) -> None:
        processors = programs.write_row(self._arrays.processors, np.int32(row), one)
        self._replace(processors=processors)

    def _run(self, program: Program, *arguments: Any) -> Drawn:
        """Runs a program, and draws the next tokens of the active rows."""
        if self._features is None:
            slots, samplings, logprobs = zip(*self._rows, strict=True)
            self._features = DrawFeatures.needed_by(samplings, logprobs=any(logprobs))
            self._needs_processors = any(one.needs_processors for one in samplings)
            old = self._arrays.adapters, self._arrays.settings
            new = np.array(slots, np.int32), RowSettings.of(samplings)
            adapters, settings = programs.overwrite(old, new)
            self._replace(adapters=adapters, settings=settings)
        cache, logits, tokens, adapters, settings, active, processors, hidden, drawn = self._arrays
        bank = None if self._adapters is None else self._adapters.bank
        logits, cache, *changed = program(self._state, bank, cache, logits, adapters, *arguments)
        values = logits, cache.lengths, active, settings
        [hidden] = changed or [hidden]
        used = processors if self._needs_processors else None
        oldest, *others = drawn
        tokens, drawn, used = programs.draw_rows(
            self._sharding, self._features, *values, tokens, oldest, used
        )
        self._arrays = RowArrays(
            cache,
            logits,
            tokens,
            adapters,
            settings,
            active,
            processors if used is None else used,
            hidden,
            (*others, drawn),
        )
        return drawn


def _widths(chunk: int) -> Iterable[int]:
    """Yields the chunk, a quarter of it, and so on, down to 16 tokens.

    Long prompts are processed in pieces, and several short prompts at once, so that all calls are
    about the same amount of work.
    """
    yield chunk
    while chunk > 16:
        chunk = max(chunk // 4, 16)
        yield chunk
