"""Level `serve`: the server's engine against the number of adapters: the base, LoRA and DoRA.

Llama 3 8B's dimensions in bf16, 64 rows. As many clients as rows, each of which asks again when it
has its answer: prompts of 128 tokens, answers of 128. Adapters of ranks 8 to 64 are asked for by
Zipf's law with exponent 1.5, from 64 slots. All but HTTP is in it: queue, loads, text.

    base    no bank
    LoRA    the bank without g
    DoRA    the bank
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bank_adapters import draw_ids, random_adapter
from benchmarks.bank_programs import without_g
from benchmarks.results import Row, over
from benchmarks.step import LLAMA_3_8B, TINY_DECODER
from jax_dora.bank.slot_cache import SlotCache
from jax_dora.finetune.tiny import byte_level_tokenizer
from jax_dora.models import CausalLM, DecoderConfig, make_model
from jax_dora.serve.adapters import ServedAdapter
from jax_dora.serve.engine import Engine
from jax_dora.serve.metrics import Metrics
from jax_dora.serve.request import Piece, Request
from jax_dora.serve.runner import ModelRunner, make_bank, warm_up


class Settings(NamedTuple):
    """The settings of the level; nothing is compiled that they do not ask for.

    Attributes:
      adapters: how many are asked for, one after the other.
      rounds: answers of each client that are timed, after one that is not.
    """

    config: DecoderConfig = LLAMA_3_8B
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    chunk: int = 512
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    adapters: tuple[int, ...] = (1, 8, 64, 256)
    only: tuple[str, ...] = ("base", "DoRA", "LoRA")
    rounds: int = 3


TINY = Settings(
    dataclasses.replace(TINY_DECODER, vocab_size=257),
    rows=3,
    prompt=20,
    answer=4,
    chunk=16,
    slots=2,
    ranks=(1, 5),
    adapters=(1, 3),
    rounds=1,
)


class WithoutG:
    """A bank's slots, whose g no row is multiplied by."""

    def __init__(self, bank: SlotCache) -> None:
        self._slot_cache = bank

    @property
    def bank(self) -> Any:
        return without_g(self._slot_cache.bank)


class Server(NamedTuple):
    """A kind's rows and bank, and what compiling it took."""

    runner: ModelRunner
    bank: SlotCache | None
    compiled: Row


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement."""
    model = make_model(settings.config)
    row: Row = {"rows": settings.rows, "layers": model.config.num_hidden_layers}
    base = None
    if "base" in settings.only:
        server = _server(settings, model, None, "base")
        base = _served(settings, model, server, [])
        yield row | {"kind": "base", "adapters": 0} | server.compiled | base
    kinds = [kind for kind in settings.only if kind != "base"]
    if not kinds:
        return
    bank, begin = make_bank(model, settings.slots, max(settings.ranks)), time.monotonic()
    warm_up(bank, model)
    row["load_compile_s"] = time.monotonic() - begin
    # Whose products have been tuned for the base.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        servers = list(threads.map(lambda kind: _server(settings, model, bank, kind), kinds))
    values = [random_adapter(bank.bank, rank, rank) for rank in settings.ranks]
    for count in settings.adapters:
        for kind, server in zip(kinds, servers, strict=True):
            served = [ServedAdapter(str(one), values[one % len(values)]) for one in range(count)]
            found = row | {"kind": kind, "adapters": count} | server.compiled
            found |= _served(settings, model, server, served)
            yield over(found, base, "of_base", "tokens_per_s")


def _server(settings: Settings, model: CausalLM, bank: SlotCache | None, kind: str) -> Server:
    """Returns a server with the programs that requests take: prompts are read in one piece each,
    and only the program for that is compiled."""
    length = settings.prompt + settings.answer
    of_rows: Any = WithoutG(bank) if bank is not None and kind == "LoRA" else bank
    runner = ModelRunner(model, of_rows, settings.rows, length, settings.chunk)
    runner.widths = (runner.width(settings.prompt),)
    begin = time.monotonic()
    runner.prefill((), runner.widths[0])
    read = time.monotonic() - begin
    runner.warm_up()
    return Server(runner, bank, {"read_compile_s": read, "compile_s": time.monotonic() - begin})


def _served(
    settings: Settings, model: CausalLM, server: Server, served: list[ServedAdapter]
) -> Row:
    """Returns the measurements of the clients, in `settings.rounds` answers each."""
    rng = np.random.default_rng(0)
    metrics = Metrics()
    engine = Engine(
        server.runner,
        server.bank,
        byte_level_tokenizer(),
        (),
        queue=4 * settings.rows,
        metrics=metrics,
    )
    asked = settings.rows * (settings.rounds + 1)
    chosen = draw_ids("zipf", asked, len(served)) if served else None
    vocabulary = model.config.vocab_size
    first: list[float] = []
    ends: list[float] = []

    def ask(number: int) -> None:
        begin = time.monotonic()
        seen: list[float] = []

        def sink(piece: Piece) -> None:
            if not seen:
                seen.append(time.monotonic())
                first.append(seen[0] - begin)
            if piece.finish is not None:
                if piece.finish != "length":
                    raise RuntimeError(f"an answer ended by {piece.finish}: {piece.error}")
                ends.append(time.monotonic())

        prompt = tuple(rng.integers(0, vocabulary, settings.prompt).tolist())
        adapter = served[chosen[number]] if chosen is not None else None
        engine.submit(Request(prompt, settings.answer, sink, adapter=adapter))

    number = 0
    while len(ends) < asked:
        while number < asked and number - len(ends) < settings.rows:
            ask(number)
            number += 1
        engine.turn()
    # The first answer of each client fills the rows, and slots for the first time.
    ends, first = ends[settings.rows - 1 :], first[settings.rows :]
    seconds = ends[-1] - ends[0]
    return {
        "answers": len(ends) - 1,
        "tokens_per_s": (len(ends) - 1) * settings.answer / seconds,
        "first_token_ms": 1e3 * float(np.median(first)),
        "first_token_p90_ms": 1e3 * float(np.percentile(first, 90)),
        "loads": metrics.loaded(),
    }
