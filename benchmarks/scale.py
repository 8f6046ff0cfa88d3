"""Level `scale`: a decoder on one or several devices, as it is ("base"), with LoRA, and with DoRA.

--model chooses the model, one of `MODELS`: 12 layers of Qwen3-8B's width, all of Llama-3-8B, or, as
most users of Flax write a decoder, a Python list of 6 layers of Qwen3-8B's width or of 12 of
Qwen3-0.6B's. Each layout is a mesh over all devices: tensor parallelism ("tp"), FSDP ("fsdp"), data
parallelism ("dp"), FSDP over pairs of devices that share the columns ("fsdp-tp"), or one device
with its share of data parallelism ("alone"). Inference and an optimizer step are measured with
automatic and with explicit mesh axes, and with adapters of rank 64 and 384. --only names the kinds
to measure; "DoRA, inner computed again" does not keep what the gradient of a layer's last magnitude
reads, "DoRA, frozen" is inference with a constant norm, and "DoRA, triton" names an implementation
for every layer, as do "mosaic" and "xla".

All programs of one layout, kind of axes and rank are compiled first, and then timed in turns, so
that a disturbance affects all of them. One line is one program: its median wall time (`ms`) in a
series of `calls`, the largest minus the smallest (`spread_ms`), `over_lora` (DoRA's time divided by
LoRA's), on one GPU the median time of its kernels in a call (`device_ms`), XLA's account of its
memory, its compile time, and the bytes (`sent_bytes`) and number (`sent`) of its collectives,
counted once for the layers, which are a loop.
"""

import collections
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from flax import nnx

from benchmarks.collectives import collectives
from benchmarks.model.decoder import loss, update
from benchmarks.model.placed import (
    FROZEN,
    INNER_AGAIN,
    LAYOUTS,
    NAMED,
    Placed,
    drawing,
    on_own_axes,
    placed,
)
from benchmarks.model.protocol import LLAMA3, QUICK, QWEN3, Protocol
from benchmarks.programs import Program, compiled
from benchmarks.results import Row, milliseconds, with_ratio

KINDS = ("base", "LoRA", "DoRA")


class Model(NamedTuple):
    """The sizes of a decoder, and whether its layers are in a scan or in a Python list."""

    sizes: Protocol
    scanned: bool = True


MODELS = {
    "qwen3": Model(dataclasses.replace(QWEN3, layers=12, tokens=2048)),
    "llama3": Model(dataclasses.replace(LLAMA3, tokens=2048)),
    "list": Model(dataclasses.replace(QWEN3, layers=6), scanned=False),
    "list of small layers": Model(
        dataclasses.replace(QWEN3, hidden=1024, intermediate=3072, heads=16, layers=12),
        scanned=False,
    ),
}


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      model: a name in `MODELS`.
      sizes, layers: override the model's own.
      only: the kinds that are measured, of `KINDS`, `INNER_AGAIN`, `FROZEN` and `NAMED`.
      calls: calls of a program in one turn. As in a training loop, no call is waited for before
        the next one.
      devices: number of devices; None for all.
    """

    model: str = "qwen3"
    sizes: Protocol | None = None
    layers: int | None = None
    layouts: tuple[str, ...] = ("tp", "fsdp", "dp", "alone")
    axes: tuple[str, ...] = ("auto", "explicit")
    ranks: tuple[int, ...] = (64, 384)
    only: tuple[str, ...] = KINDS
    rounds: int = 15
    calls: int = 4
    devices: int | None = None

    def groups(self) -> Iterator[tuple[str, str, Protocol]]:
        """Yields the layout, axes and sizes of each group that is timed in turns, the most
        interesting ones first."""
        sizes = self.sizes or MODELS[self.model].sizes
        sizes = dataclasses.replace(sizes, layers=self.layers or sizes.layers)
        for rank in self.ranks:
            for layout in self.layouts:
                for axes in self.axes[:1] if layout == "alone" else self.axes:
                    # With this alpha, the scale of rsLoRA is 1.
                    yield layout, axes, dataclasses.replace(sizes, rank=rank, alpha=rank**0.5)


TINY = Settings(sizes=QUICK, ranks=(8,), rounds=1, devices=2)


def refuses(settings: Settings) -> str:
    """Returns an error message about the settings, or ""."""
    return refuses_kinds(settings.only, (*KINDS, INNER_AGAIN, FROZEN, *NAMED))


def refuses_kinds(kinds: Sequence[str], known: Sequence[str]) -> str:
    """Returns an error message about a kind that is not `known`, or ""."""
    if unknown := [kind for kind in kinds if kind not in known]:
        return f"--only is {unknown[0]!r}; expected one of {', '.join(map(repr, known))}"
    return ""


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each program."""
    for layout, axes, sizes in settings.groups():
        mesh = LAYOUTS[layout].mesh(axes, settings.devices)
        kinds, scanned = settings.only, MODELS[settings.model].scanned
        models = {
            kind: placed(kind, LAYOUTS[layout], mesh, sizes, device, scanned) for kind in kinds
        }
        rows = []
        for kind in kinds:
            for task in ("inference",) if kind in ("base", FROZEN) else ("inference", "step"):
                row: Row = {"kind": kind, "layout": layout, "axes": axes, "task": task}
                row |= {"model": settings.model, "devices": mesh.size, "hidden": sizes.hidden}
                row |= {"calls": settings.calls}
                rows.append(row | sizes.shape())
        # Everything is compiled before anything is timed.
        lowers = [
            functools.partial(lowered, row["task"], models[row["kind"]], mesh, sizes.last)
            for row in rows
        ]
        draw = functools.partial(_compiled_drawing, vocabulary=sizes.vocabulary)
        with ThreadPoolExecutor() as pool:
            draws = pool.map(draw, models.values())
            programs = list(pool.map(compiled, rows, lowers))
        yield from _timed(programs, models, dict(zip(models, draws, strict=True)), settings)


def _compiled_drawing(model: Placed, vocabulary: int) -> Any:
    return drawing(model, vocabulary).lower().compile()


def operands_of(task: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the operands of a task's program, given a `Placed` or its arrays."""
    _, trained, frozen, state, tokens = arrays
    return (trained, frozen, state, tokens) if task == "step" else (trained, frozen, tokens)


def lowered(task: str, model: Placed, mesh: Any, last: int) -> Any:
    """Returns `program` of a model, lowered for its mesh."""
    with jax.set_mesh(mesh):
        return program(task, model, last).lower(*operands_of(task, model))


def program(task: str, model: Placed, last: int) -> Any:
    """Returns "inference" or "step" of a model as a jitted function of its arrays."""
    if task == "inference":
        return jax.jit(functools.partial(_inference, model.graphdef, last))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model.trained, model.state))
    step = functools.partial(update, model.graphdef, functools.partial(loss, last=last))
    return jax.jit(step, out_shardings=(None, *shardings))


def _inference(graphdef: Any, last: int, trained: Any, frozen: Any, tokens: jax.Array) -> Any:
    return nnx.merge(graphdef, trained, frozen, copy=True)(tokens[:, :-1], last)


def _timed(
    programs: list[Program],
    models: Mapping[str, Placed],
    draws: Mapping[str, Any],
    settings: Settings,
) -> Iterator[Row]:
    """Yields the rows of programs that are timed in turns; `draws` are the models' `drawing`."""
    times: list[list[float]] = [[] for _ in programs]
    drawn: dict[str, tuple[Any, ...]] = {}
    gc.collect()
    gc.freeze()  # Otherwise a collection looks through the models and programs during a call.
    for turn in range(settings.rounds + 1):
        for one, seconds in zip(programs, times, strict=True):
            if one.run is None:
                continue
            if one.kind not in drawn:
                drawn[one.kind] = (None, *on_own_axes(models[one.kind], draws[one.kind]()))
            operands = operands_of(one.row["task"], drawn[one.kind])
            begin = time.perf_counter()
            jax.block_until_ready([one.run(*operands) for _ in range(settings.calls)])
            if turn:  # The first turn is warm-up.
                seconds.append((time.perf_counter() - begin) / settings.calls)
    gc.unfreeze()
    lora: dict[str, Row] = {}  # by task
    for (row, run), seconds in zip(programs, times, strict=True):
        if run is not None:
            sent = collectives(run.as_text())
            row |= {"sent_bytes": sum(one.bytes for one in sent)}
            row |= {"sent": dict(collections.Counter(one.kind for one in sent))}
            row |= milliseconds(seconds)
            if row["devices"] == 1 and jax.default_backend() == "gpu":
                operands = operands_of(row["task"], drawn[row["kind"]])
                row |= {"device_ms": _device_ms(functools.partial(run, *operands))}
        if row["kind"] == "LoRA":
            lora[row["task"]] = row
        baseline = lora.get(row["task"]) if row["kind"].startswith("DoRA") else None
        yield with_ratio(row, baseline, "over_lora")


def _device_ms(call: Callable[[], Any]) -> float:
    """Returns the median time of the kernels of a call, in ms."""
    from benchmarks.clock import device_clock  # imports torch, as most uses of this file need not

    calls = [device_clock().kernels(call) for _ in range(5)]
    return 1e-3 * statistics.median(sum(us for _, us in kernels) for kernels in calls)
