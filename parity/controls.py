"""`python -m parity controls`: which level of parity catches which error.

Every fault of `parity.faults` is planted in each package in turn, and a small set of cases of every
level is run. A level catches a fault if its cases pass without the fault and fail with it.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity import cases, command
from parity.compare import run_case
from parity.faults import FAULTS, Fault, Level
from parity.model.checks import judge
from parity.model.sizes import TINY, Run
from parity.model.systems import execute, systems
from parity.model.weights import draw
from parity.report import Report, Row, outcome
from parity.sides import SIDES, Backend
from parity.training import quick
from parity.training.difference import FULL_PRECISION

# Cases with some zero rows, and with g near 1: every fault shows in one of them.
OPERATOR_CASES = ("norm 192x128 r16 float32 zero rows", "compose 7x72 bfloat16 near unity")
LAYER_CASES = ("layer 33x96x64 r16 float32 zero rows",)
MODEL_RUN = Run(TINY, "float32", layers=2, tokens=24, last=16)

# Runs a level's cases and adds the verdicts to a report. The second argument is the package with
# the planted fault, or None; results of the other package may be cached.
CaseSet = Callable[[Report, Backend | None], None]


def run_controls(
    report: Report,
    chosen: Mapping[Level, CaseSet],
    faults: Iterable[Fault],
) -> None:
    """Adds the result of every level for every fault in every package to the report."""
    for level, run in chosen.items():
        plantable: list[tuple] = [(None, None)]
        for fault in faults:
            if not fault.in_kernel or level in fault.caught_by:
                plantable += [(fault, backend) for backend in SIDES]
        for fault, backend in plantable:
            _run_level(report, level, run, fault, backend)
            row = report.rows[-1]
            where = "no fault" if fault is None else f"{fault.name} in {backend}"
            message = f"{level}, {where}: {outcome(row)} ({row['seconds']:.1f} s)"
            print(message, file=sys.stderr, flush=True)


def _run_level(
    report: Report, level: Level, run: CaseSet, fault: Fault | None, backend: Backend | None
) -> None:
    """Adds a line to the report for one level and one fault.

    Its case is the fault, its quantity the level, and its side the package with the fault. `failed`
    lists the quantities that failed; `blamed` is False if one of them involves only the other
    package; `note` is the error if the level could not run.
    """
    start, case_set, note = time.perf_counter(), Report(None, level, {}), {}
    try:
        with fault.plant(backend) if fault and backend else contextlib.nullcontext():
            run(case_set, backend)
    except Exception as error:
        note = {"note": f"{type(error).__name__}: {error}"[:500]}
    expected = fault is not None and level in fault.caught_by
    failed = [row for row in case_set.rows if row["ok"] is False]
    blamed = all(_blamed_package(row) in (None, backend) for row in failed)
    passed = blamed and (bool(failed) or not expected) if fault else not failed
    report.add(
        fault.name if fault else "none",
        level,
        side=backend,
        ok=passed and not note,
        expected=expected,
        failed="; ".join(dict.fromkeys(row["quantity"] for row in failed)),
        blamed=blamed,
        seconds=time.perf_counter() - start,
        **note,
    )


def _blamed_package(row: Row) -> Backend | None:
    """Returns the package whose results a comparison judges, or None if it judges both or
    neither."""
    systems = set(row["side"].split(", "))
    named: list[Backend] = [
        name
        for name, side in SIDES.items()
        if systems & {name, f"{name} {side.plain}", f"{name} {side.kernels}"}
    ]
    return named[0] if len(named) == 1 else None


def main(options: argparse.Namespace) -> int:
    """Returns 0 if every level caught every fault that it must catch, and nothing else failed."""
    if unknown := sorted(set(options.fault or ()) - set(FAULTS)):
        sys.exit(f"--fault {', '.join(unknown)}: unknown; there are {', '.join(FAULTS)}")
    report = command.report(options, "controls")
    run_controls(
        report,
        {name: CASE_SETS[name] for name in CASE_SETS if name in (options.level or CASE_SETS)},
        [FAULTS[name] for name in FAULTS if name in (options.fault or FAULTS)],
    )
    return report.finish()


def _cases(names: Iterable[str], report: Report, backend: Backend | None) -> None:
    known = {case.name: case for case in cases.cpu_cases()}
    for name in names:
        run_case(report, known[name], "cpu")


@functools.cache
def _without_fault(run: Callable[[Any], Any], side: Backend | None) -> Any:
    return run(side)


def _run_sides(run: Callable[[Backend], Any], backend: Backend | None) -> dict[Backend, Any]:
    """Returns the result of `run` for each side. Only the side with a planted fault is computed
    again."""
    return {side: run(side) if side == backend else _without_fault(run, side) for side in SIDES}


def _model(report: Report, backend: Backend | None) -> None:
    """Compares a tiny decoder in fp32 with transformers, with PEFT and with fp64."""
    found = {side: result[side] for side, result in _run_sides(_execute, backend).items()}
    judge(report, MODEL_RUN, _without_fault(_execute, None) | found)


def _execute(side: Backend | None) -> dict[str, Any]:
    """Returns the results of one side or, for None, of all systems that are not of either
    package."""
    known = systems(MODEL_RUN)
    names = [side] if side else [name for name in known if name not in SIDES]
    run = Report(None, "model", {})
    results = execute(run, MODEL_RUN, draw(MODEL_RUN, "cpu"), {name: known[name] for name in names})
    if crashed := [row["note"] for row in run.rows if row["ok"] is False]:
        raise RuntimeError(f"the model cannot run: {crashed}")
    return results


def _training(report: Report, backend: Backend | None) -> None:
    """Compares short training runs in fp32."""
    difference = quick.difference(_run_sides(quick.train, backend))
    ok = difference.within(FULL_PRECISION)
    report.add("training", "losses, adapters", side="jax, torch", ok=ok)


# The cheapest first.
CASE_SETS: dict[Level, CaseSet] = {
    "operator": functools.partial(_cases, OPERATOR_CASES),
    "layer": functools.partial(_cases, LAYER_CASES),
    "model": _model,
    "training": _training,
}
