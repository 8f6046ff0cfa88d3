"""Measurements, what follows from them, the file they are kept in, and the tables shown of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.check import Check
from benchmarks.clock import Spread
from benchmarks.work import shape_name


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches at best, measured in the same run.

    Attributes:
      copy: bytes per second, read plus written, of an elementwise kernel over gigabytes.
      matmul: bf16 operations per second of a large matrix product.
    """

    copy: float
    matmul: float


@dataclass(frozen=True)
class Measurement:
    """One variant of one piece of work. Times in microseconds, memory in bytes.

    `baseline` names the baseline that this is, or is one candidate for. `refused` says why it could
    not run here, `failed` what went wrong. `temp_bytes` is memory beyond arguments and results,
    `peak_bytes` everything: XLA's own account in JAX, the allocator's peak in torch.
    """

    group: str
    shape: dict[str, int]
    framework: str
    variant: str
    bytes: int
    flops: int
    baseline: str = ""
    device: Spread | None = None
    wall: Spread | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    check: Check | None = None
    refused: str = ""
    failed: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Measurement:
        """Returns the measurement of a line of results, which may hold more."""
        nested = {"device": Spread, "wall": Spread, "check": Check}
        made = {name: kind(**row[name]) for name, kind in nested.items() if row.get(name)}
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**({k: v for k, v in row.items() if k in known} | made))

    def row(self) -> results.Row:
        """Returns a line of results: whatever is not as by default."""
        fields = dataclasses.fields(self)
        plain = dataclasses.asdict(self)
        kept = ("bytes", "flops")
        return {f.name: plain[f.name] for f in fields if plain[f.name] or f.name in kept}

    @property
    def label(self) -> str:
        return f"{self.framework} {self.variant}"

    @property
    def name(self) -> str:
        return f"{self.group} {shape_name(self.shape)}"

    @property
    def correct(self) -> bool:
        return self.check is not None and self.check.passed and not self.failed

    def time(self, clock: str) -> float | None:
        """Returns the median by "device" or "wall", or None where there is none to be trusted."""
        spread: Spread | None = getattr(self, clock)
        return spread.median if spread and self.correct else None

    def floor_us(self, ceilings: Ceilings) -> float:
        """Returns the time that no version runs much below: of the bytes, or of the products."""
        return 1e6 * max(self.bytes / ceilings.copy, self.flops / ceilings.matmul)


@dataclass
class Report:
    """A level's result; `add` writes to the file of results and to the console, where given."""

    level: str
    environment: dict[str, str]
    ceilings: Ceilings | None = None
    measurements: list[Measurement] = field(default_factory=list)
    writer: results.Writer | None = None
    console: Console = field(default_factory=lambda: Console(quiet=True))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Returns what a file of results holds."""
        header, rows = results.read(path)
        ceilings = Ceilings(**header["ceilings"]) if header.get("ceilings") else None
        found = [Measurement.from_row(row) for row in rows]
        return cls(header["level"], header["environment"], ceilings, found)

    def begin(self, path: Path, **header: Any) -> None:
        """Begins the file of results."""
        known: results.Row = {"kind": "benchmark", "level": self.level} | header
        known |= {"environment": self.environment}
        if self.ceilings:
            known["ceilings"] = dataclasses.asdict(self.ceilings)
        self.writer = results.Writer(path, known)

    def add(self, m: Measurement) -> None:
        self.measurements.append(m)
        if self.writer:
            self.writer.add(m.row())
        self.console.print(self._line(m), highlight=False, soft_wrap=True)

    @property
    def passed(self) -> bool:
        return all(m.correct for m in self.measurements if not m.refused)

    @property
    def clock(self) -> str:
        return "device" if self.environment["device"] == "cuda" else "wall"

    def ratio(self, m: Measurement, clock: str, baseline: str = "") -> float | None:
        """Returns m's time over that of its work's baseline, the fastest where several bear the
        name; None where either's check is red, or nothing is named `baseline`."""
        group = [one for one in self.measurements if one.name == m.name and not one.refused]
        baseline = baseline or next((one.baseline for one in group if one.baseline), "")
        others = [one for one in group if baseline and one.baseline == baseline]
        times = [one.time(clock) for one in others]
        mine = m.time(clock)
        if mine is None or not times or any(not one.correct for one in others):
            return None
        theirs = [time for time in times if time]
        return mine / min(theirs) if theirs and m not in others else None

    def show(self) -> None:
        """Prints a table for each group of work, and the verdict."""
        for group in dict.fromkeys(m.group for m in self.measurements):
            self.console.print(self._table(group))
        for m in self.measurements:
            if not m.refused and not m.correct:
                self.console.print(f"[bold red]RED[/bold red] {m.name} {m.label}: {_reason(m)}")
        if self.ceilings:
            self.console.print(
                f"ceilings of this run: copy {self.ceilings.copy * 1e-12:.3f} TB/s, bf16 product "
                f"{self.ceilings.matmul * 1e-12:.0f} TFLOP/s"
            )
        if self.clock == "wall":
            self.console.print("no GPU: wall time only, to try the code, not to be quoted")
        correct = sum(m.correct for m in self.measurements)
        refused = sum(bool(m.refused) for m in self.measurements)
        self.console.print(
            f"{correct} of {len(self.measurements)} measured and correct, {refused} refused"
        )

    def _table(self, group: str) -> Table:
        table = Table(title=group, title_justify="left", box=SIMPLE_HEAD)
        for name in ("", "implementation", f"{self.clock} µs", "of baseline", "floor", "peak GiB"):
            table.add_column(name, justify="left" if name in ("", "implementation") else "right")
        for m in self.measurements:
            if m.group == group and not m.refused:
                table.add_row(shape_name(m.shape), m.label, *self._cells(m))
        return table

    def _cells(self, m: Measurement) -> list[str]:
        time, ratio = m.time(self.clock), self.ratio(m, self.clock)
        if time is None:
            return ["[bold red]red[/bold red]", "", "", ""]
        floor = self.ceilings and m.bytes and f"{m.floor_us(self.ceilings) / time:.0%}"
        peak = m.peak_bytes and f"{m.peak_bytes / 2**30:.1f}"
        return [f"{time:.1f}", f"{ratio:.2f}×" if ratio else "", floor or "", peak or ""]

    def _line(self, m: Measurement) -> str:
        head = f"{m.name:<42} {m.label:<34}"
        if m.refused:
            return f"{head} [dim]refused: {m.refused[:80]}[/dim]"
        if not m.correct:
            return f"{head} [bold red]{_reason(m)}[/bold red]"
        times = [f"{c} {t:11.1f} µs" for c in ("device", "wall") if (t := m.time(c))]
        return " ".join([head, *times])


def _reason(m: Measurement) -> str:
    return m.failed or f"WRONG: {m.check}"
