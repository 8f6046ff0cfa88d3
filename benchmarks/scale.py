"""Level `scale`: a decoder on several devices: the base, LoRA and DoRA in one run.

Each layout is a mesh over all devices, and each kind of model is measured on it at a whole training
step and at inference, with automatic and with explicit axes; "alone" is data parallelism's share of
one device. The programs of a layout are timed in turns, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from flax import nnx

from benchmarks.collectives import collectives
from benchmarks.model.decoder import loss, update
from benchmarks.model.placed import LAYOUTS, Placed, arrays, placed
from benchmarks.model.protocol import LLAMA3, QUICK, QWEN3, Protocol
from benchmarks.programs import Program, compiled
from benchmarks.results import Row, milliseconds, over

KINDS = ("base", "LoRA", "DoRA")
MODELS = {
    "qwen3": dataclasses.replace(QWEN3, layers=12, tokens=2048),
    "llama3": dataclasses.replace(LLAMA3, tokens=2048),
}


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      model: of `MODELS`.
      sizes, layers: in place of the model's own.
      devices: how many of them; None for all.
    """

    model: str = "qwen3"
    sizes: Protocol | None = None
    layers: int | None = None
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    axes: tuple[str, ...] = ("auto", "explicit")
    ranks: tuple[int, ...] = (64, 384)
    rounds: int = 15
    devices: int | None = None

    def groups(self) -> Iterator[tuple[str, str, Protocol]]:
        """Yields what is timed in turns, the most wanted first: layout, axes, and sizes."""
        sizes = self.sizes or MODELS[self.model]
        sizes = dataclasses.replace(sizes, layers=self.layers or sizes.layers)
        for rank in self.ranks:
            for layout in self.layouts:
                for axes in self.axes[:1] if layout == "alone" else self.axes:
                    # rsLoRA's scale is 1.
                    yield layout, axes, dataclasses.replace(sizes, rank=rank, alpha=rank**0.5)


TINY = Settings(sizes=QUICK, ranks=(8,), rounds=1, devices=2)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement: times, memory, and what travels between the devices."""
    for layout, axes, sizes in settings.groups():
        mesh = LAYOUTS[layout].mesh(axes, settings.devices)
        models = {kind: placed(kind, LAYOUTS[layout], mesh, sizes, device) for kind in KINDS}
        rows = []
        for kind in KINDS:
            # A base has nothing to train.
            for task in ("inference",) if kind == "base" else ("inference", "step"):
                row: Row = {"kind": kind, "layout": layout, "axes": axes, "task": task}
                row |= {"model": settings.model, "devices": mesh.size, "hidden": sizes.hidden}
                rows.append(row | sizes.shape())
        # Nothing is timed while anything compiles.
        lowers = [functools.partial(_lowered, models, mesh, sizes.last, row) for row in rows]
        with ThreadPoolExecutor() as pool:
            programs = list(pool.map(compiled, rows, lowers))
        yield from _timed(programs, models, sizes.vocabulary, settings.rounds)


def _operands(task: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the operands of a task's program, of a placed model or its arrays."""
    _, trained, frozen, state, tokens = arrays
    return (trained, frozen, state, tokens) if task == "step" else (trained, frozen, tokens)


def _lowered(models: Mapping[str, Placed], mesh: Any, last: int, row: Row) -> Any:
    model = models[row["kind"]]
    with jax.set_mesh(mesh):
        return program(row["task"], model, last).lower(*_operands(row["task"], model))


def program(task: str, model: Placed, last: int) -> Any:
    """Returns "inference" or "step" of a placed model as a jitted function of its arrays."""
    if task == "inference":
        return jax.jit(functools.partial(_inference, model.graphdef, last))
    made = jax.tree.map(lambda one: one.sharding, (model.trained, model.state))
    step = functools.partial(update, model.graphdef, functools.partial(loss, last=last))
    return jax.jit(step, out_shardings=(None, *made))


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array) -> Any:
    return nnx.merge(graphdef, trained, frozen)(tokens[:, :-1], last)


def _sent(run: Any, devices: int) -> Row:
    """Returns the collectives of a compiled program: their bytes, and how many there are of each
    kind."""
    sent = collectives(run.as_text(), devices)
    kinds = collections.Counter(one.kind for one in sent)
    return {"sent_bytes": sum(one.bytes for one in sent), "sent": dict(kinds)}


def _timed(
    programs: list[Program], models: Mapping[str, Placed], vocabulary: int, rounds: int
) -> Iterator[Row]:
    """Yields the programs' rows with their median wall times, taken in turns."""
    times: list[list[float]] = [[] for _ in programs]
    drawn: dict[str, tuple[Any, ...]] = {}
    for turn in range(rounds + 1):
        for one, taken in zip(programs, times, strict=True):
            if one.run is None:
                continue
            if one.kind not in drawn:
                drawn[one.kind] = (None, *arrays(models[one.kind], vocabulary))
            operands = _operands(one.row["task"], drawn[one.kind])
            begin = time.perf_counter()
            jax.block_until_ready(one.run(*operands))
            if turn:  # The first warms up.
                taken.append(time.perf_counter() - begin)
    lora: dict[str, Row] = {}  # by task
    for one, taken in zip(programs, times, strict=True):
        row = one.row
        if one.run is not None:
            row |= _sent(one.run, row["devices"]) | milliseconds(taken)
        if row["kind"] == "LoRA":
            lora[row["task"]] = row
        yield over(row, lora.get(row["task"]), "over_lora") if row["kind"] == "DoRA" else row
