"""`python -m parity controls`: which level of parity catches which error.

Every fault of `parity.faults` is planted in each package in turn, and a small case set of every
level run on it. A level that passes with sound packages, and fails with the fault, has caught it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parity import command
from parity.environment import choose_device, environment
from parity.report import Report, Row, table

if TYPE_CHECKING:
    from parity.faults import Fault, Level
    from parity.levels import Failure, Failures
    from parity.sides import Backend

LEVELS = ("operator", "layer", "encoder", "model", "training")


@dataclass(frozen=True)
class Outcome:
    """One level, with one fault in one package; with neither, the sound packages.

    Attributes:
      failed: quantities that did not pass.
      blamed: whether no failure is of the other package alone.
      error: why the level could not run, if it could not.
    """

    level: Level
    fault: str
    backend: Backend | None
    expected: bool
    failed: tuple[str, ...]
    blamed: bool
    seconds: float
    error: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.failed)

    @property
    def passed(self) -> bool:
        if self.error:
            return False
        if self.backend is None:
            return not self.caught
        return self.blamed and (self.caught or not self.expected)

    def write(self, report: Report) -> None:
        """Adds a line whose case is the fault, whose quantity the level, and whose side the package
        at fault."""
        report.add(
            self.fault,
            self.level,
            side=self.backend,
            ok=self.passed,
            expected=self.expected,
            failed="; ".join(dict.fromkeys(self.failed)),
            blamed=self.blamed,
            seconds=self.seconds,
            **({"note": self.error} if self.error else {}),
        )


def matrix(rows: Sequence[Row]) -> str:
    """Returns the table of which level caught which fault in which package; first of all stands no
    fault."""
    lines = []
    rows = [row for row in rows if row["ok"] is not None]
    for fault, backend in dict.fromkeys((row["case"], row["side"]) for row in rows):
        cells = {
            row["quantity"]: _cell(row)
            for row in rows
            if (row["case"], row["side"]) == (fault, backend)
        }
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


def _all_faults() -> Mapping[str, Fault]:
    from parity.faults import FAULTS, KERNEL_FAULTS

    return FAULTS | KERNEL_FAULTS


def run_controls(
    report: Report,
    chosen: Mapping[Level, Failures],
    faults: Mapping[str, Fault],
    say: Callable[[str], None],
) -> None:
    """Adds the whole matrix to the report, level by level; a level that lacks a module is noted."""
    from parity.faults import KERNEL_FAULTS
    from parity.sides import SIDES

    for level, failures in chosen.items():
        plantable: list[tuple] = [(None, None)]
        for name, fault in faults.items():
            # Levels above those of the kernels run without their faults.
            if name not in KERNEL_FAULTS or level in fault.caught_by:
                plantable += [(fault, backend) for backend in SIDES]
        for fault, backend in plantable:
            try:
                outcome = _outcome(level, failures, fault, backend)
            except ModuleNotFoundError as error:
                report.add("none", f"{level} is absent", note=str(error))
                say(f"{level}: absent, {error}")
                break
            outcome.write(report)
            cell = _cell(report.rows[-1])
            where = "no fault" if fault is None else f"{outcome.fault} in {backend}"
            say(f"{level}, {where}: {cell} ({outcome.seconds:.1f} s)")


def _outcome(
    level: Level, failures: Failures, fault: Fault | None, backend: Backend | None
) -> Outcome:
    start = time.perf_counter()
    found: list[Failure] = []
    error = ""
    try:
        if fault is None or backend is None:
            found = failures(None)
        else:
            with fault.plant(backend):
                found = failures(backend)
    except ModuleNotFoundError:
        raise
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"[:500]
    return Outcome(
        level=level,
        fault="none" if fault is None else fault.name,
        backend=backend,
        expected=fault is not None and level in fault.caught_by,
        failed=tuple(failure.quantity for failure in found),
        blamed=all(failure.backend in (None, backend) for failure in found),
        seconds=time.perf_counter() - start,
        error=error,
    )


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

    from parity.levels import levels

    faults = _all_faults()
    unknown = sorted(set(options.fault or ()) - set(faults))
    if unknown:
        sys.exit(f"--fault {', '.join(unknown)}: there are {', '.join(faults)}")
    file = command.report_file(options, device, "controls")
    report = Report(file, "controls", environment(device, options.commit))
    run_controls(
        report,
        {name: run for name, run in levels().items() if name in (options.level or LEVELS)},
        {name: fault for name, fault in faults.items() if name in (options.fault or faults)},
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(matrix(report.rows))
    print("every check passed" if report.passed else "SOME CHECKS FAILED")
    print(f"written: {file}")
    return 0 if report.passed else 1
