"""Level `against`: this checkout and another one in one run, in processes that take turns.

The benchmark is this checkout's, the packages are each one's own. Layers are held against fp64. Of
a model, which random numbers fill anew in each checkout, `value` is a result of both.
"""

from __future__ import annotations

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

import parity  # noqa: F401  (ours, like this package; what is imported later is a checkout's own)
from benchmarks import clock
from benchmarks.clock import Effort, Spread
from benchmarks.results import Row
from benchmarks.work import Variant, Work, matches

KIND = "comparison"
ROOT = Path(__file__).parents[1]
# How often each checkout has its turn, and how long one is.
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
      checkout: the root of the other one.
      only: how the measured "<work> <variant>" begin.
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
    """Returns the facts about the other checkout for the header of the results."""
    from parity.environment import environment

    root = settings.checkout
    # In a folder without a git of its own, git would tell of the folder around it.
    told = environment("cpu", root=root)["commit"] if (root / ".git").exists() else root.name
    return {"against": told}


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields each measurement of both checkouts, whose `state` is "here" or "there"; its times are
    medians of the checkout's turns, and `over_there` says how they compare."""
    roots = {"here": ROOT, "there": settings.checkout.resolve()}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as compiled, ExitStack() as stack:
        ends: dict[str, Connection] = {}
        for state, root in roots.items():
            ends[state], end = spawn.Pipe()
            arguments = (end, root, settings, device, compiled)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            stack.callback(process.kill)
            end.close()
        yield from _in_turns(ends)


def _in_turns(ends: dict[str, Connection]) -> Iterator[Row]:
    def ask(state: str, request: str) -> Any:
        ends[state].send(request)
        return ends[state].recv()

    try:
        # One after the other: while XLA tries kernels, nothing else may run.
        while None not in (found := {state: ask(state, "next") for state in ends}).values():
            times: dict[str, list[dict[str, float]]] = {state: [] for state in ends}
            for turn in range(ROUNDS):
                for state in list(ends)[:: 1 if turn % 2 else -1]:
                    times[state].append(ask(state, "time"))
            for name in times["here"][0]:
                spreads = {
                    state: Spread.of([one[name] for one in turns]) for state, turns in times.items()
                }
                for state, spread in spreads.items():
                    found[state][name] = spread._asdict()
                over = spreads["here"].median / spreads["there"].median
                found["here"][f"{name}_over_there"] = over
            yield from ({"state": state} | row for state, row in found.items())
    except (EOFError, OSError):
        yield {"failed": "one of the processes has ended; its last words are above"}


def _serve(end: Connection, root: Path, settings: Settings, device: str, compiled: str) -> None:
    """Answers requests of `_in_turns` with the packages of the checkout at `root`."""
    sys.path.insert(0, str(root))
    import jax_dora

    if not Path(str(jax_dora.__file__)).is_relative_to(root):
        raise RuntimeError(f"jax_dora is {jax_dora.__file__}; expected that of {root}")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # Programs this small take far longer to compile than to run.
        jax.config.update("jax_disable_most_optimizations", True)
    else:
        # Which of cuBLAS's kernels are the fastest two checkouts find alike.
        jax.config.update("jax_compilation_cache_dir", compiled)
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
    """Yields a measurement without times of each piece of work, and what takes them."""
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
            return {c: spread.median for c, spread in spreads.items()}

        yield identity(work, variant) | facts | {"value": value}, times
        del step, leaf, times
        free()


def _cases(device: str, quick: bool) -> Iterator[tuple[Work, Variant]]:
    from benchmarks import layer, model
    from benchmarks.model.protocol import QUICK, QWEN3, Kind
    from benchmarks.problem import Problem

    for shape in QUICK_LAYERS if quick else LAYERS:
        problem = functools.cache(functools.partial(Problem.draw, *shape, device))
        for backward in (True,) if quick else (False, True):
            work = layer.work(problem, False, backward, ("jax",))
            yield from ((work, v) for v in work.variants if v.label in COMPARED)
    shorter = dataclasses.replace(QWEN3, layers=6, rank=64, alpha=64)
    protocol = QUICK if quick else shorter
    for method in ("DoRA",) if quick else ("DoRA", "LoRA"):
        kind = Kind("jax", f"{method} (no Triton)", method, (), fused_swiglu=False)
        for task in ("step",) if quick else ("inference", "step"):
            work = model.work(kind, task, protocol, device, checked=False)
            yield work, work.variants[0]
