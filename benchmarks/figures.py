"""Pictures of a report: speed-ups, bandwidth over size, memory over rank."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt

from benchmarks.report import Measurement, Report


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws what the report has measurements for; nothing is drawn of what is not correct."""
    correct = [m for m in report.measurements if m.correct]
    drawn = []
    for group in dict.fromkeys(m.group for m in correct):
        of_group = [m for m in correct if m.group == group]
        drawn.append(_speedups(report, group, folder))
        if all({"rows", "out"} == set(m.shape) for m in of_group):
            drawn.append(_bandwidth(report, group, of_group, folder))
        ranks = {m.shape.get("rank") for m in of_group}
        if len(ranks) > 2:
            drawn.append(_memory(report, group, of_group, folder))
    return [path for path in drawn if path]


def _speedups(report: Report, group: str, folder: Path) -> Path | None:
    clock = "wall" if report.wall_only else "device"
    works = {name for name, ms in report.works().items() if ms[0].group == group}
    entries = [e for e in report.speedups() if e["work"] in works and clock in e]
    # Within one framework: what changes is then the computation, not the framework.
    entries = [e for e in entries if f"{e['framework']} " in f"{e['over']} "]
    if not entries:
        return None
    names = list(dict.fromkeys(e["work"].removeprefix(group).strip() for e in entries))
    series = list(dict.fromkeys((e["variant"], e["over"]) for e in entries))
    figure, axes = plt.subplots(figsize=(max(6, 0.25 * len(names) * len(series)), 4))
    width = 0.8 / len(series)
    for i, (variant, over) in enumerate(series):
        found = {
            e["work"].removeprefix(group).strip(): e[clock]
            for e in entries
            if (e["variant"], e["over"]) == (variant, over)
        }
        at = [names.index(name) + (i - (len(series) - 1) / 2) * width for name in found]
        axes.bar(at, list(found.values()), width, label=f"{variant} over {over}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel(f"speed-up, {clock} time")
    axes.set_title(group)
    axes.legend(fontsize=7)
    return _save(figure, report, group, "speedup", folder)


def _bandwidth(report: Report, group: str, measurements: list[Measurement], folder: Path) -> Path:
    clock = "wall" if report.wall_only else "device"
    figure, axes = plt.subplots(figsize=(6, 4))
    for label in dict.fromkeys(m.label for m in measurements):
        points = sorted(
            (m.bytes, m.bytes / getattr(m, clock).median * 1e-6)
            for m in measurements
            if m.label == label and getattr(m, clock)
        )
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    if report.ceilings:
        axes.axhline(report.ceilings.copy * 1e-12, color="black", linewidth=0.8, label="copy")
    axes.set_xscale("log")
    axes.set_xlabel("bytes moved")
    axes.set_ylabel(f"TB/s, {clock} time")
    axes.set_title(group)
    axes.legend(fontsize=7)
    return _save(figure, report, group, "bandwidth", folder)


def _memory(
    report: Report, group: str, measurements: list[Measurement], folder: Path
) -> Path | None:
    by_size: dict[tuple, list[Measurement]] = {}
    for m in measurements:
        size = tuple((name, value) for name, value in m.shape.items() if name != "rank")
        by_size.setdefault(size, []).append(m)
    most = max(by_size.values(), key=lambda ms: len({m.shape["rank"] for m in ms}))
    figure, (memory, times) = plt.subplots(1, 2, figsize=(11, 4))
    clock = "wall" if report.wall_only else "device"
    for label in dict.fromkeys(m.label for m in most):
        mine = sorted((m for m in most if m.label == label), key=lambda m: m.shape["rank"])
        ranks = [m.shape["rank"] for m in mine]
        held = [m.temp_bytes if m.peak_bytes is None else m.peak_bytes for m in mine]
        if None not in held:
            memory.plot(ranks, [b / 2**20 for b in held if b is not None], "o-", label=label)
        spent = [getattr(m, clock) for m in mine]
        if None not in spent:
            times.plot(ranks, [s.median for s in spent], "o-", label=label)
    memory.set_ylabel("temporary memory, MiB")
    times.set_ylabel(f"{clock} time, µs")
    for axes in (memory, times):
        axes.set_xlabel("rank")
        axes.set_yscale("symlog" if axes is memory else "log")
    memory.legend(fontsize=7)
    figure.suptitle(group)
    return _save(figure, report, group, "rank", folder)


def _save(figure, report: Report, group: str, what: str, folder: Path) -> Path:
    slug = "".join(c if c.isalnum() else "-" for c in group)
    path = folder / f"{report.level}-{slug}-{what}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
