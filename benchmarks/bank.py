"""Level `bank`: many adapters in one batch, beside the base alone and other ways to do it.

The seven projections of Llama 3 8B's layers in bf16, one layer after the other as a server's step
has them, and 64 adapters of ranks 8 to 64 in one bank. Decoding has one token a row, prefill 8
requests of 512 tokens. Rows choose their adapters by Zipf's law with exponent 1.5, or evenly, and
`alone` rows all the same one. Times are of one layer, from a program of a few, which is called
`repeats` times before its results are waited for; `host_ms` is what the calls alone took, and where
it is no less the time is the host's. Each call is given the result of the one before, in whose
memory it leaves its own, as a server's steps do with their caches: XLA launches kernels as graphs,
which the host sets up anew wherever an array's address changes.

    base        the projections alone
    LoRA        the bank without g
    DoRA        the bank
    one-hot     every row times every adapter, and a one-hot product, as in tpu-inference

`bound` is the least that DoRA can be over the base: the bytes of both over those of the base.
Adapters are loaded into a whole model from host memory: `first`, when g is taken, and `again`.
Growth is that of decoding with how many adapters there are, of which the bank has the slots, and
with their rank: a row's request takes `answer` steps, and the next one's adapter is loaded if it is
in no slot.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from benchmarks.bank_adapters import byte_bound, draw_ids, random_adapter, shares
from benchmarks.bank_programs import Stack, of_kind, program
from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.programs import Program, compiled
from benchmarks.results import Row, milliseconds
from jax_dora.bank import DECODING_OPTIONS, AdapterStore, HostAdapter
from jax_dora.bank.host import CachedG

# What a result may differ from another way of it, relative to its norm: some roundings of bf16.
MOST_DIFFERENT = 0.02

GROWING = ("base", "LoRA", "DoRA")
# Whose result each kind's is compared with.
REFERENCES = {"one-hot": "LoRA"}


class Settings(NamedTuple):
    """The settings of the level. Growth is that of `growth` rows, over `steps` steps. Adapters are
    loaded into a model of `load_layers`."""

    sizes: Protocol = LLAMA3
    layers: int = 3
    load_layers: int = 32
    repeats: int = 16
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    decoding: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prefill: tuple[int, int] = (8, 512)
    mixes: tuple[str, ...] = ("zipf", "uniform")
    alone: int = 8
    only: tuple[str, ...] = ("base", "LoRA", "DoRA", "one-hot")
    growth: int = 64
    adapters: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    answer: int = 128
    steps: int = 256
    rounds: int = 7


TINY = Settings(
    QUICK,
    layers=2,
    load_layers=3,
    repeats=2,
    slots=3,
    ranks=(1, 5),
    decoding=(1, 3),
    prefill=(2, 4),
    mixes=("zipf",),
    alone=1,
    growth=3,
    adapters=(2, 5),
    answer=2,
    steps=16,
    rounds=1,
)


class Inputs:
    """The arguments of the programs: the projections, a bank of their adapters, a batch's slots,
    and x of a shape [rows, tokens]."""

    def __init__(self, model: Any, bank: Any, ids: np.ndarray, shape: tuple[int, int]) -> None:
        hidden = model.layers.q_proj.kernel.shape[-2]
        self._x = jax.random.normal(jax.random.key(1), (*shape, hidden), jnp.bfloat16)
        self._graphdef, self._state = nnx.split(model)
        self.change(bank, ids)

    def change(self, bank: Any, ids: np.ndarray) -> None:
        self._bank, self._ids = bank, jnp.asarray(ids)

    def x(self) -> jax.Array:
        """Returns another copy of x, which a call uses up."""
        return jax.block_until_ready(jnp.copy(self._x))

    def of(self, kind: str) -> list[jax.Array]:
        """Returns the arguments of a kind's program after x: a flat list, which costs a call the
        least."""
        return jax.tree.leaves(self._tree(kind))

    def lowered(self, kind: str) -> Any:
        """Returns a kind's program, lowered for these."""
        structure, function = jax.tree.structure(self._tree(kind)), program(kind, self._graphdef)

        def flat(x: jax.Array, *leaves: jax.Array) -> jax.Array:
            return function(*jax.tree.unflatten(structure, leaves), x)

        options = DECODING_OPTIONS if self._x.shape[1] == 1 else {}
        jitted = jax.jit(flat, donate_argnums=0, compiler_options=options)
        return jitted.lower(self._x, *self.of(kind))

    def _tree(self, kind: str) -> Any:
        return self._state, of_kind(kind, self._bank), self._ids


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; the kinds of one workload are timed in turns."""
    model = nnx.jit(lambda: Stack(settings.sizes, settings.layers))()
    bank = _filled(jax_dora.AdapterBank(model, settings.slots, max(settings.ranks)), settings.ranks)
    growing: list[Program] = []
    for shape in (*((rows, 1) for rows in settings.decoding), settings.prefill):
        rows, tokens = shape
        programs = _compiled(settings, model, bank, shape)
        if shape == (settings.growth, 1):
            growing = [one for one in programs if one.kind in GROWING]
        alone = ("one",) * (rows == settings.alone and tokens == 1)
        for mix in (*settings.mixes, *alone):
            ids = draw_ids(mix, rows, settings.slots)
            told = {"mix": mix} | byte_bound(bank, ids)
            yield from _timed(settings, programs, Inputs(model, bank, ids, shape), told)
    for rank in settings.ranks:
        bank = _filled(bank, (rank,))
        ids = np.arange(settings.growth, dtype=np.int32) % settings.slots
        told = {"mix": "growth", "rank": rank} | byte_bound(bank, ids)
        yield from _timed(settings, growing, Inputs(model, bank, ids, (len(ids), 1)), told)
    yield from _growth_of_adapters(settings, growing, model, AdapterStore(bank))
    yield from _loads(settings)


def _growth_of_adapters(
    settings: Settings, programs: list[Program], model: Any, store: AdapterStore
) -> Iterator[Row]:
    """Yields the time of decoding by the number of adapters that requests ask for, loads
    included."""
    drawn = [random_adapter(store.bank, rank, rank) for rank in settings.ranks]
    for count in settings.adapters:
        for number in range(len(store), count):
            store.add(str(number), _scaled(drawn[number % len(drawn)], 1 + number / count))
            # The first load takes its norms.
            store.release(str(number), store.acquire(str(number)))
        found: dict[str, float] = {}
        for one in programs:
            if one.run is not None:
                row = one.row | {"mix": "growth", "adapters": count}
                row |= _requested(settings, one, model, store, count)
                found[one.kind] = row["ms"]
                yield row | _ratios(one.kind, found)


def _requested(
    settings: Settings, one: Program, model: Any, store: AdapterStore, count: int
) -> Row:
    """Returns what a step of a layer takes whose rows' requests end, each in its turn, and others
    begin; what their adapters' loads cost them, and how many these were."""
    rows, rng = settings.growth, np.random.default_rng(count)
    ids, names = np.full(rows, -1, np.int32), [""] * rows
    inputs = Inputs(model, store.bank, ids, (rows, 1))

    def begin(row: int) -> None:
        if names[row]:
            store.release(names[row], int(ids[row]))
        names[row] = str(rng.choice(count, p=shares("zipf", count)))
        ids[row] = store.acquire(names[row])

    adapted = range(rows) if one.kind != "base" else ()
    # Each kind finds the same in the slots: those that are seldom asked for.
    for number in range(max(count - settings.slots, 0), count):
        store.release(str(number), store.acquire(str(number)))
    for row in adapted:
        begin(row)
    inputs.change(store.bank, ids)
    x = jax.block_until_ready(one.run(inputs.x(), *inputs.of(one.kind)))
    loads, begun = store.loads, time.perf_counter()
    turns = [row * settings.answer // rows for row in adapted]
    for step in range(settings.steps):
        due = [row for row in adapted if step % settings.answer == turns[row]]
        for row in due:
            begin(row)
        if due:
            inputs.change(store.bank, ids)
        x = one.run(x, *inputs.of(one.kind))
    jax.block_until_ready(x)
    seconds = time.perf_counter() - begun
    told = byte_bound(store.bank, ids[ids >= 0])
    for row in adapted:
        store.release(names[row], int(ids[row]))
    ms = 1e3 * seconds / (settings.steps * settings.layers)
    return told | {"ms": ms, "loads": store.loads - loads}


def _loads(settings: Settings) -> Iterator[Row]:
    """Yields the time of loading an adapter, by rank."""
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
                    adapter = dataclasses.replace(adapter, cached_g=CachedG())
                jax.block_until_ready(bank.arrays)
                begin = time.perf_counter()
                bank = bank.load(0, adapter)
                jax.block_until_ready(bank.arrays)
                times.append(time.perf_counter() - begin)
            yield row | {"kind": kind} | milliseconds(times[1:])  # The first compiles.


def _filled(bank: Any, ranks: tuple[int, ...]) -> Any:
    """Returns a bank with an adapter in every slot, of these ranks in turn; those of one rank
    differ in their scale alone."""
    drawn = [random_adapter(bank, rank, rank) for rank in ranks]
    for slot in range(bank.slots):
        bank = bank.load(slot, _scaled(drawn[slot % len(drawn)], 1 + slot / bank.slots))
    return bank


def _scaled(adapter: HostAdapter, factor: float) -> HostAdapter:
    """Returns another adapter of the same matrices."""
    facts = {
        path: one._replace(scale=one.scale * np.float32(factor))
        for path, one in adapter.facts.items()
    }
    return dataclasses.replace(adapter, facts=facts, cached_g=CachedG())


def _compiled(settings: Settings, model: Any, bank: Any, shape: tuple[int, int]) -> list[Program]:
    """Returns the program of every kind that is measured of the shape. The first is compiled before
    the others, which find its products tuned, and they at a time."""
    rows, tokens = shape
    inputs = Inputs(model, bank, np.zeros(rows, np.int32), shape)

    def compile_one(kind: str) -> Program:
        row: Row = {"task": "prefill" if tokens > 1 else "decode", "kind": kind}
        row |= {"rows": rows, "tokens": tokens}
        return compiled(row, functools.partial(inputs.lowered, kind))

    first, *others = settings.only
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [compile_one(first), *threads.map(compile_one, others)]


def _timed(settings: Settings, programs: list[Program], inputs: Inputs, told: Row) -> Iterator[Row]:
    """Yields the rows of `programs` with median wall times of a layer, programs being run in
    turns."""
    running = [one for one in programs if one.run is not None]
    times: dict[str, list[float]] = {one.kind: [] for one in running}
    hosts: dict[str, list[float]] = {one.kind: [] for one in running}
    results: dict[str, Any] = {}
    calls = settings.layers * settings.repeats
    for turn in range(settings.rounds + 1):
        for one in running:
            arguments, x = inputs.of(one.kind), inputs.x()
            if not turn:  # This warms up.
                results[one.kind] = np.asarray(one.run(x, *arguments), np.float32)
                continue
            begin = time.perf_counter()
            for _ in range(settings.repeats):
                x = one.run(x, *arguments)
            called = time.perf_counter()
            jax.block_until_ready(x)
            times[one.kind].append((time.perf_counter() - begin) / calls)
            hosts[one.kind].append((called - begin) / calls)
    found = {kind: milliseconds(some) for kind, some in times.items()}
    medians = {kind: row["ms"] for kind, row in found.items()}
    for one in programs:
        kind, row, reference = one.kind, one.row | told, REFERENCES.get(one.kind)
        if kind in found:
            row |= found[kind] | {"host_ms": milliseconds(hosts[kind])["ms"]}
            row |= _ratios(kind, medians)
        if reference in results and kind in results:
            expected = results[reference]
            difference = np.linalg.norm(results[kind] - expected) / np.linalg.norm(expected)
            row["difference"] = float(difference)
            if not difference <= MOST_DIFFERENT:
                row["failed"] = f"it differs from {reference} by {difference:.3g} of its norm"
        yield row


def _ratios(kind: str, ms: dict[str, float]) -> Row:
    """Returns a kind's time over those of the base and of LoRA."""
    return {f"over_{one.lower()}": ms[kind] / ms[one] for one in ("base", "LoRA") if one in ms}
