"""Several processes that train one model, each with devices of its own.

All of them run the same steps on the same settings; the first alone prints and writes.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_dora.finetune.lifeline import Lifeline, connect, open_to

_REACHED = 10.0  # seconds to reach the first process in


class FirstStoppedError(RuntimeError):
    """The first of several processes cannot go on."""


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Joins the other processes; before JAX has looked for devices.

    Args:
      coordinator: "HOST:PORT" of the first process; "auto" for what the cluster says; None for a
        process alone.
      count, index: how many there are, and which this one is; None under "auto".
    """
    told = (
        "expected --coordinator HOST:PORT, --processes and --process of each, or --coordinator "
        "auto under SLURM, Open MPI or Kubernetes"
    )
    if coordinator is None or coordinator == "auto":
        if count is not None or index is not None:
            raise ValueError(f"--processes or --process is given without HOST:PORT; {told}")
    elif count is None or index is None or index >= count:
        raise ValueError(f"--process is {index} of --processes {count}; {told}")
    if coordinator is None:
        return
    # Of CPUs; it has to be said before their devices are made.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        address = None if coordinator == "auto" else coordinator
        jax.distributed.initialize(address, count, index)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the processes do not find each other: {error}; {told}") from error


def lifeline(coordinator: str | None) -> tuple[Lifeline, bool]:
    """Connects the processes that have joined by `coordinator`, so that each hears when another is
    gone; returns the connections, and whether all of them could be made."""
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return Lifeline(index, {}), True
    host = (coordinator or "").rpartition(":")[0].strip("[]") or socket.gethostname()
    address, accept = "", None
    if index == 0:
        with contextlib.suppress(OSError):  # Without it a run is as good as JAX is.
            address, accept = open_to(count, host)
    address = _of_the_first(address)
    others = accept(2 * _REACHED) if accept else connect(address, index, _REACHED)
    is_whole = not anywhere(len(others) < (count - 1 if index == 0 else 1))
    if not is_whole:
        for connection in others.values():
            connection.close()
        others = {}
    return Lifeline(index, others), is_whole


def is_first() -> bool:
    """Returns whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def first_does(action: Callable[[], Any]) -> None:
    """Runs `action` in the first process alone, while the others wait for it."""
    failed = None
    if is_first():
        try:
            action()
        except Exception as error:
            failed = error
    told = multihost_utils.broadcast_one_to_all(np.int32(failed is not None))
    if failed is not None:
        raise failed
    if told:
        raise FirstStoppedError("the first process has stopped, and says why")


def compare(given: Mapping[str, Any]) -> None:
    """Compares what the processes were given with what the first was, as JSON: each would compute
    something else without an error, or wait for ever."""
    here = json.loads(json.dumps(given))
    first = _of_the_first(here)
    told = [
        f"{name} is {here.get(name)!r} here and {first.get(name)!r} there"
        for name in sorted(here | first)
        if here.get(name) != first.get(name)
    ]
    if anywhere(bool(told)):
        index = jax.process_index()
        raise ValueError(
            f"process {index} was not given what process 0 was: {', '.join(told)}; start all of "
            "them with the same flags and files"
            if told
            else "another process was not given what this one was, and says what"
        )


def _of_the_first(value: Any) -> Any:
    """Returns the first process's value, which JSON can hold."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = text if is_first() else np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text), np.uint8).tobytes())


def anywhere(is_so: bool) -> bool:
    """Returns whether it is so in any of the processes."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(is_so))))


def least(number: float) -> float:
    """Returns the least of the processes' numbers."""
    return float(np.min(multihost_utils.process_allgather(np.float32(number))))
