"""Level `bank`: many adapters in one batch, beside the base alone and other ways to do it.

The seven projections of Llama 3 8B's layers in bf16, one layer after the other as a server's step
has them, and 64 adapters of ranks 8 to 64 in one bank. Decoding has one token a row, prefill 8
requests of 512 tokens. Rows choose their adapters by Zipf's law with exponent 1.5, evenly, or all
the same one. Times are of one layer, from a program of so many that the host keeps up, which is
called `repeats` times before its results are waited for.

    base        the projections alone
    LoRA        the bank without g
    DoRA        the bank, as it chooses; "xla" without kernels
    kernel      rows of one token by the bank's kernels, whatever it chooses
    one-hot     every row times every adapter, and a one-hot product, as in tpu-inference
    loop        one adapter after the other, on all rows

What matters most comes first: loads, `FIRST` of each batch by Zipf's law, growth, other mixes,
other kinds.

`bound` is the least that DoRA can be over the base: the bytes of both over those of the base.
Adapters are loaded into a whole model from host memory: `first`, when g is taken, and `again`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from benchmarks.bank_adapters import byte_bound, draw_ids, random_adapter
from benchmarks.bank_programs import Sizes, Stack, program
from benchmarks.results import Row
from jax_dora.bank.host import Settled

# What a result may differ from another way of it, relative to its norm: some roundings of bf16.
MOST_DIFFERENT = 0.02


FIRST = ("base", "LoRA", "DoRA", "one-hot")
# What takes rows of one token only, and what would take minutes of them.
ONLY_DECODING, ONLY_PREFILL = ("kernel",), ("loop",)
# Whose result each kind's is compared with.
REFERENCES = {"one-hot": "LoRA", "loop": "LoRA", "DoRA xla": "DoRA", "kernel": "DoRA"}


class Settings(NamedTuple):
    """What is measured: nothing is built after `seconds`. Growth is that of `growth` rows, with the
    number of adapters that they have and with their ranks. Adapters are loaded into a model of
    `load_layers`."""

    sizes: Sizes = Sizes()
    layers: int = 8
    load_layers: int = 32
    repeats: int = 4
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    decoding: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prefill: tuple[int, int] = (8, 512)
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    kinds: tuple[str, ...] = (*FIRST, "DoRA xla", "kernel", "loop")
    growth: int = 64
    rounds: int = 9
    seconds: float = 420.0


TINY = Settings(
    Sizes(32, 16, 48),
    layers=2,
    load_layers=3,
    repeats=2,
    slots=3,
    ranks=(1, 5),
    decoding=(1, 3),
    prefill=(2, 4),
    mixes=("zipf",),
    # Interpreted kernels are tested elsewhere.
    kinds=tuple(kind for kind in Settings().kinds if kind != "kernel"),
    growth=3,
    rounds=1,
)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; the kinds of one workload are timed in turns."""
    started = time.monotonic()

    def left() -> float:
        return settings.seconds - (time.monotonic() - started)

    yield from _loads(settings)
    model = nnx.jit(lambda: Stack(settings.sizes, settings.layers))()
    bank = _filled(jax_dora.AdapterBank(model, settings.slots, max(settings.ranks)), settings.ranks)
    shapes = [*((rows, 1) for rows in settings.decoding), settings.prefill]
    programs: dict[tuple[int, int], list[tuple[Row, Any]]] = {}

    def timed(shape: tuple[int, int], mixes: Iterable[str], others: Any = ()) -> Iterator[Row]:
        for mix in mixes:
            ids = draw_ids(mix, shape[0], settings.slots)
            told = {"mix": mix} | byte_bound(bank, ids)
            beside, mine = (programs[shape], others) if others else ([], programs[shape])
            if left() > 0:
                yield from _timed(
                    *(_having(beside, told), _having(mine, told)),
                    *(_arguments(model, bank, ids, shape), settings),
                )

    first, *mixes = settings.mixes
    kinds = [kind for kind in settings.kinds if kind in FIRST]
    for shape in shapes:
        if left() > 0:
            programs[shape] = list(_compiled(settings, kinds, model, bank, shape))
            yield from timed(shape, [first])
    growing = (settings.growth, 1)
    if left() > 0 and settings.growth and growing not in programs:
        programs[growing] = list(_compiled(settings, kinds, model, bank, growing))
    yield from _growth_of_adapters(settings, programs.get(growing, []), model, bank, left)
    for shape in shapes:
        if shape in programs:
            yield from timed(shape, mixes)
    for shape in shapes:
        if shape in programs and left() > 0:
            rest = [kind for kind in settings.kinds if kind not in FIRST]
            yield from timed(
                shape, settings.mixes, list(_compiled(settings, rest, model, bank, shape))
            )
    yield from _growth_of_ranks(settings, programs.get(growing, []), model, bank, left)


def _growth_of_adapters(
    settings: Settings, programs: Any, model: Any, bank: Any, left: Callable[[], float]
) -> Iterator[Row]:
    """Yields what decoding takes by the number of adapters that rows have."""
    rows = settings.growth
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= min(rows, settings.slots)]
    for count in counts:
        ids = np.arange(rows, dtype=np.int32) % count
        told = {"mix": "growth", "adapters": count} | byte_bound(bank, ids)
        if left() > 0:
            yield from _grown(settings, programs, told, _arguments(model, bank, ids, (rows, 1)))


def _growth_of_ranks(
    settings: Settings, programs: Any, model: Any, bank: Any, left: Callable[[], float]
) -> Iterator[Row]:
    """Yields what decoding takes by the rank of all adapters; the bank is used up."""
    rows = settings.growth
    ids = np.arange(rows, dtype=np.int32) % settings.slots
    for rank in settings.ranks:
        if left() < 0 or not rows:
            return
        bank = _filled(bank, (rank,))
        told = {"mix": "growth", "rank": rank} | byte_bound(bank, ids)
        yield from _grown(settings, programs, told, _arguments(model, bank, ids, (rows, 1)))


def _grown(settings: Settings, programs: Any, told: Row, arguments: Any) -> Iterator[Row]:
    chosen = [one for one in programs if one[0]["kind"] in ("base", "LoRA", "DoRA")]
    yield from _timed([], _having(chosen, told), arguments, settings)


def _having(programs: Iterable[tuple[Row, Any]], told: Row) -> list[tuple[Row, Any]]:
    return [(row | told, run) for row, run in programs]


def _arguments(model: Any, bank: Any, ids: np.ndarray, shape: tuple[int, int]) -> Any:
    hidden = model.layers.q_proj.kernel.shape[-2]
    x = jax.random.normal(jax.random.key(1), (*shape, hidden), jnp.bfloat16)
    return nnx.state(model), bank, jnp.asarray(ids), x


def _loads(settings: Settings) -> Iterator[Row]:
    """Yields what loading an adapter takes, by rank."""
    model = nnx.jit(lambda: Stack(settings.sizes, settings.load_layers))()
    bank = jax_dora.AdapterBank(model, 2, max(settings.ranks))
    for rank in settings.ranks:
        adapter = random_adapter(bank, rank, rank)
        row: Row = {"task": "load", "rank": rank, "layers": settings.load_layers}
        row["bytes"] = adapter.nbytes
        for kind in ("first", "again"):
            times = []
            for _ in range(settings.rounds + 1):
                if kind == "first":
                    adapter = dataclasses.replace(adapter, settled=Settled())
                jax.block_until_ready(bank.arrays)
                begin = time.perf_counter()
                bank = bank.load(0, adapter)
                jax.block_until_ready(bank.arrays)
                times.append(1e3 * (time.perf_counter() - begin))
            times = times[1:]  # The first compiles.
            told = {"ms": statistics.median(times), "spread_ms": max(times) - min(times)}
            yield row | {"kind": kind} | told


def _filled(bank: Any, ranks: tuple[int, ...]) -> Any:
    """Returns a bank with an adapter in every slot, of these ranks in turn; those of one rank
    differ in their scale alone."""
    drawn = {rank: random_adapter(bank, rank, rank) for rank in ranks}
    for slot in range(bank.slots):
        adapter = drawn[ranks[slot % len(ranks)]]
        scaled = {
            path: dataclasses.replace(facts, scale=facts.scale * np.float32(1 + slot / bank.slots))
            for path, facts in adapter.facts.items()
        }
        bank = bank.load(slot, dataclasses.replace(adapter, facts=scaled, settled=Settled()))
    return bank


def _compiled(
    settings: Settings, kinds: Iterable[str], model: Any, bank: Any, shape: tuple[int, int]
) -> Iterator[tuple[Row, Any]]:
    """Yields a row and its program, or None, for every kind that takes the shape; several are
    compiled at a time."""
    rows, tokens = shape
    arguments = _arguments(model, bank, np.zeros(rows, np.int32), shape)
    graphdef = nnx.graphdef(model)
    unfit = ONLY_DECODING if tokens > 1 else ONLY_PREFILL
    lowered: list[tuple[Row, Any]] = []
    for kind in (kind for kind in kinds if kind not in unfit):
        row: Row = {"task": "prefill" if tokens > 1 else "decode", "kind": kind}
        row |= {"rows": rows, "tokens": tokens}
        function = jax.jit(program(kind, graphdef))
        lowered.append((row, _attempted(row, functools.partial(function.lower, *arguments))))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:

        def compiled(one: tuple[Row, Any]) -> tuple[Row, Any]:
            row, program = one
            begin = time.monotonic()
            run = program and _attempted(row, program.compile)
            if run:
                row["kernels"] = str(run.as_text()).count('custom_call_target="mosaic_gpu')
                row["temp_bytes"] = run.memory_analysis().temp_size_in_bytes
            row["compile_s"] = time.monotonic() - begin
            return row, run

        yield from threads.map(compiled, lowered)


def _attempted(row: Row, make: Callable[[], Any]) -> Any:
    """Returns what `make` does, or None where it fails, and notes why in the row: a program that
    does not compile costs no other its measurement."""
    try:
        return make()
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:600]
        return None


def _timed(
    beside: list[tuple[Row, Any]],
    programs: list[tuple[Row, Any]],
    arguments: Any,
    settings: Settings,
) -> Iterator[Row]:
    """Yields the rows of `programs` with median wall times of a layer, programs being run in turns,
    those of `beside` too."""
    programs = beside + programs
    times: list[list[float]] = [[] for _ in programs]
    results: dict[str, Any] = {}
    for turn in range(settings.rounds + 1):
        for (row, run), taken in zip(programs, times, strict=True):
            if run is None:
                continue
            begin = time.perf_counter()
            y = [run(*arguments) for _ in range(settings.repeats)][-1]
            jax.block_until_ready(y)
            if turn:  # The first warms up.
                taken.append(1e3 * (time.perf_counter() - begin))
            else:
                results[row["kind"]] = np.asarray(y, np.float32)
    layers = settings.layers * settings.repeats
    medians = {
        row["kind"]: statistics.median(one) / layers
        for (row, _), one in zip(programs, times, strict=True)
        if one
    }
    spreads = [(max(one) - min(one)) / layers if one else 0.0 for one in times]
    for (row, _), spread in list(zip(programs, spreads, strict=True))[len(beside) :]:
        kind, reference = row["kind"], REFERENCES.get(row["kind"])
        if kind in medians:
            row |= {"ms": medians[kind], "spread_ms": spread}
            for other in ("base", "LoRA"):
                if other in medians:
                    row[f"over_{other.lower()}"] = medians[kind] / medians[other]
        if reference in results and kind in results:
            expected = results[reference]
            difference = np.linalg.norm(results[kind] - expected) / np.linalg.norm(expected)
            row["difference"] = float(difference)
            if not difference <= MOST_DIFFERENT:
                row["failed"] = f"it differs from {reference} by {difference:.3g} of its norm"
        yield row


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    if row["task"] == "load":
        name = f"load rank {row['rank']:3}, {row['layers']} layers, {row['bytes'] / 1e6:.0f} MB"
        return f"{name}, {row['kind']}  {row['ms']:8.2f} ms"
    name = f"{row['task']:7} {row['rows']:4}×{row['tokens']:<4} {row['mix']:8} {row['kind']:9}"
    if "failed" in row:
        return f"{name} failed: {row['failed'][:150]}"
    told = f"{name} {row['ms']:8.4f} ms  {row['distinct']:3} adapters  {row['kernels']:2} kernels"
    told += f" rank {row['rank']:3}" if "rank" in row else ""
    for other in ("base", "lora"):
        if f"over_{other}" in row:
            told += f"  {row[f'over_{other}']:6.3f} of {other}"
    return f"{told}  bound {row['bound']:.3f}"
