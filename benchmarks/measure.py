"""Builds, checks and times pieces of work: levels `ops`, `layer`, `model` and `tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from benchmarks import clock
from benchmarks.arrays import to_jax, to_torch
from benchmarks.check import judge
from benchmarks.clock import Effort, Spread, device_clock
from benchmarks.report import Report
from benchmarks.results import Row
from benchmarks.work import Variant, Work, matches

KIND = "benchmark"
# Elements of the copy and width of the matrix product that the ceilings are taken from.
CEILING_ELEMENTS = 2**30
CEILING_WIDTH = 8192

Step = Callable[..., Any]


class Settings(NamedTuple):
    """The settings of a level.

    Attributes:
      works: yields what makes each piece of work when its turn comes, of a device and of settings.
      quick: tiny shapes and one step each.
      only: how the measured "<work> <variant>" begin, as `fnmatch` patterns; empty for everything.
    """

    works: Callable[[str, Settings], Iterable[Callable[[], Work]]]
    quick: bool = False
    only: tuple[str, ...] = ()


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields a line of results for every variant of every piece of work."""
    for make in settings.works(device, settings):
        work = make()
        for variant in work.variants:
            if matches(f"{work.name} {variant.label}", settings.only):
                yield measured(work, variant, device, settings.quick)
        del work
        free()


def facts(settings: Settings, device: str) -> Row:
    """Returns the facts about the card for the header of the results: its ceilings."""
    return {"ceilings": ceilings()} if device == "cuda" else {}


def summary(header: Row, rows: list[Row]) -> str:
    """Returns tables of all that was measured."""
    return Report(header, rows).text()


def measured(work: Work, variant: Variant, device: str, quick: bool) -> Row:
    """Returns one variant's row: built, checked against fp64, timed by both clocks.

    One variant that cannot be built or run must not cost the others' measurements: what is raised
    becomes the row's `refused` or `failed`.
    """
    row = identity(work, variant)
    effort = clock.QUICK if quick or device == "cpu" else work.effort or Effort()
    try:
        step, facts = prepare(work, variant, device)
        row |= facts
        spreads = take_times(variant, step, device, effort)
        row |= {name: spread._asdict() for name, spread in spreads.items()}
    except NotImplementedError as error:
        return identity(work, variant) | {"refused": str(error)[:200]}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:400]
    return row


def identity(work: Work, variant: Variant) -> Row:
    """Returns the fields of a measurement's row that are known before it is made."""
    row: Row = {"group": work.group, "shape": work.shape}
    row |= {"framework": variant.framework, "variant": variant.name}
    row |= {"bytes": work.bytes, "flops": variant.flops or work.flops}
    if variant.label in work.baselines:
        row["baseline"] = work.baselines[variant.label]
    return row


def prepare(work: Work, variant: Variant, device: str) -> tuple[Step, Row]:
    """Returns the step, run once and ready to be timed, with its memory and the check of it.

    Raises:
      NotImplementedError: the variant does not run here.
    """
    step, planned = _build(variant)
    outputs, held = _first(step, variant, device)
    facts: Row = {}
    if memory := planned if variant.framework == "jax" else held:
        facts["peak_bytes" if variant.whole else "temp_bytes"] = memory
    if variant.check is not None:
        facts["check"] = variant.check()
    else:
        expected = variant.expected or work.expected
        facts["check"] = judge(_named(variant, outputs, expected), expected, variant.exact)
    return step, facts


def _named(variant: Variant, outputs: Any, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns as torch tensors what a step has returned, by name."""
    if variant.results is not None:
        return variant.results(outputs)
    if not isinstance(outputs, Mapping):
        outputs = dict(zip(expected, jax.tree.leaves(outputs), strict=True))
    return outputs if variant.framework == "torch" else jax.tree.map(to_torch, outputs)


def take_times(variant: Variant, step: Step, device: str, effort: Effort) -> dict[str, Spread]:
    """Returns a prepared step's time by "wall", and by "device" where there is a GPU."""
    if device != "cuda":
        return {"wall": clock.wall_time(step, variant.inputs, effort)}
    on_device = device_clock().time(variant.framework, step, variant.inputs, effort)
    wall = clock.wall_time(step, variant.inputs, effort)
    clock.check_clocks(variant.framework, on_device, wall)
    return {"device": on_device, "wall": wall}


def free() -> None:
    """Gives back what compiled programs and the allocators hold."""
    jax.clear_caches()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ceilings() -> Row:
    """Returns the copy and product rates of this run, each the better of the two frameworks'."""
    elements, width = CEILING_ELEMENTS, CEILING_WIDTH
    source = torch.randn(elements, device="cuda").bfloat16()
    a, b = (torch.randn(width, width, device="cuda").bfloat16() for _ in range(2))
    works = {
        "copy": ([(source,), (source.clone(),)], jnp.negative, torch.neg, 2 * 2 * elements),
        "matmul": ([(a, b)], jnp.matmul, torch.matmul, 2 * width**3),
    }
    rates = {}
    for name, (sets, in_jax, in_torch, amount) in works.items():
        both = ("jax", jax.jit(in_jax), to_jax(sets)), ("torch", in_torch, sets)
        rates[name] = amount / min(_seconds(*one) for one in both)
    free()
    return rates


def _seconds(framework: str, step: Step, sets: list[tuple]) -> float:
    clock.synchronise(step(*sets[0]))
    return device_clock().time(framework, step, sets, Effort()).median * 1e-6


def _build(variant: Variant) -> tuple[Step, int | None]:
    """Returns the step, compiled if JAX's, and the bytes that XLA plans for it."""
    if variant.framework == "torch":
        return variant.step, None
    lowered = jax.jit(variant.step).lower(*variant.inputs[0])
    options = dict(variant.compiler_options) if jax.default_backend() == "gpu" else {}
    compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    if memory is None:
        return compiled, None
    planned = memory.temp_size_in_bytes
    if variant.whole:
        planned += memory.argument_size_in_bytes + memory.output_size_in_bytes
        planned -= memory.alias_size_in_bytes
    return compiled, planned


def _first(step: Step, variant: Variant, device: str) -> tuple[Any, int | None]:
    """Returns the first result, and the bytes that torch held at most."""
    result = step(*variant.inputs[0])
    clock.synchronise(result)
    if variant.framework == "jax" or device == "cpu":
        return result, None
    # Observed the second time: autotuning, workspaces and compilation allocate.
    del result
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = step(*variant.inputs[0])
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    # Temporaries are what is beyond arguments and results.
    return result, peak if variant.whole else peak - after
