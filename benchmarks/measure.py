"""Builds, checks and times the variants of a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks import clock
from benchmarks.check import judge
from benchmarks.clock import DeviceClock, Effort
from benchmarks.report import Ceilings, Measurement, Report
from benchmarks.work import Variant, Work, matches

# Elements of the copy and width of the matrix product that the ceilings are taken from.
CEILING_ELEMENTS = 2**30
CEILING_WIDTH = 8192

Step = Callable[..., Any]


@dataclass(frozen=True)
class Bench:
    """How a level is measured.

    Attributes:
      device: "cuda" or "cpu".
      quick: tiny shapes and one step each.
      only: how the measured "<work> <variant>" begin, as `fnmatch` patterns; empty for everything.
      clock: None without a GPU.
    """

    device: str
    quick: bool
    only: tuple[str, ...] = ()
    clock: DeviceClock | None = None

    @classmethod
    def on(cls, device: str, quick: bool, only: tuple[str, ...] = ()) -> Bench:
        return cls(device, quick, only, DeviceClock() if device == "cuda" else None)

    def includes(self, name: str) -> bool:
        return matches(name, self.only)

    def effort(self, work: Work | None = None) -> Effort:
        if self.quick or self.device == "cpu":
            return clock.QUICK
        return (work and work.effort) or Effort()


def measure_all(bench: Bench, report: Report, works: Iterable[Callable[[], Work]]) -> None:
    """Measures every piece of work into `report`."""
    for make in works:
        work = make()
        for variant in work.variants:
            if bench.includes(f"{work.name} {variant.label}"):
                report.add(measure(bench, work, variant))
        del work
        free()


def measure(bench: Bench, work: Work, variant: Variant) -> Measurement:
    """Returns one variant's measurement: built, checked against fp64, timed by both clocks.

    One variant that cannot be built or run must not cost the others' measurements: what is raised
    becomes the measurement's `refused` or `failed`.
    """
    fields = identity(work, variant)
    try:
        step, facts = prepare(bench, work, variant)
        fields |= facts
        fields |= take_times(bench, work, variant, step)
    except NotImplementedError as error:
        return Measurement(**identity(work, variant), refused=str(error)[:200])
    except Exception as error:
        fields["failed"] = f"{type(error).__name__}: {error}"[:400]
    return Measurement(**fields)


def identity(work: Work, variant: Variant) -> dict[str, Any]:
    """Returns what is known of a measurement before it is made."""
    return {
        "group": work.group,
        "shape": work.shape,
        "framework": variant.framework,
        "variant": variant.name,
        "bytes": work.bytes,
        "flops": variant.flops or work.flops,
        "baseline": work.baselines.get(variant.label, ""),
    }


def prepare(bench: Bench, work: Work, variant: Variant) -> tuple[Step, dict[str, Any]]:
    """Returns the step, run once and ready to be timed, with its memory and the check of it.

    Raises:
      NotImplementedError: the variant does not run here.
    """
    memory = "peak_bytes" if variant.whole else "temp_bytes"
    step, planned = _build(variant)
    outputs, held = _first(step, variant, bench.device)
    facts: dict[str, Any] = {memory: planned if variant.framework == "jax" else held}
    if variant.check is not None:
        facts["check"] = variant.check()
    else:
        expected = variant.expected or work.expected
        facts["check"] = judge(variant.results(outputs), expected, variant.exact)
    return step, facts


def take_times(bench: Bench, work: Work, variant: Variant, step: Step) -> dict[str, Any]:
    """Returns device and wall time of a prepared step."""
    effort, device = bench.effort(work), None
    if bench.clock is not None:
        device = bench.clock.time(variant.framework, step, variant.inputs, effort)
    wall = clock.wall_time(step, variant.inputs, effort)
    if device is not None:
        clock.check_clocks(variant.framework, device, wall)
    return {"device": device, "wall": wall}


def free() -> None:
    """Gives back what compiled programs and the allocators hold."""
    jax.clear_caches()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ceilings(bench: Bench) -> Ceilings:
    """Returns the copy and product rates of this run, each the better of the two frameworks'."""
    elements, width = CEILING_ELEMENTS, CEILING_WIDTH
    source = torch.randn(elements, device="cuda").bfloat16()
    a, b = (torch.randn(width, width, device="cuda").bfloat16() for _ in range(2))
    works = (
        ([(source,), (source.clone(),)], jnp.negative, torch.neg, 2 * 2 * elements),
        ([(a, b)], jnp.matmul, torch.matmul, 2 * width**3),
    )
    rates = []
    for sets, in_jax, in_torch, amount in works:
        jax_sets = [tuple(map(jax.dlpack.from_dlpack, one)) for one in sets]
        best = min(
            _seconds(bench, "jax", jax.jit(in_jax), jax_sets),
            _seconds(bench, "torch", in_torch, sets),
        )
        rates.append(amount / best)
    free()
    return Ceilings(*rates)


def _seconds(bench: Bench, framework: str, step: Step, sets: list[tuple]) -> float:
    assert bench.clock is not None
    clock.synchronise(step(*sets[0]))
    return bench.clock.time(framework, step, sets, bench.effort()).median * 1e-6


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
