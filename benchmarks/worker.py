"""Measurements in a process of its own, which answers one line of JSON to each line it reads.

A process may import the packages of another checkout than this one; the benchmark itself is ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results

if TYPE_CHECKING:
    from benchmarks.measure import Bench
    from benchmarks.work import Variant, Work

ROOT = Path(__file__).parents[1]


class WorkerError(RuntimeError):
    """The process has ended, or raised; its last words."""


class Deadline:
    """When the processes of a run must have ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._begin = seconds, time.monotonic()

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._begin)


class Worker:
    """A process that measures, one request after the other.

    Args:
      spec: what it is to measure; see `_works`.
      deadline: it is stopped then.
      root: the checkout whose packages it imports.

    Raises:
      TimeoutError: the deadline has passed.
    """

    def __init__(self, spec: dict[str, Any], deadline: Deadline, root: Path = ROOT) -> None:
        if deadline.left <= 0:
            raise TimeoutError("no time was left for it")
        self._doing, self._stopped, self._begin = "starts", False, time.monotonic()
        self._said = tempfile.TemporaryFile()
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if spec["device"] == "cuda":
            environment["JAX_COMPILATION_CACHE_DIR"] = _compiled().name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from benchmarks.worker import main; main()"],
            env=environment | os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(deadline.left, self._stop)
        self._timer.start()
        self._send(spec | {"root": str(root)})

    def ask(self, request: str) -> Any:
        """Returns the answer to "measure", "prepare" (None when all is done), "time", "ceilings".

        Raises:
          TimeoutError: the deadline has passed.
          WorkerError: the process has failed.
        """
        self._doing = request
        self._send(request)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        if self._stopped:
            after = time.monotonic() - self._begin
            raise TimeoutError(f"no time was left for it: stopped after {after:.0f} s ({request})")
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip().split("\n")
        raise WorkerError(words[-1][:400] or f"no output ({request})")

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            # With its children, which would keep the pipe open.
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._process.poll() is None:
            self._stop()
        self._process.communicate()
        self._said.close()


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for this run: what one process has compiled, and which of cuBLAS's kernels
    are the fastest, the next need not find out again, and two checkouts find the same."""
    return tempfile.TemporaryDirectory()


def main() -> None:
    """Answers requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    spec = json.loads(sys.stdin.readline())
    import parity  # noqa: F401  (ours; what follows is the other checkout's)

    sys.path.insert(0, spec["root"])
    import jax_dora
    from benchmarks import measure as measuring

    if not Path(str(jax_dora.__file__)).is_relative_to(spec["root"]):
        raise RuntimeError(f"jax_dora is {jax_dora.__file__}; expected that of {spec['root']}")

    if spec["device"] == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
    bench = measuring.Bench.on(spec["device"], spec["quick"], tuple(spec.get("only", ())))
    pairs = _pairs(spec, bench)
    timing: Callable[[], dict[str, Any]] | None = None
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if request == "ceilings":
            answer = dataclasses.asdict(measuring.ceilings(bench))
        elif request == "time":
            assert timing is not None
            answer = {k: v and dataclasses.asdict(v) for k, v in timing().items()}
        elif (pair := next(pairs, None)) is not None:
            work, variant = pair
            if request == "measure":
                answer = measuring.measure(bench, work, variant).row()
            else:
                answer, timing = _prepare(bench, work, variant)
        answers.write(results.line({"answer": answer})[len('{"answer": ') : -2] + "\n")
        answers.flush()


def _prepare(bench: Bench, work: Work, variant: Variant) -> tuple[dict, Callable[[], dict]]:
    """Returns a measurement without times, and what takes them."""
    from benchmarks.measure import identity, prepare, take_times
    from benchmarks.report import Measurement

    fields = identity(work, variant)
    step: Any = None
    try:
        step, facts = prepare(bench, work, variant)
        fields |= facts
    except NotImplementedError as error:
        fields["refused"] = str(error)[:200]
    return Measurement(**fields).row(), lambda: take_times(bench, work, variant, step)


def _pairs(spec: dict[str, Any], bench: Bench) -> Iterator[tuple[Work, Variant]]:
    """Yields what `spec` names: a kind of model, or the layers that checkouts are compared by."""
    from benchmarks import layer, model
    from benchmarks.measure import free
    from benchmarks.model.protocol import Kind

    if spec["level"] == "model":
        kind = Kind(**(spec["kind"] | {"tasks": tuple(spec["kind"]["tasks"])}))
        for work in model.works(kind, bench.device, bench.quick):
            yield work, work.variants[0]
        return
    for make in layer.works(bench.device, bench.quick, compared=True):
        work = make()
        for variant in work.variants:
            if bench.includes(f"{work.name} {variant.label}"):
                yield work, variant
        del work
        free()
