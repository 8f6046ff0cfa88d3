"""What was measured of many adapters in one batch, as tables and figures for docs/measured.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import results
from tools.measurements import table

RESULTS = "benchmarks/results"
Row = dict[str, Any]
WAYS = ("DoRA xla", "kernel")


def files(root: Path, name: str) -> list[tuple[str, Row, list[Row]]]:
    """Returns (path under `root`, environment, rows) of every card's file of a level."""
    paths = sorted((root / RESULTS).glob(f"*/{name}.jsonl"))
    read = ((path.relative_to(root).as_posix(), *results.read(path)) for path in paths)
    return [(path, header["environment"], rows) for path, header, rows in read]


def page(root: Path) -> str:
    """Returns the page's part; nothing where nothing was measured."""
    parts = []
    for path, environment, rows in files(root, "bank"):
        parts += [_heading("Many adapters in one batch", path, environment), _bank(rows)]
        loads = [row for row in rows if row["task"] == "load"]
        told = ((str(row["rank"]), str(row["layers"]), f"{row['ms']:.1f}") for row in loads)
        parts.append(table(("rank", "layers", "ms to load"), told))
    for name in ("serve", "serve_torch"):
        for path, environment, rows in files(root, name):
            parts += [_heading("Served", path, environment), _served(rows)]
    return "\n\n".join(parts)


def _heading(title: str, path: str, environment: Row) -> str:
    return (
        f"## {title}\n\n`{path}`: {environment['card']}, jax {environment['jax']}, torch "
        f"{environment['torch']}, commit {environment['commit']}."
    )


def _bank(rows: list[Row]) -> str:
    """Returns a line for each batch; times are DoRA's over those of others, of one layer."""
    batches: dict[Any, dict[str, Row]] = {}
    for row in rows:
        if row["task"] != "load" and row["mix"] != "growth" and "ms" in row:
            key = row["task"], row["rows"], row["tokens"], row["mix"], row["distinct"]
            batches.setdefault(key, {})[row["kind"]] = row

    def cells(key: Any, kinds: dict[str, Row]) -> Iterable[str]:
        task, count, tokens, mix, distinct = key
        dora, bound = kinds.get("DoRA"), next(iter(kinds.values()))["bound"]
        yield from (f"{task} {count} × {tokens}", mix, str(distinct))
        yield f"{bound:.2f}" if tokens == 1 else ""
        yield f"{dora['ms']:.3f}" if dora else ""
        ratios = [("base", False), ("LoRA", False), ("one-hot", True), ("loop", True)]
        for other, is_over_dora in ratios:
            if dora is None or other not in kinds:
                yield ""
                continue
            ratio = dora["ms"] / kinds[other]["ms"]
            yield f"{1 / ratio if is_over_dora else ratio:.2f}"
        yield min((way for way in WAYS if way in kinds), key=lambda w: kinds[w]["ms"], default="")

    header = (
        *("batch", "adapters by", "of them", "least over base, by bytes", "DoRA ms a layer"),
        *("over base", "over LoRA", "one-hot over DoRA", "loop over DoRA", "fastest way"),
    )
    return table(header, (cells(key, kinds) for key, kinds in batches.items()))


def _served(rows: list[Row]) -> str:
    header = ("", "adapters", "tokens/s", "first token, ms", "90 % within, ms", "of the base's")
    told = (
        (
            row["kind"],
            str(row["adapters"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['first_token_ms']:.0f}",
            f"{row['first_token_p90_ms']:.0f}",
            f"{row['of_base']:.2f}" if "of_base" in row else "",
        )
        for row in rows
        if row.get("answers")
    )
    return table(header, told)


def figures(root: Path) -> dict[str, tuple[str, Callable[[Path], Figure]]]:
    """Returns the figures that can be drawn of what was measured."""
    made: dict[str, tuple[str, Callable[[Path], Figure]]] = {}
    if any(row.get("mix") == "growth" for _, _, rows in files(root, "bank")[:1] for row in rows):
        made["bank_growth"] = ("Decoding over the base alone, by adapters and by rank", growth)
    if files(root, "serve"):
        made["served"] = ("Served, by the number of adapters", served)
    return made


def growth(root: Path) -> Figure:
    """Draws decoding over the base alone against a batch's adapters, and against their rank."""
    _, environment, rows = files(root, "bank")[0]
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, name in zip(panels, ("adapters", "rank"), strict=True):
        mine = [row for row in rows if row.get("mix") == "growth" and name in row and "ms" in row]
        for kind in ("LoRA", "DoRA"):
            points = [(row[name], row["over_base"]) for row in mine if row["kind"] == kind]
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=kind)
        least = [(row[name], row["bound"]) for row in mine if row["kind"] == "DoRA"]
        axes.plot(*zip(*least, strict=True), ":", label="the least, by bytes")
        axes.set(xscale="log", xlabel=name, ylabel="over the base", title=environment["card"])
    return figure


def served(root: Path) -> Figure:
    """Draws tokens/s and the median time to the first token against the number of adapters."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    rows = [
        row
        for name in ("serve", "serve_torch")
        for _, _, found in files(root, name)[:1]
        for row in found
        if row.get("answers")
    ]
    for axes, name in zip(panels, ("tokens_per_s", "first_token_ms"), strict=True):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            points = [(row["adapters"], row[name]) for row in rows if row["kind"] == kind]
            if points[0][0] == 0:
                axes.axhline(points[0][1], linestyle=":", linewidth=0.8, label=kind)
            else:
                axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=kind)
        label = {"tokens_per_s": "tokens/s", "first_token_ms": "first token, ms"}[name]
        axes.set(xscale="log", yscale="log", xlabel="adapters", ylabel=label)
    return figure
