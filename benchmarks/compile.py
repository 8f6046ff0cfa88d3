"""Level `compile`: the time until a program can run, for LoRA and DoRA.

The model is a decoder of Qwen3-8B's width, as a user of Flax writes it: a Python list of layers,
each under `nnx.remat` with `jax_dora.remat_policy()`. Inference and an optimizer step are compiled
for one device and, if there are several, for each layout of a mesh over all of them, with automatic
and with explicit axes; also for one device with the layers in a scan.

One line is one program, compiled in a process of its own: the seconds of `jit(f).lower()`
(`lower_s`: tracing and lowering) and of `.compile()` (`compile_s`), their sum (`seconds`), those of
the first call (`first_s`), in which the driver compiles Triton's kernels, the number of calls of
Mosaic's and Triton's kernels, and of different ones (`distinct`), and `over_lora`, DoRA's seconds
divided by LoRA's. With `cached` the program is compiled by further processes with
`JAX_COMPILATION_CACHE_DIR`, after a first one has filled it; `found` says whether it was there, and
the line is that of the median of their `seconds`, which `all_s` has. With `changed` they compile
another program of the same kernels.
Python's garbage, most of it of the model's construction, is collected before the clock starts.
While a process is measured, the next one imports its packages and waits. --model chooses between
two lists of layers of the level `scale`; --only names the kinds to measure; "DoRA, triton" names an
implementation for every layer, as do "mosaic" and "xla". --tasks names the programs, such as
"cached step".
"""

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.model.placed import LAYOUTS, NAMED, placed
from benchmarks.model.protocol import QUICK
from benchmarks.results import Row, attempt, with_ratio
from benchmarks.scale import MODELS, lowered, operands_of, refuses_kinds
from parity.environment import ROOT

KINDS = ("LoRA", "DoRA")
TASKS = ("inference", "step", "cached step", "scanned inference", "scanned step")
CHANGED = "changed cached step"
SECONDS = 120
"""The longest time that a process may take."""
AGAIN = 3
"""The number of processes with a filled cache."""


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      model: "list" or "list of small layers", of `MODELS`.
      layers: the number of layers; None for several.
      layouts: the layouts on several devices; "alone" is one device.
      tasks: the programs, of `TASKS` and `CHANGED`. The cached and scanned ones have six layers.
      only: the kinds that are measured, of `KINDS` and `NAMED`.
      ranks: the ranks of the adapters.
      quick: whether the model is tiny.
      devices: the number of devices; None for all.
    """

    model: str = "list"
    layers: int | None = None
    layouts: tuple[str, ...] = ("alone", "dp", "fsdp", "tp")
    axes: tuple[str, ...] = ("auto", "explicit")
    tasks: tuple[str, ...] = TASKS
    only: tuple[str, ...] = KINDS
    ranks: tuple[int, ...] = (64,)
    quick: bool = False
    devices: int | None = None

    def groups(self) -> Iterator[Row]:
        """Yields the fields that the rows of LoRA and DoRA share."""
        count = self.devices or jax.device_count()
        for rank in self.ranks:
            for layout in self.layouts:
                if layout != "alone" and count == 1:
                    continue
                alone = layout == "alone"
                for axes in self.axes[:1] if alone else self.axes:
                    depths = (2, 6, 12, 36) if alone else (2, 6)
                    for layers in (self.layers,) if self.layers else depths:
                        row = {"layout": layout, "axes": axes, "devices": 1 if alone else count}
                        row |= {"layers": layers, "rank": rank}
                        row |= {"model": self.model} if self.model != "list" else {}
                        for *how, task in map(str.split, self.tasks):
                            if not how or (layers == 6 and (alone or "scanned" not in how)):
                                yield {**row, "task": task} | dict.fromkeys(how, True)


TINY = Settings(layers=2, layouts=("alone", "fsdp"), axes=("auto",), quick=True, devices=2)


def refuses(settings: Settings) -> str:
    """Returns an error message about the settings, or ""."""
    known = (*TASKS, CHANGED)
    if unknown := [task for task in settings.tasks if task not in known]:
        return f"--tasks is {unknown[0]!r}; expected some of {', '.join(map(repr, known))}"
    return refuses_kinds(settings.only, (*KINDS, *NAMED))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each program."""
    rows = [{"kind": kind, **group} for group in settings.groups() for kind in settings.only]
    programs = [_Program(row | {"device": device, "quick": settings.quick}) for row in rows]
    lora: dict[str, Row] = {}
    try:
        for row, program, following in zip(rows, programs, [*programs[1:], None], strict=True):
            program.start()
            if following:
                following.start()
            group = json.dumps(row | {"kind": ""})
            row = attempt(row, program.measured)
            baseline = lora.get(group)
            if row["kind"] == "LoRA":
                lora[group], baseline = row, None
            yield with_ratio(row, baseline, "over_lora", "seconds")
    finally:
        for program in programs:
            program.stop()


class _Program:
    """A program that is compiled in a process of its own; if "cached" is set in the request, in
    processes that share a compilation cache with a first one."""

    def __init__(self, request: Row) -> None:
        self.request, self.requests = request, [request]
        if request.get("cached"):
            # A changed program is in the cache once it has been compiled.
            count = 1 if request.get("changed") else AGAIN
            self.requests = [request | {"changed": False}, *count * [request]]
        self.folder = tempfile.TemporaryDirectory()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Starts the next process, which then waits."""
        if self.process is None:
            environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            if self.request["device"] == "cpu":
                flag = f"--xla_force_host_platform_device_count={self.request['devices']}"
                environment |= {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
            if self.request.get("cached"):
                environment["JAX_COMPILATION_CACHE_DIR"] = self.folder.name
                # cuDNN's attention on a mesh is known by an address, a new one in every process.
                environment["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "true"
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.compile", json.dumps(self.requests[0])],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        return self.process

    def measured(self) -> Row:
        """Returns what `_compiled` returns in the last process, or the median one of the last."""
        rows = [self._row() for _ in self.requests.copy()]
        if not self.request.get("cached"):
            return rows[0]
        rows = sorted(rows[1:], key=lambda row: row["seconds"])
        return rows[len(rows) // 2] | {"all_s": [row["seconds"] for row in rows]}

    def _row(self) -> Row:
        text = self._finished()
        self.process = None
        del self.requests[0]
        return json.loads(text.splitlines()[-1])

    def _finished(self) -> str:
        process = self.start()
        text, errors = process.communicate("begin\n", timeout=SECONDS)
        if process.returncode:
            raise RuntimeError(errors)
        return text

    def stop(self) -> None:
        """Ends the process if it is still running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def _compiled(request: Row) -> Row:
    """Returns the times and the kernels of one program."""
    sizes = QUICK if request["quick"] else MODELS[request.get("model", "list")].sizes
    sizes = dataclasses.replace(sizes, layers=request["layers"])
    sizes = dataclasses.replace(sizes, rank=request["rank"], alpha=request["rank"] ** 0.5)
    layout = LAYOUTS[request["layout"]]
    mesh = layout.mesh(request["axes"], request["devices"])
    scanned = bool(request.get("scanned"))
    model = placed(request["kind"], layout, mesh, sizes, request["device"], scanned)
    jax.devices()
    gc.collect()
    if not sys.stdin.readline():
        sys.exit("the level has ended")
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    begin = time.perf_counter()
    last = sizes.last // 2 if request.get("changed") else sizes.last
    program = lowered(request["task"], model, mesh, last)
    middle = time.perf_counter()
    run = program.compile()
    end = time.perf_counter()
    row = {"lower_s": middle - begin, "compile_s": end - middle, "seconds": end - begin}
    if request.get("cached"):
        row |= {"found": "/jax/compilation_cache/cache_hits" in events}
    row |= {"first_s": _first_call(run, operands_of(request["task"], model))}
    names = re.findall(r'kernel_(?:hash|data) ?= ?"((?:[^"\\]|\\.)*)"', run.as_text())
    return row | {"kernels": len(names), "distinct": len(set(names))}


def _first_call(run: Any, operands: Any) -> float:
    """Returns the seconds of the first call of a program, with zeros."""
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), operands
    )
    jax.block_until_ready(zeros)
    begin = time.perf_counter()
    jax.block_until_ready(run(*zeros))
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(_compiled(json.loads(sys.argv[1]))))
