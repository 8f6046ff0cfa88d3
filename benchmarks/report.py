"""Measurements, what follows from them, and the table shown of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks import results
from benchmarks.check import Check
from benchmarks.clock import Spread
from benchmarks.work import shape_name
from parity.report import table


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
    """What a level has measured."""

    environment: Mapping[str, str]
    ceilings: Ceilings | None = None
    measurements: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, header: results.Row, rows: Iterable[results.Row]) -> Self:
        """Returns what the header and the rows of a file of results say."""
        ceilings = Ceilings(**header["ceilings"]) if header.get("ceilings") else None
        return cls(header["environment"], ceilings, [Measurement.from_row(row) for row in rows])

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.of(*results.read(path))

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

    def text(self) -> str:
        """Returns a table of all that ran, and the ceilings; no time of what is not correct."""
        clock = "device" if self.environment["device"] == "cuda" else "wall"
        header = ("work", "implementation", f"{clock} µs", "of baseline", "of the floor", "GiB")
        shown = table(
            header, ([*self._cells(m, clock)] for m in self.measurements if not m.refused)
        )
        if self.ceilings:
            shown += (
                f"\nceilings of this run: copy {self.ceilings.copy * 1e-12:.3f} TB/s, bf16 product "
                f"{self.ceilings.matmul * 1e-12:.0f} TFLOP/s"
            )
        return shown

    def _cells(self, m: Measurement, clock: str) -> Iterator[str]:
        time, ratio = m.time(clock), self.ratio(m, clock)
        yield from (m.name, m.label, f"{time:.1f}" if time else "RED")
        yield f"{ratio:.2f}" if ratio else ""
        floor = time and self.ceilings and m.bytes and m.floor_us(self.ceilings) / time
        yield f"{floor:.0%}" if floor else ""
        yield f"{m.peak_bytes / 2**30:.1f}" if m.peak_bytes else ""
