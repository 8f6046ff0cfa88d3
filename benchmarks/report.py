"""Measurements, what follows from them, and the file they are kept in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    cached: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    device: Spread | None = None
    wall: Spread | None = None
    kernels: list[tuple[str, float]] = field(default_factory=list)
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    check: Check | None = None
    refused: str = ""
    failed: str = ""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Measurement:
        """Of what `dataclasses.asdict` made of one, perhaps by way of JSON."""
        nested = {"device": Spread, "wall": Spread, "check": Check}
        made = {name: kind(**fields[name]) for name, kind in nested.items() if fields.get(name)}
        return cls(**(dict(fields) | made))

    @property
    def label(self) -> str:
        return f"{self.framework} {self.variant}"

    @property
    def name(self) -> str:
        return f"{self.group} {shape_name(self.shape)}"

    @property
    def correct(self) -> bool:
        return self.check is not None and self.check.passed and not self.failed

    def floor_us(self, ceilings: Ceilings) -> float:
        """The time that no version runs much below: that of the bytes, or of the products."""
        return 1e6 * max(self.bytes / ceilings.copy, self.flops / ceilings.matmul)


@dataclass
class Report:
    """A level's result. `wall_only` marks a run without a GPU, fit for testing this code alone."""

    level: str
    environment: dict[str, str]
    wall_only: bool
    quick: bool
    ceilings: Ceilings | None = None
    measurements: list[Measurement] = field(default_factory=list)
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and all(m.correct for m in self.measurements if not m.refused)

    def works(self) -> dict[str, list[Measurement]]:
        """The measurements of every piece of work, by its name."""
        found: dict[str, list[Measurement]] = {}
        for measurement in self.measurements:
            found.setdefault(measurement.name, []).append(measurement)
        return found

    def speedups(self) -> list[dict[str, Any]]:
        """Baseline's time over variant's, by each clock: none where either's check is red."""
        found = []
        for name, measurements in self.works().items():
            ran = [m for m in measurements if not m.refused]
            for baseline in dict.fromkeys(m.baseline for m in ran if m.baseline):
                candidates = [m for m in ran if m.baseline == baseline]
                for m in ran:
                    if m in candidates:
                        continue
                    withheld = not all(one.correct for one in (m, *candidates))
                    entry = {
                        "work": name,
                        "framework": m.framework,
                        "variant": m.variant,
                        "over": baseline,
                        "withheld": withheld,
                    }
                    for clock in () if withheld else ("device", "wall"):
                        theirs = [t.median for c in candidates if (t := getattr(c, clock))]
                        if (ours := getattr(m, clock)) and theirs:
                            entry[clock] = min(theirs) / ours.median
                    found.append(entry)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "passed": self.passed,
            "complete": self.complete,
            "quick": self.quick,
            "wall_only": self.wall_only,
            "environment": self.environment,
            "ceilings": dataclasses.asdict(self.ceilings) if self.ceilings else None,
            "speedups": self.speedups(),
            "measurements": [self._measurement(m) for m in self.measurements],
        }

    def write(self, folder: Path) -> Path:
        """`<level>.json` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.level}.json"
        path.write_text(json.dumps(_finite(self.as_dict()), indent=1, allow_nan=False) + "\n")
        return path

    def _measurement(self, m: Measurement) -> dict[str, Any]:
        entry = dataclasses.asdict(m)
        if m.device:
            entry["bytes_per_second"] = m.bytes / m.device.median * 1e6
            entry["flops_per_second"] = m.flops / m.device.median * 1e6
        if self.ceilings:
            entry["floor_us"] = m.floor_us(self.ceilings)
            if m.device:
                entry["share_of_floor"] = entry["floor_us"] / m.device.median
        return entry


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is infinitely wrong is null."""
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
