"""The tables of `jax_dora.ops.tuning`, from reports of the levels `ops` and `tune`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.boxes import Point, best
from benchmarks.report import Measurement
from jax_dora.ops import tuning
from jax_dora.ops.mosaic import rowwise

# By how much a kernel may be the slower one and count as no slower: medians of repeated runs differ
# by so much.
SLACK = 0.02
VERSIONS = ("jax", "jaxlib", "driver_version")


@dataclass(frozen=True)
class Contest:
    """Where a report has a kernel, and what dispatch would run in its stead.

    Attributes:
      groups: from pieces of work that the kernel does to the [rows, out] tensors that it reads and
        writes, or None where its sizes do not include their dtype.
      others: the variants; the fastest counts.
    """

    groups: Mapping[str, int | None]
    others: tuple[str, ...]


CONTESTS = {
    "compose": Contest({"compose": 3, "compose+inner": 4}, ("xla",)),
    "compose_backward": Contest({"backward": 4, "backward, d_base": 3}, ("xla",)),
    "expand_compose": Contest(
        {"expand+compose": None, "expand+compose+inner": None}, ("xla", "xla, mosaic compose")
    ),
    "norm": Contest(
        {"norm": None, "norm, fp32 adapters": None}, ("factored", "factored, ‖W‖² kept")
    ),
    "project": Contest({"projection": None}, ("xla", "xla, mosaic expand")),
    "project_back": Contest({"projection's dx": None}, ("xla",)),
    "dropped_product": Contest({"dropout, z": None}, ("xla", "xla, Triton allowed")),
    "dropped_product_back": Contest({"dropout, dA": None}, ("xla", "xla, Triton allowed")),
    "swiglu_backward": Contest({"SwiGLU's gradient": 5}, ("xla",)),
}


def table(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The tuning table that reports, by the names of their files, speak for."""
    return {
        "source": [_source(name, report) for name, report in reports.items()],
        "crossovers": crossovers(*reports.values()),
        "configs": configs(*reports.values()),
    }


def crossovers(*reports: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]] | None]:
    """For each kernel the bounds within which it was never the slower one; None: it never won.

    At every measured shape inside them the kernel's result is correct and its time at most
    1 + `SLACK` times the other's; of such boxes it is the one that saves most time in all, and of
    equal ones the one with most of the shapes: a kernel that draws spares XLA its choice. See
    `benchmarks.boxes` for what lies between and beyond the measured shapes.
    """
    found = {}
    for kernel, contest in CONTESTS.items():
        points = []
        for mosaic, others, clock in _rivals(contest, reports):
            rival = min((_time(m, clock) for m in others), default=math.inf)
            if rival < math.inf:
                points.append(_point(kernel, contest, mosaic, _time(mosaic, clock), rival))
        bounds = best(points)
        found[kernel] = None if bounds is None else dataclasses.asdict(bounds)
    return found


def configs(*reports: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each kernel the configs that beat its own choice, and the bounds within which.

    Entries are found one after the other, the one that saves most first; a shape that an entry is
    for has no part in those after it. Kernels without an entry are left out.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, contest in CONTESTS.items():
        left: dict[str, list[Point]] = {}
        for own, clock, candidates in _candidates(contest, reports):
            for m in candidates:
                key = json.dumps(m.config, sort_keys=True)
                point = _point(kernel, contest, m, _time(m, clock), _time(own, clock))
                left.setdefault(key, []).append(point)
        entries = []
        while winners := {key: box for key, points in left.items() if (box := best(points))}:
            key, box = max(
                winners.items(),
                key=lambda item: sum(p.saved for p in left[item[0]] if item[1].hold(p.sizes)),
            )
            entries.append({**dataclasses.asdict(box), "config": json.loads(key)})
            left = {
                other: [p for p in points if not box.hold(p.sizes)]
                for other, points in left.items()
            }
        if entries:
            found[kernel] = entries
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two tables, a line a kernel and section."""
    lines = []
    for section in ("crossovers", "configs"):
        old, new = before.get(section, {}), after[section]
        for kernel in CONTESTS:
            was, now = (json.dumps(table.get(kernel)) for table in (old, new))
            if was != now:
                lines.append(f"{section}: {kernel}: {was} → {now}")
    return lines or ["nothing changes"]


def device_kind(report: Mapping[str, Any]) -> str:
    """Of the card that a report was made on, as JAX names it."""
    environment = report["environment"]
    return environment["card"] if environment["device"] == "cuda" else environment["device"]


def write(table: Mapping[str, Any], kind: str, folder: Path) -> Path:
    """`<device kind>.json` in `folder`, as `jax_dora.ops.tuning` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / tuning.file_name(kind)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    tuning.read(path)
    return path


def _source(name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    environment = report["environment"]
    return {
        "file": name,
        "commit": environment["commit"],
        "card": environment["card"],
        "versions": {key: environment[key] for key in VERSIONS if key in environment},
    }


def _works(
    contest: Contest, reports: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[Measurement], str]]:
    """JAX's measurements of every piece of work that did not refuse, and the clock to read."""
    names = {field.name for field in dataclasses.fields(Measurement)}
    for report in reports:
        works: dict[str, list[Measurement]] = {}
        for entry in report["measurements"]:
            m = Measurement.from_dict({k: v for k, v in entry.items() if k in names})
            if m.group in contest.groups and m.framework == "jax" and not m.refused:
                works.setdefault(m.name, []).append(m)
        for measurements in works.values():
            yield measurements, "wall" if report["wall_only"] else "device"


def _rivals(contest: Contest, reports: Sequence[Mapping[str, Any]]):
    """(the kernel as it chooses itself, what would run instead, clock) of every piece of work."""
    for measurements, clock in _works(contest, reports):
        others = [m for m in measurements if m.variant in contest.others]
        for mosaic in (m for m in measurements if m.variant == "mosaic"):
            yield mosaic, others, clock


def _candidates(contest: Contest, reports: Sequence[Mapping[str, Any]]):
    """(the kernel as it chooses itself, clock, the kernel with other configs)."""
    for measurements, clock in _works(contest, reports):
        tried = [m for m in measurements if m.config]
        for own in (m for m in measurements if m.variant == "mosaic" and m.correct):
            yield own, clock, tried


def _time(m: Measurement, clock: str) -> float:
    """Median in microseconds; infinite if there is none, or the result is wrong."""
    spread = getattr(m, clock)
    return spread.median if m.correct and spread else math.inf


def _point(kernel: str, contest: Contest, m: Measurement, time: float, rival: float) -> Point:
    # What is told apart by no more than the slack is a draw.
    saved = rival - time if abs(rival - time) > SLACK * rival else 0.0
    return Point(_sizes(kernel, contest, m), saved, saved < 0)


def _sizes(kernel: str, contest: Contest, m: Measurement) -> dict[str, int]:
    """What dispatch would judge this call by, as far as the report tells."""
    sizes = dict(m.shape)
    if {"rows", "out"} <= sizes.keys():
        sizes["elements"] = sizes["rows"] * sizes["out"]
    if "out" in sizes:
        sizes["lane"] = math.gcd(sizes["out"], rowwise.MAX_LANE)
    if tensors := contest.groups[m.group]:
        sizes["itemsize"] = m.bytes // (tensors * sizes["elements"])
    return {name: sizes[name] for name in tuning.KERNELS[kernel].sizes if name in sizes}
