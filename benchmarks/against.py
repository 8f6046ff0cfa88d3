"""Level `against`: layers and a model of JAX with this checkout and with another one, in one run.

`python -m benchmarks against CHECKOUT` starts two processes with the benchmarks of this checkout:
one imports jax_dora of this checkout (`state` "here"), the other one that of CHECKOUT ("there").
They take turns, so that a change of the card's clocks affects both. DoRA and LoRA are measured: one
layer at several sizes, and inference and an optimizer step of a decoder.

One line is one piece of work in one state. `device` and `wall` are the medians over the turns, and
`device_over_there` and `wall_over_there` are the times here divided by those there. Results of
layers are compared with fp64 (`check`). A model has the same random weights in both states, and
`value` is its mean absolute result, to be compared between the states.
"""

import dataclasses
import functools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import parity  # noqa: F401  (this checkout's; later imports find the packages of a process's own)
from benchmarks import clock
from benchmarks.clock import Effort, Spread
from benchmarks.results import Row
from benchmarks.work import Variant, Work, matches

KIND = "comparison"
ROOT = Path(__file__).parents[1]
# How many turns each checkout has, and how long one turn is.
ROUNDS = 5
EFFORT = Effort(least=3, most=60, blocks=2)
# rows, in, out, rank
LAYERS = (
    (4096, 4096, 4096, 64),
    (4096, 8192, 8192, 384),
    (4096, 4096, 14336, 64),
    (4096, 14336, 4096, 64),
    (4096, 1024, 3072, 8),
)
QUICK_LAYERS = ((24, 64, 48, 8),)
COMPARED = ("jax DoRA (no Triton)", "jax LoRA (no Triton)")


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      checkout: the root of the other checkout.
      quick: whether to use tiny shapes and one step each.
      only: `fnmatch` patterns; a "<work> <variant>" that begins like none of them is skipped.
    """

    checkout: Path = Path()
    quick: bool = False
    only: tuple[str, ...] = ()


TINY = Settings(quick=True)


def refuses(settings: Settings) -> str:
    """Returns why there is no checkout to compare with, or an empty string."""
    root = settings.checkout
    if not (root / "jax_dora" / "__init__.py").is_file():
        return f"{root} holds no jax_dora; expected the root of another checkout"
    return "" if root.resolve() != ROOT.resolve() else f"{root} is this very checkout"


def facts(settings: Settings, device: str) -> Row:
    """Returns what the header says of the other checkout: its commit, or the folder's name."""
    from parity.environment import environment

    root = settings.checkout
    # In a folder without a .git of its own, git would report the repository around the folder.
    is_repository = (root / ".git").exists()
    return {"against": environment("cpu", root=root)["commit"] if is_repository else root.name}


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields two rows for each piece of work, one for each state."""
    roots = {"here": ROOT, "there": settings.checkout.resolve()}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache, ExitStack() as stack:
        connections: dict[str, Connection] = {}
        for state, root in roots.items():
            connections[state], end = spawn.Pipe()
            arguments = (end, root, settings, device, cache)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            stack.callback(process.kill)
            end.close()
        yield from _in_turns(connections)


def _in_turns(connections: dict[str, Connection]) -> Iterator[Row]:
    def ask(state: str, request: str) -> Any:
        connections[state].send(request)
        return connections[state].recv()

    try:
        # Only one process works at a time: while XLA tries kernels, nothing else may run.
        while None not in (rows := {state: ask(state, "next") for state in connections}).values():
            times: dict[str, list[dict[str, float]]] = {state: [] for state in connections}
            for turn in range(ROUNDS):
                for state in list(connections)[:: 1 if turn % 2 else -1]:
                    times[state].append(ask(state, "time"))
            for name in times["here"][0]:
                spreads = {
                    state: Spread.of([one[name] for one in turns]) for state, turns in times.items()
                }
                for state, spread in spreads.items():
                    rows[state][name] = spread._asdict()
                ratio = spreads["here"].median / spreads["there"].median
                rows["here"][f"{name}_over_there"] = ratio
            yield from ({"state": state} | row for state, row in rows.items())
    except (EOFError, OSError):
        yield {"failed": "one of the processes has ended; its last words are above"}


def _serve(end: Connection, root: Path, settings: Settings, device: str, cache: str) -> None:
    """Answers the requests of `_in_turns` with the packages of the checkout at `root`."""
    sys.path.insert(0, str(root))
    import jax_dora

    if not Path(str(jax_dora.__file__)).is_relative_to(root):
        raise RuntimeError(f"jax_dora is {jax_dora.__file__}; expected that of {root}")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # Programs this small take far longer to compile than to run.
        jax.config.update("jax_disable_most_optimizations", True)
    else:
        # A shared cache, so that both checkouts use the same choice among cuBLAS's kernels.
        jax.config.update("jax_compilation_cache_dir", cache)
    time: Callable[[], Row] | None = None
    answers = _measurements(settings, device)
    while True:
        if end.recv() == "time":
            assert time is not None
            end.send(time())
        else:
            answer, time = next(answers, (None, None))
            end.send(answer)


def _measurements(settings: Settings, device: str) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields, for each piece of work, its row without times, and a function that takes times."""
    from benchmarks.measure import free, identity, prepare, take_times

    effort = clock.QUICK if settings.quick or device == "cpu" else EFFORT
    for work, variant in _cases(device, settings.quick):
        if not matches(f"{work.name} {variant.label}", settings.only):
            continue
        step, facts = prepare(work, variant, device)
        leaf = jax.tree.leaves(step(*variant.inputs[0]))[0]
        value = float(jnp.abs(leaf.astype(jnp.float32)).mean())

        def times(variant: Variant = variant, step: Any = step) -> Row:
            spreads = take_times(variant, step, device, effort)
            return {clock: spread.median for clock, spread in spreads.items()}

        yield identity(work, variant) | facts | {"value": value}, times
        del step, leaf, times
        free()


def _cases(device: str, quick: bool) -> Iterator[tuple[Work, Variant]]:
    from benchmarks import layer, model
    from benchmarks.model.protocol import QUICK, QWEN3, Kind

    for shape in QUICK_LAYERS if quick else LAYERS:
        problem = functools.cache(functools.partial(layer.Problem.draw, *shape, device))
        for backward in (True,) if quick else (False, True):
            work = layer.work(problem, False, backward, with_torch=False)
            yield from ((work, v) for v in work.variants if v.label in COMPARED)
    shorter = dataclasses.replace(QWEN3, layers=6, rank=64, alpha=64)
    protocol = QUICK if quick else shorter
    for method in ("DoRA",) if quick else ("DoRA", "LoRA"):
        kind = Kind(f"{method} (no Triton)", method, (), fused_swiglu=False)
        for task in ("step",) if quick else ("inference", "step"):
            work = model.work(kind, task, protocol, device, checked=False)
            yield work, work.variants[0]
