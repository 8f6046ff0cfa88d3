"""`python -m parity controls`: which level of parity catches which error.

Every fault of `parity.faults` is planted in each package in turn, and a small case set of every
level run on it. A level that passes with sound packages, and fails with the fault, has caught it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from parity import command
from parity.environment import choose_device
from parity.report import Report, Row, table

if TYPE_CHECKING:
    from parity.faults import Fault, Level
    from parity.levels import CaseSet
    from parity.sides import Backend

LEVELS = ("operator", "layer", "encoder", "model", "training")


def matrix(rows: Sequence[Row]) -> str:
    """Returns the table of which level caught which fault in which package; first of all stands no
    fault."""
    lines = []
    rows = [row for row in rows if row["ok"] is not None]
    for fault, backend in dict.fromkeys((row["case"], row["side"]) for row in rows):
        planted = [row for row in rows if (row["case"], row["side"]) == (fault, backend)]
        cells = {row["quantity"]: _cell(row) for row in planted}
        lines.append([fault, backend or "", *(cells.get(level, "not run") for level in LEVELS)])
    return table(("fault", "planted in", *LEVELS), lines)


def _cell(row: Row) -> str:
    if row["note"]:
        return f"ERROR {row['note']}"
    if row["side"] is None:
        return "passes" if row["ok"] else f"FAILS: {row['failed']}"
    if not row["failed"]:
        return "MISSED" if row["expected"] else "–"
    word = "**caught**" if row["expected"] else "caught"
    return word if row["blamed"] else f"{word}, WRONG SIDE: {row['failed']}"


def run_controls(
    report: Report,
    chosen: Mapping[Level, CaseSet],
    faults: Mapping[str, Fault],
    say: Callable[[str], None],
) -> None:
    """Adds the whole matrix to the report, level by level."""
    from parity.sides import SIDES

    for level, run in chosen.items():
        plantable: list[tuple] = [(None, None)]
        for fault in faults.values():
            if not fault.in_kernel or level in fault.caught_by:
                plantable += [(fault, backend) for backend in SIDES]
        for fault, backend in plantable:
            _try(report, level, run, fault, backend)
            row = report.rows[-1]
            where = "no fault" if fault is None else f"{fault.name} in {backend}"
            say(f"{level}, {where}: {_cell(row)} ({row['seconds']:.1f} s)")


def _try(
    report: Report, level: Level, run: CaseSet, fault: Fault | None, backend: Backend | None
) -> None:
    """Adds a line whose case is the fault, whose quantity the level, and whose side the package at
    fault: the quantities that failed, whether none of them blames the other package alone, and in
    `note` why the level could not run, if it could not."""
    start, case_set, note = time.perf_counter(), Report(None, level, {}), {}
    try:
        with fault.plant(backend) if fault and backend else contextlib.nullcontext():
            run(case_set, backend)
    except Exception as error:
        note = {"note": f"{type(error).__name__}: {error}"[:500]}
    expected = fault is not None and level in fault.caught_by
    failed = [row for row in case_set.rows if row["ok"] is False]
    blamed = all(_blamed(row) in (None, backend) for row in failed)
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


def _blamed(row: Row) -> Backend | None:
    """Returns the package of which a comparison is, or None where it is of both, or of neither."""
    from parity.sides import SIDES

    systems = set(row["side"].split(", "))
    named: list[Backend] = [
        name
        for name, side in SIDES.items()
        if systems & {name, f"{name} {side.plain}", f"{name} {side.kernels}"}
    ]
    return named[0] if len(named) == 1 else None


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every fault was caught at every level that must catch it, and nothing else
    failed."""
    parser = command.parser(
        "controls",
        "Plants known errors in each package and shows which level of parity catches which; on "
        "the CPU.",
    )
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    parser.add_argument("--fault", action="append", help="only this; repeatable")
    options = parser.parse_args(arguments)
    device = choose_device("cpu")

    from parity.faults import FAULTS
    from parity.levels import levels

    if unknown := sorted(set(options.fault or ()) - set(FAULTS)):
        sys.exit(f"--fault {', '.join(unknown)}: there are {', '.join(FAULTS)}")
    report = command.report(options, device, "controls")
    run_controls(
        report,
        {name: run for name, run in levels().items() if name in (options.level or LEVELS)},
        {name: fault for name, fault in FAULTS.items() if name in (options.fault or FAULTS)},
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(matrix(report.rows))
    print("every check passed" if report.passed else "SOME CHECKS FAILED")
    print(f"written: {report.path}")
    return 0 if report.passed else 1
