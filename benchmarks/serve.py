"""Level `serve`: the throughput of the server's engine by the number of adapters.

    base    no bank
    LoRA    a bank that does not multiply by g
    DoRA    a bank

The model has Llama 3 8B's dimensions, in bf16 or with quantised projections (`qtype`), and 64 rows.
There are as many clients as rows; each sends its next request when it has its answer: prompts of
128 tokens, answers of 128 tokens. The adapters, of ranks 8 to 64, are requested by Zipf's law with
exponent 1.5, and the bank has 64 slots. The engine's queue, adapter loads and text are included,
HTTP is not.

One line is one kind with one number of adapters: answered tokens per second of wall time, `of_base`
(the same divided by that of the base in the same format), the median and the upper tenth of the
time to the first token, the number of adapter loads, and the seconds that compiling took.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import jax_dora
from benchmarks.bank_adapters import draw_ids, random_adapter
from benchmarks.bank_programs import without_g
from benchmarks.results import Row, with_ratio
from benchmarks.step import LLAMA_3_8B, TINY_DECODER
from jax_dora.bank import AdapterStore, StoredAdapter
from jax_dora.lm.finetune.tiny import byte_level_tokenizer
from jax_dora.lm.models import CausalLM, DecoderConfig, make_model
from jax_dora.lm.serve.engine import Engine
from jax_dora.lm.serve.metrics import Metrics
from jax_dora.lm.serve.request import Piece, Request
from jax_dora.lm.serve.runner import ModelRunner, make_store, warm_up


class Settings(NamedTuple):
    """The settings of the level; programs that they do not need are not compiled.

    Attributes:
      qtypes: the formats of the projections; "bf16" is not quantised.
      adapters: numbers of adapters to measure, one after another.
      rounds: number of timed answers of each client, after one that is not timed.
    """

    config: DecoderConfig = LLAMA_3_8B
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    chunk: int = 512
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    qtypes: tuple[str, ...] = ("bf16", "nf4")
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
    qtypes=("bf16", "int8"),
    adapters=(1, 3),
    rounds=1,
)


class WithoutG:
    """A store whose bank does not multiply rows by g."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    @property
    def bank(self) -> Any:
        return without_g(self._store.bank)


class Server(NamedTuple):
    """The rows and the adapters of a kind, and its compile times."""

    runner: ModelRunner
    store: AdapterStore | None
    compiled: Row


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each format, kind and number of adapters."""
    for qtype in settings.qtypes:
        model = make_model(settings.config)
        if qtype != "bf16":
            model = jax_dora.quantize(model, qtype)
        row: Row = {"qtype": qtype, "rows": settings.rows, "layers": model.config.num_hidden_layers}
        yield from _measure_model(settings, model, row)


def _measure_model(settings: Settings, model: CausalLM, row: Row) -> Iterator[Row]:
    """Yields one row for each kind and number of adapters; each begins like `row`."""
    base = None
    if "base" in settings.only:
        server = _server(settings, model, None, "base")
        base = _served(settings, model, server, [])
        yield row | {"kind": "base", "adapters": 0} | server.compiled | base
    kinds = [kind for kind in settings.only if kind != "base"]
    if not kinds:
        return
    store, begin = make_store(model, settings.slots, max(settings.ranks)), time.monotonic()
    warm_up(store, model)
    row["load_compile_s"] = time.monotonic() - begin
    # Compiled in parallel: XLA has tuned the same products for the base.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        servers = list(threads.map(lambda kind: _server(settings, model, store, kind), kinds))
    values = [random_adapter(store.bank, rank, rank) for rank in settings.ranks]
    for number in range(max(settings.adapters, default=0)):
        store.add(str(number), values[number % len(values)])
    for count in settings.adapters:
        for kind, server in zip(kinds, servers, strict=True):
            adapters = [store.get(str(number)) for number in range(count)]
            measured = row | {"kind": kind, "adapters": count} | server.compiled
            measured |= _served(settings, model, server, adapters)
            yield with_ratio(measured, base, "of_base", "tokens_per_s")


def _server(settings: Settings, model: CausalLM, store: AdapterStore | None, kind: str) -> Server:
    """Returns a server with the programs that the requests need; of those that read prompts, only
    the one for a whole prompt."""
    length = settings.prompt + settings.answer
    used: Any = WithoutG(store) if store is not None and kind == "LoRA" else store
    runner = ModelRunner(model, used, settings.rows, length, settings.chunk)
    runner.widths = (runner.width(settings.prompt),)
    begin = time.monotonic()
    runner.prefill((), runner.widths[0])
    read = time.monotonic() - begin
    runner.warm_up()
    return Server(runner, store, {"read_compile_s": read, "compile_s": time.monotonic() - begin})


def _served(
    settings: Settings, model: CausalLM, server: Server, adapters: list[StoredAdapter]
) -> Row:
    """Returns the throughput and the latency of all clients' requests."""
    rng = np.random.default_rng(0)
    metrics, tokenizer, queue = Metrics(), byte_level_tokenizer(), 4 * settings.rows
    engine = Engine(server.runner, server.store, tokenizer, (), queue=queue, metrics=metrics)
    requests = settings.rows * (settings.rounds + 1)
    chosen = draw_ids("zipf", requests, len(adapters)) if adapters else None
    first: list[float] = []
    ends: list[float] = []

    def submit(number: int) -> None:
        begin = time.monotonic()
        answered = False

        def sink(piece: Piece) -> None:
            nonlocal answered
            if not answered:
                answered = True
                first.append(time.monotonic() - begin)
            if piece.finish is not None:
                if piece.finish != "length":
                    raise RuntimeError(f"an answer ended by {piece.finish}: {piece.error}")
                ends.append(time.monotonic())

        prompt = tuple(rng.integers(0, model.config.vocab_size, settings.prompt).tolist())
        adapter = adapters[chosen[number]] if chosen is not None else None
        engine.submit(Request(prompt, settings.answer, sink, adapter=adapter))

    number = 0
    while len(ends) < requests:
        while number < requests and number - len(ends) < settings.rows:
            submit(number)
            number += 1
        engine.turn()
    # The first answer of each client is warm-up: it fills the rows and the slots.
    ends, first = ends[settings.rows - 1 :], first[settings.rows :]
    answers, seconds = len(ends) - 1, ends[-1] - ends[0]
    return {
        "answers": answers,
        "tokens_per_s": answers * settings.answer / seconds,
        "first_token_ms": 1e3 * float(np.median(first)),
        "first_token_p90_ms": 1e3 * float(np.percentile(first, 90)),
        "loads": metrics.loaded(),
    }
