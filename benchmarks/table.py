"""A report as tables: one row a piece of work, one column a variant."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import Measurement, Report


def show(report: Report, folder: Path, console: Console) -> None:
    """Prints the tables, and writes them to `<level>.txt` in `folder`."""
    tables = [_table(report, group) for group in _groups(report)]
    verdict = _verdict(report)
    with (folder / f"{report.level}.txt").open("w") as file:
        plain = Console(file=file, width=200)
        for one in tables:
            plain.print(one)
        plain.print(verdict)
    for one in tables:
        console.print(one)
    console.print(verdict)


def _groups(report: Report) -> list[str]:
    return list(dict.fromkeys(m.group for m in report.measurements))


def _table(report: Report, group: str) -> Table:
    works = {name: ms for name, ms in report.works().items() if ms[0].group == group}
    labels = list(dict.fromkeys(m.label for ms in works.values() for m in ms))
    clock = "wall" if report.wall_only else "device"
    over = next((m.baseline for ms in works.values() for m in ms if m.baseline), None)
    ratios = {
        (e["work"], e["framework"], e["variant"]): 1 / e[clock]
        for e in report.speedups()
        if e["over"] == over and clock in e
    }
    cells = {
        (name.removeprefix(group).strip(), m.label): _cell(
            report, m, ratios.get((name, m.framework, m.variant))
        )
        for name, ms in works.items()
        for m in ms
    }
    shapes = list(dict.fromkeys(shape for shape, _ in cells))
    # The longer side goes down the page.
    across = shapes if len(labels) > len(shapes) else labels
    title = f"{group}: {clock} time in µs"
    if over:
        title += f", times that of {over}"
    if report.ceilings:
        title += ", share of the floor"
    table = Table(title=title, title_justify="left", padding=(0, 1), box=SIMPLE_HEAD)
    table.add_column("")
    for name in across:
        table.add_column(name, justify="right")
    for name in labels if across is shapes else shapes:
        keys = [(other, name) if across is shapes else (name, other) for other in across]
        table.add_row(name, *(cells.get(key, "") for key in keys))
    return table


def _cell(report: Report, m: Measurement, ratio: float | None) -> str:
    """`time, times the baseline's time, share of the floor`, peak memory if known."""
    if m.refused:
        return "–"
    if not m.correct:
        return "[bold red]red[/bold red]"
    spread = m.wall if report.wall_only else m.device
    if spread is None:
        return "?"
    words = [f"{spread.median:.1f}"]
    if ratio is not None:
        words.append(f"{ratio:.2f}×")
    if report.ceilings and m.device:
        words.append(f"{m.floor_us(report.ceilings) / m.device.median:.0%}")
    if m.peak_bytes:
        words.append(f"{m.peak_bytes / 2**30:.1f}GiB")
    return " ".join(words)


def _verdict(report: Report) -> str:
    lines = []
    for m in report.measurements:
        if not m.refused and not m.correct:
            lines.append(f"[bold red]RED[/bold red] {m.name} {m.label}: {m.failed or m.check}")
    if report.ceilings:
        lines.append(
            f"ceilings of this run: copy {report.ceilings.copy * 1e-12:.3f} TB/s, bf16 product "
            f"{report.ceilings.matmul * 1e-12:.0f} TFLOP/s"
        )
    if report.wall_only:
        lines.append("no GPU: wall time only, to try the code, not to be quoted")
    lines.append(
        f"{sum(m.correct for m in report.measurements)} of {len(report.measurements)} measured and "
        f"correct, {sum(bool(m.refused) for m in report.measurements)} refused"
    )
    return "\n".join(lines)
