"""`python -m parity controls`: which level of parity catches which error.

Every fault of `parity.faults` is planted in each package in turn, and a small case set of every
level run on it. A level that passes with sound packages, and fails with the fault, has caught it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from parity.faults import Backend, Fault, Level
    from parity.levels import Failure, Failures

LEVELS = ("operator", "layer", "encoder", "model", "training")
COLUMNS = ("fault", "planted in", *LEVELS)


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

    def as_dict(self) -> dict:
        return vars(self) | {"caught": self.caught, "passed": self.passed}


@dataclass
class Report:
    commit: str | None
    outcomes: list[Outcome] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # levels that do not exist, and why

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    def write(self, folder: Path) -> None:
        """`controls.json` and `controls.md` in `folder`."""
        from parity.report import environment

        found = {
            "passed": self.passed,
            "environment": environment("cpu", self.commit),
            "absent": self.absent,
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "controls.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "controls.md").write_text(self.markdown())

    def markdown(self) -> str:
        from parity.report import environment, markdown_table

        facts = environment("cpu", self.commit)
        return "\n".join(
            [
                "# Which level of parity catches which error",
                "",
                "Every fault is caught where it must be."
                if self.passed
                else "SOME FAULTS ARE NOT CAUGHT, OR SOUND PACKAGES FAIL.",
                "",
                *(f"- {name}: {value}" for name, value in facts.items()),
                *(f"- level {name} is absent: {reason}" for name, reason in self.absent.items()),
                "",
                "Each fault of `parity/faults.py` is planted in one package at a time, and a small "
                "case set of each level is run on the CPU. **caught**: the level fails, as it "
                "must. caught: it fails, though it need not. –: it passes, and need not fail. "
                "**MISSED**: it passes, and must not. Under it stands what failed.",
                "",
                *markdown_table(COLUMNS, self.rows()),
                "",
                "| fault | what is computed instead |",
                "| --- | --- |",
                *(f"| {name} | {text} |" for name, text in self._descriptions().items()),
                "",
            ]
        )

    def rows(self) -> Iterator[list[str]]:
        """The table's: a fault in a package each, and first of all no fault."""
        keys = dict.fromkeys((outcome.fault, outcome.backend) for outcome in self.outcomes)
        for fault, backend in keys:
            cells = {
                outcome.level: _cell(outcome)
                for outcome in self.outcomes
                if (outcome.fault, outcome.backend) == (fault, backend)
            }
            yield [fault, backend or "", *(cells.get(level, "not run") for level in LEVELS)]

    def _descriptions(self) -> dict[str, str]:
        planted = {outcome.fault for outcome in self.outcomes}
        return {name: f.description for name, f in _all_faults().items() if name in planted}


def _cell(outcome: Outcome) -> str:
    if outcome.error:
        return f"ERROR {outcome.error}"
    if outcome.backend is None:
        return "passes" if outcome.passed else f"FAILS {_some(outcome.failed)}"
    if not outcome.caught:
        return "MISSED" if outcome.expected else "–"
    word = "**caught**" if outcome.expected else "caught"
    blame = "" if outcome.blamed else ", WRONG SIDE"
    return f"{word}{blame}: {_some(outcome.failed)}"


def _some(quantities: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(quantities))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more


def _all_faults() -> Mapping[str, Fault]:
    from parity.faults import FAULTS, KERNEL_FAULTS

    return FAULTS | KERNEL_FAULTS


def run_controls(
    chosen: Mapping[Level, Failures],
    faults: Mapping[str, Fault],
    say: Callable[[str], None],
    commit: str | None = None,
) -> Report:
    """The whole matrix, level by level; a level without its module is noted as absent."""
    from parity.faults import BACKENDS, KERNEL_FAULTS

    report = Report(commit)
    for level, failures in chosen.items():
        try:
            sound = _outcome(level, failures, None, None)
        except ModuleNotFoundError as error:
            report.absent[level] = str(error)
            say(f"{level}: absent, {error}")
            continue
        report.outcomes.append(sound)
        say(f"{level}, no fault: {_cell(sound)} ({sound.seconds:.1f} s)")
        for name, fault in faults.items():
            # Levels above those of the kernels run without them.
            if name in KERNEL_FAULTS and level not in fault.caught_by:
                continue
            for backend in BACKENDS:
                outcome = _outcome(level, failures, fault, backend)
                report.outcomes.append(outcome)
                say(f"{level}, {name} in {backend}: {_cell(outcome)} ({outcome.seconds:.1f} s)")
    return report


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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity controls",
        description="Plants known errors in each package and shows which level of parity catches "
        "which; on the CPU. Run it from the repository's root: the model's level needs "
        "jax_dora.models.",
    )
    parser.add_argument("--out", type=Path, help="report folder; default parity/reports/cpu")
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    parser.add_argument("--fault", action="append", help="only this; repeatable")
    parser.add_argument("--commit", help="to record in the report, where there is no git checkout")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0 if every fault was caught at every level that must catch it, and nothing else failed."""
    from parity.__main__ import set_up

    options = parse(arguments)
    device: Literal["cpu"] = "cpu"
    set_up(device)

    from parity.levels import levels

    faults = _all_faults()
    unknown = sorted(set(options.fault or ()) - set(faults))
    if unknown:
        sys.exit(f"--fault {', '.join(unknown)}: there are {', '.join(faults)}")
    report = run_controls(
        {name: run for name, run in levels().items() if name in (options.level or LEVELS)},
        {name: fault for name, fault in faults.items() if name in (options.fault or faults)},
        lambda line: print(line, file=sys.stderr, flush=True),
        options.commit,
    )
    folder = options.out or Path(__file__).parent / "reports" / device
    report.write(folder)
    _print(report)
    print(f"written: {folder / 'controls.md'}, {folder / 'controls.json'}")
    return 0 if report.passed else 1


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Which level catches which fault")
    for column in COLUMNS:
        table.add_column(column)
    for cells in report.rows():
        table.add_row(*(cell.replace("**", "") for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    style = "bold green" if report.passed else "bold red"
    console.print("every check passed" if report.passed else "SOME CHECKS FAILED", style=style)
