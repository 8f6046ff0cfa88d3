"""Measurements in a process of its own, which answers one line of JSON to each line it reads.

A process may import the packages of another checkout than this one; the benchmark itself is ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import results

ROOT = Path(__file__).parents[1]


class WorkerError(RuntimeError):
    """The process has ended, or raised; its last words."""


class Worker:
    """A process that runs `serve(spec)` of a module: a generator of answers to requests.

    Args:
      spec: "module" names the module; "device" is "cuda" or "cpu".
      until: the process is stopped when `time.monotonic()` says so.
      root: the checkout whose packages it imports.

    Raises:
      TimeoutError: it is past `until`.
    """

    def __init__(self, spec: dict[str, Any], until: float, root: Path = ROOT) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time was left for it")
        self._stopped = False
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
        self._timer = threading.Timer(left, self._stop)
        self._timer.start()
        self._send(spec | {"root": str(root)})

    def ask(self, request: str = "next") -> Any:
        """Returns the answer, or None when the generator has ended.

        Raises:
          TimeoutError: it is past the time.
          WorkerError: the process has failed.
        """
        self._send(request)
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)["answer"]
        self._process.wait()
        if self._stopped:
            raise TimeoutError(f"no time was left for it: stopped ({request})")
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
    import jax

    import jax_dora

    if not Path(str(jax_dora.__file__)).is_relative_to(spec["root"]):
        raise RuntimeError(f"jax_dora is {jax_dora.__file__}; expected that of {spec['root']}")
    if spec["device"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # Programs this small take far longer to compile than to run.
        jax.config.update("jax_disable_most_optimizations", True)
    serving = importlib.import_module(spec["module"]).serve(spec)
    first = True
    for line in sys.stdin:
        try:
            answer = serving.send(None if first else json.loads(line))
        except StopIteration:
            answer = None
        first = False
        answers.write(results.line({"answer": answer}))
        answers.flush()
