"""Level `bank`: many adapters in one batch, compared with the base alone.

The model is a few layers of Llama 3 8B's seven projections in bf16, without attention, called one
after another as in a server's step. The bank holds 64 adapters of ranks 8 to 64.

    base        the projections alone
    LoRA        the bank without g
    DoRA        the bank

Timing: a program is called `repeats` times before its last result is waited for, and `ms` is the
wall time of one layer. Each call takes the result of the last one and writes its own result into
the same memory, as a server's steps do with their caches: XLA launches kernels as CUDA graphs,
which the host must update whenever the address of an array changes. `host_ms` is the time of the
calls without the wait; if it is not smaller than `ms`, the host is the bottleneck. The programs of
one workload are timed in turns.

One line is one kind with one workload (`task`):

    decode      `rows` rows of one token. `mix` says how rows choose their adapters: by Zipf's law
                with exponent 1.5 ("zipf"), evenly ("uniform"), all the same one ("one"), or
                "growth": 64 rows, with adapters of one rank (`rank`), or with requests for a number
                of adapters (`adapters`). A request takes `answer` steps, then another one begins in
                its row; if its adapter is in no slot, it is loaded (`loads`).
    prefill     prompts of several requests (`rows`) of so many `tokens` each
    load        loading an adapter from host memory into a bank of a whole model, the `first` time,
                when g is computed, and `again`

`over_base` and `over_lora` are the time divided by that of the base and of LoRA. `distinct` is the
number of adapters in the batch, and `bytes_over_base` the bytes that a layer reads with them,
divided by those of the base. It is no bound on the time: the base reads its bytes at less than the
card's rate, and the rest can be used.
"""

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
from benchmarks.bank_adapters import bytes_read, draw_ids, random_adapter, shares
from benchmarks.bank_programs import Stack, bank_of_kind, program
from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.programs import Program, compiled
from benchmarks.results import Row, milliseconds
from jax_dora.bank import DECODING_OPTIONS, AdapterStore, HostAdapter
from jax_dora.bank.host import CachedG
from jax_dora.ops.bank_linear import MOST_PROMPT_TOKENS

KINDS = ("base", "LoRA", "DoRA")


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      load_layers: number of layers of the model that adapters are loaded into.
      repeats: number of calls between two waits.
      prompts: number of requests, and of tokens of each, of the workloads "prefill".
      growth: number of rows of the mix "growth".
      answer, steps: number of steps of a request, and of all steps, if requests choose adapters.
    """

    sizes: Protocol = LLAMA3
    layers: int = 3
    load_layers: int = 32
    repeats: int = 16
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    decoding: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prompts: tuple[tuple[int, int], ...] = ((1, 256), (4, 64), (8, 512))
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    only: tuple[str, ...] = KINDS
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
    prompts=((2, 4),),
    mixes=("zipf",),
    growth=3,
    adapters=(2, 5),
    answer=2,
    steps=16,
    rounds=1,
)


class Inputs:
    """The arguments of the programs: a model, a bank, the slots of a batch's rows, and an input x
    of the shape [rows, tokens, hidden]."""

    def __init__(self, model: Any, bank: Any, ids: np.ndarray, shape: tuple[int, int]) -> None:
        hidden = model.layers.q_proj.kernel.shape[-2]
        self._x = jax.random.normal(jax.random.key(1), (*shape, hidden), jnp.bfloat16)
        self._graphdef, self._state = nnx.split(model)
        self.change(bank, ids)

    def change(self, bank: Any, ids: np.ndarray) -> None:
        self._bank, self._ids = bank, jnp.asarray(ids)

    def x(self) -> jax.Array:
        """Returns a new copy of x, which a call donates."""
        return jax.block_until_ready(jnp.copy(self._x))

    def arguments(self, kind: str) -> list[jax.Array]:
        """Returns the arguments after x: a flat list, the fastest form to call a program with."""
        return jax.tree.leaves(self._tree(kind))

    def lowered(self, kind: str) -> Any:
        """Returns a kind's program, lowered for these arguments."""
        structure, function = jax.tree.structure(self._tree(kind)), program(self._graphdef)

        def flat(x: jax.Array, *leaves: jax.Array) -> jax.Array:
            return function(*jax.tree.unflatten(structure, leaves), x)

        rows, tokens, _ = self._x.shape
        is_small = tokens == 1 or rows * tokens <= MOST_PROMPT_TOKENS
        options = DECODING_OPTIONS if is_small else {}
        jitted = jax.jit(flat, donate_argnums=0, compiler_options=options)
        return jitted.lower(self._x, *self.arguments(kind))

    def _tree(self, kind: str) -> Any:
        return self._state, bank_of_kind(kind, self._bank), self._ids


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each kind and workload."""
    model = nnx.jit(lambda: Stack(settings.sizes, settings.layers))()
    bank = filled(jax_dora.AdapterBank(model, settings.slots, max(settings.ranks)), settings.ranks)
    growing: list[Program] = []
    for shape in (*((rows, 1) for rows in settings.decoding), *settings.prompts):
        rows, _ = shape
        programs = compiled_kinds(settings, model, bank, shape)
        if shape == (settings.growth, 1):
            growing = programs
        for mix in settings.mixes:
            ids = draw_ids(mix, rows, settings.slots)
            facts = {"mix": mix} | bytes_read(bank, ids)
            yield from timed(settings, programs, Inputs(model, bank, ids, shape), facts)
    for rank in settings.ranks:
        bank = filled(bank, (rank,))
        ids = np.arange(settings.growth, dtype=np.int32) % settings.slots
        facts = {"mix": "growth", "rank": rank} | bytes_read(bank, ids)
        yield from timed(settings, growing, Inputs(model, bank, ids, (len(ids), 1)), facts)
    yield from _growth_of_adapters(settings, growing, model, AdapterStore(bank))
    yield from _loads(settings)


def _growth_of_adapters(
    settings: Settings, programs: list[Program], model: Any, store: AdapterStore
) -> Iterator[Row]:
    """Yields the time of decoding, loads included, for each number of adapters."""
    drawn = [random_adapter(store.bank, rank, rank) for rank in settings.ranks]
    for count in settings.adapters:
        for number in range(len(store), count):
            store.add(str(number), _scaled(drawn[number % len(drawn)], 1 + number / count))
            # The first load of an adapter computes its norms.
            store.release(str(number), store.acquire(str(number)))
        ms: dict[str, float] = {}
        for one in programs:
            if one.run is not None:
                row = one.row | {"mix": "growth", "adapters": count}
                row |= _requested(settings, one, model, store, count)
                ms[one.kind] = row["ms"]
                yield row | _ratios(one.kind, ms)


def _requested(
    settings: Settings, one: Program, model: Any, store: AdapterStore, count: int
) -> Row:
    """Returns the time of one layer's step, loads included, and the number of loads, while the
    rows' requests end one after another and new ones begin."""
    rows, rng = settings.growth, np.random.default_rng(count)
    ids, names = np.full(rows, -1, np.int32), [""] * rows
    inputs = Inputs(model, store.bank, ids, (rows, 1))

    def begin_request(row: int) -> None:
        if names[row]:
            store.release(names[row], int(ids[row]))
        names[row] = str(rng.choice(count, p=shares("zipf", count)))
        ids[row] = store.acquire(names[row])

    adapted = range(rows) if one.kind != "base" else ()
    # Every kind begins with the same adapters in the slots, the rarely used ones.
    for number in range(max(count - settings.slots, 0), count):
        store.release(str(number), store.acquire(str(number)))
    for row in adapted:
        begin_request(row)
    inputs.change(store.bank, ids)
    x = jax.block_until_ready(one.run(inputs.x(), *inputs.arguments(one.kind)))
    loads, begin = store.loads, time.perf_counter()
    turns = [row * settings.answer // rows for row in adapted]
    for step in range(settings.steps):
        ended = [row for row in adapted if step % settings.answer == turns[row]]
        for row in ended:
            begin_request(row)
        if ended:
            inputs.change(store.bank, ids)
        x = one.run(x, *inputs.arguments(one.kind))
    jax.block_until_ready(x)
    seconds = time.perf_counter() - begin
    facts = bytes_read(store.bank, ids[ids >= 0])
    for row in adapted:
        store.release(names[row], int(ids[row]))
    ms = 1e3 * seconds / (settings.steps * settings.layers)
    return facts | {"ms": ms, "loads": store.loads - loads}


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
            yield row | {"kind": kind} | milliseconds(times[1:])  # The first one compiles.


def filled(bank: Any, ranks: tuple[int, ...]) -> Any:
    """Returns a bank with an adapter in every slot, of these ranks in turn; adapters of one rank
    differ only in their scale."""
    drawn = [random_adapter(bank, rank, rank) for rank in ranks]
    for slot in range(bank.slots):
        bank = bank.load(slot, _scaled(drawn[slot % len(drawn)], 1 + slot / bank.slots))
    return bank


def _scaled(adapter: HostAdapter, factor: float) -> HostAdapter:
    """Returns an adapter with the same matrices and a multiple of the scale."""
    scalings = {
        path: scaling._replace(scale=scaling.scale * np.float32(factor))
        for path, scaling in adapter.scalings.items()
    }
    return dataclasses.replace(adapter, scalings=scalings, cached_g=CachedG())


def compiled_kinds(
    settings: Settings, model: Any, bank: Any, shape: tuple[int, int]
) -> list[Program]:
    """Returns the program of every kind for a shape.

    The first is compiled alone, so that the others, compiled in parallel, find its products tuned.
    """
    rows, tokens = shape
    inputs = Inputs(model, bank, np.zeros(rows, np.int32), shape)

    def compile_kind(kind: str) -> Program:
        row: Row = {"task": "prefill" if tokens > 1 else "decode", "kind": kind}
        row |= {"rows": rows, "tokens": tokens}
        return compiled(row, functools.partial(inputs.lowered, kind))

    first, *others = settings.only
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [compile_kind(first), *threads.map(compile_kind, others)]


def timed(settings: Settings, programs: list[Program], inputs: Inputs, facts: Row) -> Iterator[Row]:
    """Yields the rows of programs that are timed in turns."""
    running = {one.kind: one.run for one in programs if one.run is not None}
    times: dict[str, list[float]] = {kind: [] for kind in running}
    host_times: dict[str, list[float]] = {kind: [] for kind in running}
    calls = settings.layers * settings.repeats
    for turn in range(settings.rounds + 1):
        for kind, run in running.items():
            arguments, x = inputs.arguments(kind), inputs.x()
            if not turn:  # The first turn is warm-up.
                jax.block_until_ready(run(x, *arguments))
                continue
            begin = time.perf_counter()
            for _ in range(settings.repeats):
                x = run(x, *arguments)
            called = time.perf_counter()
            jax.block_until_ready(x)
            times[kind].append((time.perf_counter() - begin) / calls)
            host_times[kind].append((called - begin) / calls)
    measured = {kind: milliseconds(seconds) for kind, seconds in times.items()}
    medians = {kind: row["ms"] for kind, row in measured.items()}
    for one in programs:
        kind, row = one.kind, one.row | facts
        if kind in running:
            row |= measured[kind] | {"host_ms": milliseconds(host_times[kind])["ms"]}
            row |= _ratios(kind, medians)
        yield row


def _ratios(kind: str, ms: dict[str, float]) -> Row:
    """Returns a kind's time divided by those of the base and of LoRA."""
    return {f"over_{one.lower()}": ms[kind] / ms[one] for one in ("base", "LoRA") if one in ms}
