"""Builds, checks and times the variants of a piece of work."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from rich.console import Console

from benchmarks import clock
from benchmarks.check import judge
from benchmarks.clock import DeviceClock, Effort
from benchmarks.report import Ceilings, Measurement, Report
from benchmarks.work import Variant, Work

# Elements of the copy and width of the matrix product that the ceilings are taken from.
CEILING_ELEMENTS = 2**30
CEILING_WIDTH = 8192


@dataclass(frozen=True)
class Bench:
    """How a level is measured.

    Attributes:
      device: "cuda" or "cpu".
      clock: None without a GPU.
      effort: how long to measure.
      only: how the wanted "<work> <variant>" begin, as `fnmatch` patterns; empty for everything.
    """

    device: str
    clock: DeviceClock | None
    effort: Effort
    only: tuple[str, ...] = ()

    def wants(self, work: Work, variant: Variant) -> bool:
        name = f"{work.name} {variant.label}"
        return not self.only or any(fnmatch.fnmatch(name, f"{p}*") for p in self.only)


def measure_all(
    bench: Bench,
    report: Report,
    works: Iterable[Callable[[], Work]],
    folder: Path,
    console: Console,
) -> None:
    """Measures every piece of work into `report`, which is written after each."""
    for make in works:
        work = make()
        wanted = [variant for variant in work.variants if bench.wants(work, variant)]
        for variant in wanted:
            measurement = measure(bench, work, variant)
            report.measurements.append(measurement)
            console.print(_line(measurement, report.ceilings), highlight=False, soft_wrap=True)
        if wanted:
            report.write(folder)
        del work, wanted
        free()
    report.complete = True
    report.write(folder)


def measure(bench: Bench, work: Work, variant: Variant) -> Measurement:
    """One variant: built, checked against fp64, timed by both clocks."""
    fields: dict[str, Any] = {
        "group": work.group,
        "shape": work.shape,
        "framework": variant.framework,
        "variant": variant.name,
        "bytes": variant.bytes or work.bytes,
        "flops": variant.flops or work.flops,
        "cached": variant.cached,
        "config": dict(variant.config),
        "baseline": work.baselines.get(variant.label, ""),
    }
    if variant.unless:
        return Measurement(**fields, refused=variant.unless)
    # One variant that cannot be built or run must not cost the others' measurements.
    try:
        step, temp = _build(variant)
        outputs, peak = _first(step, variant, bench.device)
        fields |= {"temp_bytes": temp if variant.framework == "jax" else peak}
        fields["check"] = judge(
            variant.results(outputs), variant.expected or work.expected, variant.exact
        )
        del outputs
        if bench.clock is not None:
            times = bench.clock.time(variant.framework, step, variant.inputs, bench.effort)
            fields |= {"device": times.total, "kernels": times.kernels}
        fields["wall"] = clock.wall_time(step, variant.inputs, bench.effort)
        if bench.clock is not None:
            clock.check_clocks(variant.framework, fields["device"], fields["wall"])
    except NotImplementedError as error:
        return Measurement(**fields, refused=str(error))
    except Exception as error:
        fields["failed"] = f"{type(error).__name__}: {error}"[:400]
    return Measurement(**fields)


def free() -> None:
    """Gives back what compiled programs and the allocators hold."""
    jax.clear_caches()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ceilings(bench: Bench) -> Ceilings:
    """The copy and matrix-product rates of this run, each the better of the two frameworks'."""
    elements, width = CEILING_ELEMENTS, CEILING_WIDTH
    source = torch.randn(elements, device="cuda").bfloat16()
    sets = [(source,), (source.clone(),)]
    jax_sets = [(jax.dlpack.from_dlpack(x),) for (x,) in sets]
    copies = (
        _seconds(bench, "jax", jax.jit(jnp.negative), jax_sets),
        _seconds(bench, "torch", torch.neg, sets),
    )
    del source, sets, jax_sets
    a, b = (torch.randn(width, width, device="cuda").bfloat16() for _ in range(2))
    products = (
        _seconds(
            bench,
            "jax",
            jax.jit(jnp.matmul),
            [(jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b))],
        ),
        _seconds(bench, "torch", torch.matmul, [(a, b)]),
    )
    del a, b
    free()
    return Ceilings(2 * 2 * elements / min(copies), 2 * width**3 / min(products))


def _seconds(bench: Bench, framework: str, step: Callable, sets: list[tuple]) -> float:
    assert bench.clock is not None
    clock.synchronise(step(*sets[0]))
    return bench.clock.time(framework, step, sets, bench.effort).total.median * 1e-6


def _build(variant: Variant) -> tuple[Callable, int | None]:
    """The step, compiled if JAX's, and the bytes of temporaries that XLA plans for it."""
    if variant.framework == "torch":
        return variant.step, None
    lowered = jax.jit(variant.step).lower(*variant.inputs[0])
    compiled = lowered.compile(compiler_options=dict(variant.compiler_options))
    memory = compiled.memory_analysis()
    return compiled, None if memory is None else memory.temp_size_in_bytes


def _first(step: Callable, variant: Variant, device: str) -> tuple[Any, int | None]:
    """The first result, and the bytes that torch held beyond arguments and results."""
    if variant.framework == "jax" or device == "cpu":
        result = step(*variant.inputs[0])
        clock.synchronise(result)
        return result, None
    # Once unobserved: autotuning, workspaces and compilation allocate.
    clock.synchronise(step(*variant.inputs[0]))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step(*variant.inputs[0])
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    return result, torch.cuda.max_memory_allocated() - before - kept


def _line(m: Measurement, ceilings: Ceilings | None) -> str:
    head = f"{m.name:<42} {m.label:<26}"
    if m.refused:
        return f"{head} [dim]{m.refused[:60]}[/dim]"
    if m.failed:
        return f"{head} [bold red]{m.failed[:160]}[/bold red]"
    words = [head]
    if m.device:
        words.append(f"{m.device.median:9.1f} µs {m.bytes / m.device.median * 1e-6:6.3f} TB/s")
        if ceilings:
            words.append(f"{m.floor_us(ceilings) / m.device.median:6.1%} of floor")
    if m.wall:
        words.append(f"wall {m.wall.median:9.1f} µs")
    if not m.correct:
        words.append(f"[bold red]WRONG: {m.check}[/bold red]")
    return " ".join(words)
