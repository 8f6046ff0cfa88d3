"""Level `bank`: many adapters in one batch, beside the base alone and other ways to do it.

The seven projections of Llama 3 8B's layers in bf16, scanned as a decoder is, and 64 adapters of
ranks 8 to 64 in one bank. Decoding has one token a row, prefill 8 requests of 512 tokens. Rows
choose their adapters by Zipf's law with exponent 1.5, evenly, or all the same one. A program goes
`repeats` times through its few layers, and times are of one layer: what takes long is to compile.

    base        the projections alone
    LoRA        the bank without g
    DoRA        the bank, as it chooses; "xla" without kernels
    sums, dense, tiles, kernel      rows of one token in one of the bank's ways, whatever it chooses
    one-hot     every row times every adapter, and a one-hot product, as in tpu-inference
    loop        one adapter after the other, on all rows

`bound` is the least that DoRA can be over the base: the bytes of both over those of the base.
"""

from __future__ import annotations

import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jax_dora
from benchmarks.results import Row
from jax_dora.bank.host import RANKS, Facts, HostAdapter
from jax_dora.bank.layers import BankArray
from jax_dora.ops import bank as bank_ops
from jax_dora.ops.bank import Slots

EXPONENT = 1.5
# What DoRA's result may differ from XLA's way of it, relative to its norm: some roundings of bf16.
MOST_DIFFERENT = 0.02


WAYS = ("sums", "dense", "tiles")
# What takes rows of one token only, and what would take minutes of them.
ONLY_DECODING, ONLY_PREFILL = (*WAYS, "kernel"), ("DoRA xla", "loop")


class Sizes(NamedTuple):
    """Of a layer: hidden, the keys' and values' features, intermediate."""

    hidden: int = 4096
    key: int = 1024
    intermediate: int = 14_336


class Settings(NamedTuple):
    """What is measured: nothing is built after `seconds`. Growth is that of `growth` rows, with the
    number of adapters that they have and with their ranks."""

    sizes: Sizes = Sizes()
    layers: int = 2
    repeats: int = 8
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    decoding: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prefill: tuple[int, int] = (8, 512)
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    kinds: tuple[str, ...] = (
        "base",
        "LoRA",
        "DoRA",
        "DoRA xla",
        *WAYS,
        "kernel",
        "one-hot",
        "loop",
    )
    growth: int = 64
    rounds: int = 9
    seconds: float = 420.0


TINY = Settings(
    Sizes(32, 16, 48),
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


class Block(nnx.Module):
    """A decoder layer's projections, without attention."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        def linear(into: int, out: int) -> nnx.Linear:
            dtype = jnp.bfloat16
            return nnx.Linear(into, out, use_bias=False, param_dtype=dtype, rngs=rngs)

        hidden, key, wide = sizes
        self.q_proj = linear(hidden, hidden)
        self.k_proj = linear(hidden, key)
        self.v_proj = linear(hidden, key)
        self.o_proj = linear(hidden, hidden)
        self.gate_proj = linear(hidden, wide)
        self.up_proj = linear(hidden, wide)
        self.down_proj = linear(wide, hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer(x, lambda name, x: getattr(self, f"{name}_proj")(x))


def layer(x: jax.Array, by: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
    """Returns what a layer makes of x, `by` being a projection of its input."""
    q, k, v = (by(name, normalised(x)) for name in "qkv")
    # Whatever attention does, it reads all three.
    x = x + by("o", q + jnp.tile(k + v, x.shape[-1] // k.shape[-1]))
    into = normalised(x)
    return x + by("down", nnx.silu(by("gate", into)) * by("up", into))


def normalised(x: jax.Array) -> jax.Array:
    """Returns x over its root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


class Stack(nnx.Module):
    """Layers as one module whose arrays have a leading axis."""

    def __init__(self, sizes: Sizes, layers: int) -> None:
        def make(key: jax.Array) -> Block:
            return Block(sizes, nnx.Rngs(key))

        keys = jax.random.split(jax.random.key(0), layers)
        graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
        self.layers = nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, bank, arrays = nnx.split(self.layers, BankArray, ...)
        return lax.scan(lambda x, one: (nnx.merge(graphdef, bank, one)(x), None), x, arrays)[0]


class Bare(NamedTuple):
    """A projection's kernel and its part of a bank, for the ways that the library does not go."""

    kernel: jax.Array
    slots: Slots


def one_hot(x: jax.Array, one: Bare, ids: jax.Array) -> jax.Array:
    """Returns x W + s·x A B by products with all slots."""
    slots = one.slots
    chosen = jax.nn.one_hot(ids, slots.lora_a.shape[0], dtype=x.dtype)
    z = jnp.einsum("bti,sri->btsr", x, slots.lora_a)
    z = z * (chosen * slots.scale.astype(x.dtype)[None])[:, None, :, None]
    return x @ one.kernel + jnp.einsum("btsr,sro->bto", z, slots.lora_b)


def loop(x: jax.Array, one: Bare, ids: jax.Array) -> jax.Array:
    """Returns x W + s·x A B, slot after slot."""
    slots = one.slots

    def add(slot: Any, y: jax.Array) -> jax.Array:
        lora_a, lora_b, scale = slots.lora_a[slot], slots.lora_b[slot], slots.scale[slot]
        mine = jnp.where(ids == slot, scale, 0).astype(x.dtype)[:, None, None]
        return y + ((mine * x) @ lora_a.T) @ lora_b

    return lax.fori_loop(0, slots.lora_a.shape[0], add, x @ one.kernel)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; the kinds of one workload are timed in turns."""
    started = time.monotonic()

    def left() -> float:
        return settings.seconds - (time.monotonic() - started)

    model = nnx.jit(lambda: Stack(settings.sizes, settings.layers))()
    bank = jax_dora.AdapterBank(model, settings.slots, max(settings.ranks))
    *rows, last = _loads(settings, bank)
    yield from rows
    bank = last["bank"]
    for shape in [(rows, 1) for rows in settings.decoding] + [settings.prefill]:
        if left() < 0:
            return
        programs = list(_compiled(settings, model, bank, shape))
        for mix in settings.mixes:
            ids = draw_ids(mix, shape[0], settings.slots)
            told = {"mix": mix} | _bound(settings, bank, ids)
            if left() > 0:
                yield from _timed(
                    _having(programs, told), _arguments(model, bank, ids, shape), settings
                )
    yield from _growth(settings, model, bank, left)


def _growth(settings: Settings, model: Any, bank: Any, left: Callable[[], float]) -> Iterator[Row]:
    """Yields what decoding takes by the number of adapters that rows have, and by their rank."""
    rows = settings.growth
    if left() < 0 or not rows:
        return
    kinds = tuple(kind for kind in ("base", "LoRA", "DoRA") if kind in settings.kinds)
    programs = list(_compiled(settings._replace(kinds=kinds), model, bank, (rows, 1)))
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= min(rows, settings.slots)]
    for count in counts:
        ids = np.arange(rows, dtype=np.int32) % count
        told = {"mix": "growth", "adapters": count} | _bound(settings, bank, ids)
        yield from _timed(
            _having(programs, told), _arguments(model, bank, ids, (rows, 1)), settings
        )
    ids = np.arange(rows, dtype=np.int32) % settings.slots
    for rank in settings.ranks:
        if left() < 0:
            return
        *_, last = _loads(settings._replace(ranks=(rank,)), bank)
        bank = last["bank"]
        told = {"mix": "growth", "rank": rank} | _bound(settings, bank, ids)
        yield from _timed(
            _having(programs, told), _arguments(model, bank, ids, (rows, 1)), settings
        )


def _bound(settings: Settings, bank: Any, ids: np.ndarray) -> Row:
    """Returns how many adapters rows have, and the least that decoding them may take over the
    base, by the bytes of a layer."""
    used = np.unique(ids)
    base = adapters = 0
    for path, place in bank.places.items():
        in_features, out = place.sizes
        base += 2 * in_features * out
        ranks = np.asarray(bank.arrays[path].rank)[0]
        adapters += sum(2 * int(ranks[one]) * (in_features + out) + 4 * out for one in used)
    return {"distinct": len(used), "bound": (base + adapters) / base}


def _having(programs: Iterable[tuple[Row, Any]], told: Row) -> list[tuple[Row, Any]]:
    return [(row | told, run) for row, run in programs]


def _arguments(model: Any, bank: Any, ids: np.ndarray, shape: tuple[int, int]) -> Any:
    hidden = model.layers.q_proj.kernel.shape[-2]
    x = jax.random.normal(jax.random.key(1), (*shape, hidden), jnp.bfloat16)
    return nnx.state(model), bank, jnp.asarray(ids), x


def draw_ids(mix: str, rows: int, slots: int) -> np.ndarray:
    """Returns the slots of a batch's rows."""
    rng = np.random.default_rng(rows)
    if mix == "one":
        return np.zeros(rows, np.int32)
    weights = np.arange(1, slots + 1) ** -(EXPONENT if mix == "zipf" else 0.0)
    # Which adapters are popular has nothing to do with their ranks.
    return rng.permutation(slots)[rng.choice(slots, rows, p=weights / weights.sum())].astype(
        np.int32
    )


def _loads(settings: Settings, bank: Any) -> Iterator[Any]:
    """Fills every slot; yields what loading took by rank, and then the bank."""
    times: dict[int, list[float]] = {rank: [] for rank in settings.ranks}
    for slot in range(settings.slots):
        rank = settings.ranks[slot % len(settings.ranks)]
        adapter = random_adapter(bank, rank, slot)
        jax.block_until_ready(bank.arrays)
        begin = time.perf_counter()
        bank = bank.load(slot, adapter)
        jax.block_until_ready(bank.arrays)
        if slot:  # The first compiles.
            times[rank].append(1e3 * (time.perf_counter() - begin))
    for rank, taken in times.items():
        if taken:
            row = {"task": "load", "rank": rank, "layers": settings.layers}
            yield row | {"ms": statistics.median(taken), "spread_ms": max(taken) - min(taken)}
    yield {"bank": bank}


def random_adapter(bank: Any, rank: int, seed: int) -> HostAdapter:
    """Returns random numbers in host memory, laid out as `AdapterBank.read` does."""
    rng = np.random.default_rng(seed)
    facts, pieces = {}, []
    for start in range(0, rank, RANKS):
        count, piece = min(RANKS, rank - start), {}
        for path, place in bank.places.items():
            lora_a, lora_b = (
                np.zeros((*place.stack, RANKS, size), place.dtype) for size in place.sizes
            )
            for array in (lora_a, lora_b):
                drawn = rng.standard_normal((*array.shape[:-2], count, array.shape[-1]), np.float32)
                array[..., :count, :] = drawn * array.shape[-1] ** -0.5
            piece[path] = (lora_a, lora_b)
        pieces.append(piece)
    for path, place in bank.places.items():
        magnitude = rng.uniform(0.5, 1.5, (*place.stack, place.sizes[1])).astype(np.float32)
        whole = np.ones(place.stack, np.float32)
        facts[path] = Facts(magnitude, whole > 0, 0.5 * whole, (rank * whole).astype(np.int32))
    return HostAdapter(tuple(pieces), facts, rank)


def _compiled(
    settings: Settings, model: Any, bank: Any, shape: tuple[int, int]
) -> Iterator[tuple[Row, Any]]:
    """Yields a row and its program, or None, for every kind that takes the shape; several are
    compiled at a time."""
    rows, tokens = shape
    arguments = _arguments(model, bank, np.zeros(rows, np.int32), shape)
    graphdef = nnx.graphdef(model)
    unfit = ONLY_DECODING if tokens > 1 else ONLY_PREFILL
    lowered: list[tuple[Row, Any]] = []
    for kind in (kind for kind in settings.kinds if kind not in unfit):
        row: Row = {"task": "prefill" if tokens > 1 else "decode", "kind": kind}
        row |= {"rows": rows, "tokens": tokens}
        way = mock.Mock(return_value=kind) if kind in WAYS else bank_ops.way_of
        function = jax.jit(_program(kind, graphdef, settings.repeats))
        with mock.patch.object(bank_ops, "way_of", way):
            lowered.append((row, _told(row, functools.partial(function.lower, *arguments))))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:

        def compiled(one: tuple[Row, Any]) -> tuple[Row, Any]:
            row, program = one
            begin = time.monotonic()
            run = program and _told(row, program.compile)
            if run:
                row["kernels"] = str(run.as_text()).count('custom_call_target="mosaic_gpu')
                row["temp_bytes"] = run.memory_analysis().temp_size_in_bytes
            row["compile_s"] = time.monotonic() - begin
            return row, run

        yield from threads.map(compiled, lowered)


def _told(row: Row, make: Callable[[], Any]) -> Any:
    """Returns what `make` does; None, and why in the row, where it fails: one that does not compile
    costs no other its measurement."""
    try:
        return make()
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:600]
        return None


def _program(kind: str, graphdef: Any, repeats: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the results [rows, tokens, hidden] of the first and of the last time through the
    layers as a function of (state, bank, ids, x)."""
    once = _round(kind, graphdef)

    def run(state: Any, bank: Any, ids: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def repeat(number: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x = once(state, bank, ids, carry[0])
            return x, jnp.where(number == 0, x, carry[1])

        last, first = lax.fori_loop(0, repeats, repeat, (x, x))
        return first, last

    return run


def _round(kind: str, graphdef: Any) -> Callable[..., jax.Array]:
    """Returns the result [rows, tokens, hidden] as a function of (state, bank, ids, x)."""
    if kind in ("one-hot", "loop"):
        return _by_hand(one_hot if kind == "one-hot" else loop)

    def run(state: Any, bank: Any, ids: jax.Array, x: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        if kind == "base":
            return model(x)
        if kind == "LoRA":
            bank = jax.tree.unflatten(jax.tree.structure(bank), jax.tree.leaves(bank))
            bank.arrays = {path: one._replace(g=None) for path, one in bank.arrays.items()}
        implementation = {"DoRA xla": "xla", "kernel": "mosaic"}.get(kind)
        return jax_dora.with_bank(model, bank, ids, implementation=implementation)(x)

    return run


def _by_hand(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(state: Any, bank: Any, ids: jax.Array, x: jax.Array) -> jax.Array:
        kernels = {
            "/".join(map(str, path[:-1])): v.get_value() for path, v in nnx.to_flat_state(state)
        }
        bare = {path: Bare(kernels[path], bank.arrays[path]._replace(g=None)) for path in kernels}

        def one_layer(x: jax.Array, one: Any) -> Any:
            def by(name: str, x: jax.Array) -> jax.Array:
                return multiply(x, one[f"layers/{name}_proj"], ids)

            return layer(x, by), None

        return lax.scan(one_layer, x, bare)[0]

    return run


def _timed(programs: list[tuple[Row, Any]], arguments: Any, settings: Settings) -> Iterator[Row]:
    """Yields the rows with median wall times of a layer, programs being run in turns."""
    times: list[list[float]] = [[] for _ in programs]
    results: dict[str, Any] = {}
    for turn in range(settings.rounds + 1):
        for (row, run), taken in zip(programs, times, strict=True):
            if run is None:
                continue
            begin = time.perf_counter()
            first, last = run(*arguments)
            jax.block_until_ready(last)
            if turn:  # The first warms up.
                taken.append(1e3 * (time.perf_counter() - begin))
            else:
                results[row["kind"]] = np.asarray(first, np.float32)
    layers = settings.layers * settings.repeats
    medians = {
        row["kind"]: statistics.median(one) / layers
        for (row, _), one in zip(programs, times, strict=True)
        if one
    }
    for (row, _), taken in zip(programs, times, strict=True):
        kind = row["kind"]
        if taken:
            row |= {"ms": medians[kind], "spread_ms": (max(taken) - min(taken)) / layers}
            for other in ("base", "LoRA"):
                if other in medians:
                    row[f"over_{other.lower()}"] = medians[kind] / medians[other]
        of_lora = kind in ("one-hot", "loop")
        reference = "LoRA" if of_lora else "sums" if row["tokens"] == 1 else "DoRA xla"
        if kind not in ("base", "LoRA") and reference in results and kind in results:
            expected = results[reference]
            difference = np.linalg.norm(results[kind] - expected) / np.linalg.norm(expected)
            row["difference"] = float(difference)
            if not difference <= MOST_DIFFERENT:
                row["failed"] = f"it differs from {reference} by {difference:.3g} of its norm"
        yield row


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    if row["task"] == "load":
        return f"load rank {row['rank']:3}, {row['layers']} layers  {row['ms']:8.2f} ms"
    name = f"{row['task']:7} {row['rows']:4}×{row['tokens']:<4} {row['mix']:8} {row['kind']:9}"
    if "failed" in row:
        return f"{name} failed: {row['failed'][:150]}"
    told = f"{name} {row['ms']:8.4f} ms  {row['distinct']:3} adapters  {row['kernels']:2} kernels"
    told += f" rank {row['rank']:3}" if "rank" in row else ""
    for other in ("base", "lora"):
        if f"over_{other}" in row:
            told += f"  {row[f'over_{other}']:6.3f} of {other}"
    return f"{told}  bound {row['bound']:.3f}"
