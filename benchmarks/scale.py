"""Level `scale`: a decoder on several devices: the base, LoRA and DoRA in one run.

Each layout is a mesh over all devices, and each kind of model is measured on it at a whole training
step and at inference, with automatic and with explicit axes; "alone" is data parallelism's share of
one device. The programs of a layout are timed in turns, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from benchmarks.collectives import collectives
from benchmarks.model.decoder import loss
from benchmarks.model.placed import LAYOUTS, OPTIMIZER, Placed, arrays, placed
from benchmarks.model.protocol import Protocol
from benchmarks.results import Row

KINDS = ("base", "LoRA", "DoRA")
# Groups. Results come sooner with fewer; with more, the processor's cores are in use for longer.
COMPILED_TOGETHER = 4


class Group(NamedTuple):
    """What is timed in turns: a layout, axes and a rank."""

    layout: str
    axes: str
    rank: int


class Settings(NamedTuple):
    """What is measured on which layouts, and for how long: nothing is built after `seconds`.

    Attributes:
      model: the name of the decoder that has `sizes`.
      threads: how many programs compile at a time.
      devices: how many there are; None for all.
    """

    sizes: Protocol
    model: str = "qwen3"
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    axes: tuple[str, ...] = ("auto", "explicit")
    ranks: tuple[int, ...] = (64, 384)
    rounds: int = 15
    seconds: float = 300.0
    threads: int = 8
    devices: int | None = None

    def groups(self) -> Iterator[Group]:
        """Yields what is measured, the most wanted first."""
        for rank in self.ranks:
            for layout in self.layouts:
                for axes in self.axes[:1] if layout == "alone" else self.axes:
                    yield Group(layout, axes, rank)

    def of_rank(self, rank: int) -> Protocol:
        """Returns the sizes with adapters of a rank."""
        return dataclasses.replace(self.sizes, rank=rank, alpha=rank)


class Program(NamedTuple):
    """A compiled program, the model that it is of, and what is known of it before it is timed."""

    row: Row
    run: Callable[..., Any] | None
    model: Placed


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement: times, memory, and what travels between the devices."""
    started = time.monotonic()
    groups = settings.groups()
    while batch := tuple(itertools.islice(groups, COMPILED_TOGETHER)):
        if time.monotonic() - started > settings.seconds:
            return
        # Nothing is timed while anything compiles.
        with ThreadPoolExecutor(settings.threads) as pool:
            found = [_programs(group, settings, device, pool) for group in batch]
        for programs in found:
            yield from _timed([one.result() for one in programs], settings)


def _programs(
    group: Group, settings: Settings, device: str, pool: ThreadPoolExecutor
) -> list[Future[Program]]:
    """Returns the programs of a group, which `pool` compiles."""
    sizes = settings.of_rank(group.rank)
    layout = LAYOUTS[group.layout]
    mesh = layout.mesh(group.axes, settings.devices)
    found = []
    for kind in KINDS:
        model = placed(kind, layout, mesh, sizes, device)
        for task in ("inference", "step"):
            if kind == "base" and task == "step":
                continue  # It has nothing to train.
            row: Row = {"kind": kind, **group._asdict(), "task": task, "model": settings.model}
            row |= {"devices": mesh.size, "hidden": sizes.hidden, **sizes.shape()}
            try:
                with jax.set_mesh(mesh):
                    lowered = program(task, model, sizes.last).lower(*_operands(task, model))
            except Exception as error:
                found.append(pool.submit(_failed, row, model, error))
            else:
                found.append(pool.submit(_compiled, row, model, lowered))
    return found


def _operands(task: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what a task's program takes of a placed model or its arrays."""
    _, *operands, state = arrays
    return (*operands, state) if task == "step" else tuple(operands)


def _compiled(row: Row, model: Placed, lowered: Any) -> Program:
    try:
        run = lowered.compile()
        return Program(row | _facts(run, row["devices"]), run, model)
    except Exception as error:
        return _failed(row, model, error)


def _failed(row: Row, model: Placed, error: Exception) -> Program:
    # One that does not compile, or has no room, costs no other its measurement.
    return Program(row | {"failed": f"{type(error).__name__}: {error}"[:600]}, None, model)


def program(task: str, model: Any, last: int) -> Any:
    """Returns "inference" or "step" of a placed model as a jitted function of its arrays."""
    if task == "inference":
        return jax.jit(functools.partial(_inference, model.graphdef, last))
    made = jax.tree.map(lambda one: one.sharding, (model.trained, model.state))
    return jax.jit(functools.partial(_step, model.graphdef, last), out_shardings=(None, *made))


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array) -> Any:
    return nnx.merge(graphdef, trained, frozen)(tokens[:, :-1], last)


def _step(
    graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array, state: Any
) -> Any:
    def of_adapters(trained: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, trained, frozen), tokens, last)

    value, gradients = jax.value_and_grad(of_adapters)(trained)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return value, optax.apply_updates(trained, updates), state


def _facts(program: Any, devices: int) -> Row:
    """Returns the memory of a compiled program and what it sends."""
    text, memory = program.as_text(), program.memory_analysis()
    sent = collectives(text, devices)
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu', text)),
        "sent_bytes": sum(one.bytes for one in sent),
        "sent": dict(collections.Counter(one.kind for one in sent)),
    }


def _timed(programs: list[Program], settings: Settings) -> Iterator[Row]:
    """Yields the programs' rows with their median wall times, taken in turns."""
    times: list[list[float]] = [[] for _ in programs]
    drawn: dict[str, tuple[Any, ...]] = {}
    for turn in range(settings.rounds + 1):
        for place, one in enumerate(programs):
            if one.run is None:
                continue
            kind = one.row["kind"]
            try:
                if kind not in drawn:
                    drawn[kind] = (None, *arrays(one.model, settings.sizes.vocabulary))
                operands = _operands(one.row["task"], drawn[kind])
                begin = time.perf_counter()
                jax.block_until_ready(one.run(*operands))
            except Exception as error:
                programs[place] = _failed(one.row, one.model, error)
                times[place].clear()
                continue
            if turn:  # The first warms up.
                times[place].append(1e3 * (time.perf_counter() - begin))
    medians = {}
    for one, taken in zip(programs, times, strict=True):
        row = dict(one.row)
        if taken:
            row["ms"] = medians[row["kind"], row["task"]] = statistics.median(taken)
            row["spread_ms"] = max(taken) - min(taken)
        if row["kind"] == "DoRA" and ("LoRA", row["task"]) in medians and taken:
            row["over_lora"] = row["ms"] / medians["LoRA", row["task"]]
        yield row


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    name = f"{row['axes']:8} {row['layout']:5} r{row['rank']:<3} {row['kind']:4} {row['task']:9}"
    if "failed" in row:
        return f"{name} failed: {row['failed'][:150]}"
    ratio = f"  {row['over_lora']:.3f} of LoRA" if "over_lora" in row else ""
    return (
        f"{name} {row.get('ms', 0):8.2f} ms  temporaries {row['temp_bytes'] / 2**30:6.2f} GiB  "
        f"sent {row['sent_bytes'] / 2**20:8.1f} MiB in {sum(row['sent'].values()):3}  "
        f"{row['kernels']:2} kernels{ratio}"
    )
