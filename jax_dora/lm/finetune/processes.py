"""Several processes that train one model together, each with its own devices.

All processes run the same steps with the same settings. Only the first process prints and writes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

_HEARTBEAT_SECONDS = 20  # after which JAX ends a process that another one does not answer
_LEAVE_SECONDS = 2


class FirstStoppedError(RuntimeError):
    """Raised in the other processes when the first process has stopped with an error."""


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins the other processes. This has to happen before JAX initialises its devices.

    Args:
      coordinator: "HOST:PORT" of the first process; "auto" to ask the cluster manager; None for a
        single process.
      processes: the number of processes; None with "auto".
      process: the number of this process, from 0; None with "auto".

    Raises:
      ValueError: the arguments do not fit together, or the processes cannot connect.
    """
    expected = (
        "expected `coordinator` HOST:PORT, `processes` and `process` for each process, or "
        "`coordinator` auto under SLURM, Open MPI or Kubernetes"
    )
    if coordinator is None or coordinator == "auto":
        if processes is not None or process is not None:
            raise ValueError(f"`processes` or `process` is given without HOST:PORT; {expected}")
    elif processes is None or process is None or process >= processes:
        raise ValueError(f"process={process}, processes={processes}: {expected}")
    if coordinator is None:
        return
    # For processes on CPU. It has no effect once JAX has initialised its devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        address = None if coordinator == "auto" else coordinator
        jax.distributed.initialize(
            address, processes, process, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the processes cannot connect: {error}; {expected}") from error


def leave(status: int) -> NoReturn:
    """Ends this process, but not before other processes have printed the same error.

    A normal exit would wait for the others, and they would wait for this process in a collective
    operation.
    """
    sys.stdout.flush()
    # JAX aborts the other processes when the first one ends, so that one waits longer.
    time.sleep(_LEAVE_SECONDS + is_first())
    os._exit(status)


def is_first() -> bool:
    """Returns whether this process is the first, which prints and writes."""
    return jax.process_index() == 0


def run_on_first(action: Callable[[], Any]) -> None:
    """Runs `action` in the first process only. The other processes wait.

    Raises:
      FirstStoppedError: in the other processes, if `action` raised an error in the first.
    """
    failed = None
    if is_first():
        try:
            action()
        except Exception as error:
            failed = error
    has_failed = multihost_utils.broadcast_one_to_all(np.int32(failed is not None))
    if failed is not None:
        raise failed
    if has_failed:
        raise FirstStoppedError("the first process has stopped and printed the reason")


def check_equal(settings: Mapping[str, Any]) -> None:
    """Checks that all processes have the same settings as the first process.

    With different settings, processes would compute different results without an error, or wait
    forever. Settings are compared as JSON. All paths count as equal, since they can differ between
    hosts.

    Raises:
      ValueError: the settings of a process differ.
    """
    here = json.loads(json.dumps(settings, default=lambda _: "a path"))
    first = _broadcast_json(here)
    differences = [
        f"{name} is {here.get(name)!r} here and {first.get(name)!r} there"
        for name in sorted(here | first)
        if here.get(name) != first.get(name)
    ]
    if any_process(bool(differences)):
        index = jax.process_index()
        raise ValueError(
            f"process {index} has other settings than process 0: {', '.join(differences)}; start "
            "all processes with the same settings and files"
            if differences
            else "another process has other settings than this one, and prints the differences"
        )


def _broadcast_json(value: Any) -> Any:
    """Returns the value of the first process in all processes, sent as JSON."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if is_first() else np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8).tobytes())


def any_process(value: bool) -> bool:
    """Returns whether `value` is true in at least one process."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(value))))


def minimum(number: float) -> float:
    """Returns the minimum of `number` over all processes."""
    return float(np.min(multihost_utils.process_allgather(np.float32(number))))
