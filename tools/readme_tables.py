"""Writes the measured sections from committed JSON: no number in them is typed by hand.

    python tools/readme_tables.py            rewrite README.md, docs/measured.md, docs/fidelity.md
    python tools/readme_tables.py --check    exit 1 if a file is not what that would write

README.md gets agreement and speed-ups, docs/measured.md all of operators and speed,
docs/fidelity.md what each level of parity found.

Sources are the reports that `python -m parity` and `python -m benchmarks` wrote on a GPU and that
are kept in `benchmarks/results/` and `parity/reports/cuda/`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ("benchmarks/results/**/*.json", "parity/reports/cuda/*.json")
BEGIN = "<!-- measured: begin (tools/readme_tables.py) -->"
END = "<!-- measured: end -->"
# Below this many elements an activation fits a cache or takes less time than a launch.
LARGE_ACTIVATION = 4096 * 4096

NOTHING = """\
Nothing has been measured yet. On a machine with an NVIDIA GPU, `make parity` writes how near both
packages come to fp64, and `python -m benchmarks ops --out benchmarks/results` the rates; then
`python tools/readme_tables.py` puts them here."""


def section(root: Path) -> str:
    """The Markdown between the markers, for the JSON files under `root`."""
    parts = []
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)}):
        report = json.loads(path.read_text())
        name = path.relative_to(root).as_posix()
        if "rows" in report:
            parts.append(
                f"### Agreement\n\n{_source(name, report)}\n\n{_agreement(report['rows'])}"
            )
        elif "measurements" in report:
            title = f"### Speed: {report['level']}"
            growth = _growth(report)
            parts.append(f"{title}\n\n{_source(name, report)}\n\n{_speed(report)}{growth}")
    figures = _figures(root, SPEED_FIGURES)
    parts += [f"### Figures\n\n{figures}"] if figures else []
    return "\n\n".join(parts) or NOTHING


SPEED_FIGURES = {
    "compose_speedups": "Compose, fused over plain",
    "norm_over_rank": "The norm over the rank",
    "model_times": "A whole model's times",
    "model_memory": "A whole model's peak memory",
}


def fidelity(root: Path) -> str:
    """docs/fidelity.md's part: a section a level, measured or not."""
    operators = [
        f"{_source(name, report)}\n\n{_agreement(report['rows'])}"
        for name, report in _reports(root, "parity/reports/cuda/*.json")
        if "rows" in report
    ]
    sections = {"Operators and layers": operators or [_not_measured("")]}
    for title, level, table in (
        ("Whole models", "model", _models),
        ("Training", "training", _training),
        ("Planted faults", "controls", _controls),
    ):
        found = [
            f"{_source(name, report)}\n\n{table(report)}"
            for name, report in _reports(root, f"parity/reports/cuda/{level}.json")
        ]
        sections[title] = found or [_not_measured(level)]
    for title, figures in (
        ("Operators and layers", {"stability": "Error near g = 1"}),
        ("Training", {"convergence": "Losses, and how far runs came apart"}),
    ):
        if drawn := _figures(root, figures):
            sections[title].append(drawn)
    return "\n\n".join("\n\n".join([f"### {title}", *parts]) for title, parts in sections.items())


HEADLINE = {
    "DoRA (no Triton)": "norm in every call",
    "DoRA, norm kept (no Triton)": "norm kept",
    "DoRA, norm and half of inner kept (no Triton)": "norm and half of inner kept",
    "DoRA, norm and inner kept (no Triton)": "norm and inner kept",
}


def headline(root: Path) -> str:
    """README's part of it: how much agrees, and DoRA in JAX beside the best LoRA in JAX."""
    agreement: list[tuple[str, str, str]] = []
    # By work, then by way: by device time and by wall time.
    speed: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    sources: dict[str, list[str]] = {}
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)}):
        report = json.loads(path.read_text())
        link = f"[`{path.name}`]({path.relative_to(root).as_posix()})"
        if "rows" in report:
            passed = sum(row["passed"] for row in report["rows"])
            count = f"{passed} of {len(report['rows'])}"
            agreement.append((report["environment"]["card"], count, link))
            continue
        for s in report.get("speedups", ()):
            ours = s["variant"] in HEADLINE and s["over"] == "the best jax LoRA"
            if ours and s.get("device") and "r384" in s["work"]:
                way = HEADLINE[s["variant"]]
                device, wall = speed.setdefault(s["work"], {}).setdefault(way, ([], []))
                device.append(1 / s["device"])
                if s.get("wall"):
                    wall.append(1 / s["wall"])
                if link not in sources.setdefault(s["work"], []):
                    sources[s["work"]].append(link)
    parts = []
    if agreement:
        parts.append(_table(("card", "comparisons within tolerance", "from"), agreement))
    if speed:
        ways = tuple(w for w in HEADLINE.values() if any(w in ratios for ratios in speed.values()))
        rows = (
            (work, *(_ratios(work, ratios.get(way)) for way in ways), ", ".join(sources[work]))
            for work, ratios in speed.items()
        )
        parts.append(
            "Device time of DoRA, times that of the best plain LoRA that XLA gives in the same "
            "run; of several runs, the least and the most. A layer's norm is given where it is "
            "kept, a model's is kept by `keep_norms`, whose comparisons are in the time. Of a "
            "model by wall time too, since its device time is a median of two or three steps:\n\n"
            f"{_table(('work', *ways, 'from'), rows)}"
        )
    if not parts:
        return NOTHING
    return "\n\n".join([*parts, "All of it: [`docs/measured.md`](docs/measured.md)."])


def _ratios(work: str, found: tuple[list[float], list[float]] | None) -> str:
    if found is None:
        return "–"
    device, wall = found
    by_wall = f", wall {_range(wall)}" if wall and work.startswith("model") else ""
    return _range(device) + by_wall


def _range(ratios: Sequence[float]) -> str:
    """Of all runs that measured it."""
    least, most = (f"{end:.2f}×" for end in (min(ratios), max(ratios)))
    return least if least == most else f"{least} to {most}"


def updated(readme: str, body: str) -> str:
    """`readme` with `body` between the markers.

    Raises:
      ValueError: a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks a marker; expected {BEGIN!r} and then {END!r}")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def _reports(root: Path, pattern: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, contents) of the files that match."""
    paths = sorted(root.glob(pattern))
    return [(path.relative_to(root).as_posix(), json.loads(path.read_text())) for path in paths]


def _not_measured(level: str) -> str:
    device = "" if level == "controls" else " --device cuda"
    command = " ".join(["python -m parity", level]).strip() + device
    return f"Not measured yet: `{command} --out parity/reports/cuda` measures it."


def _figures(root: Path, titles: dict[str, str]) -> str:
    """Those that `tools/figures.py` has drawn."""
    drawn = {n: text for n, text in titles.items() if (root / f"docs/figures/{n}.svg").exists()}
    return "\n\n".join(f"![{text}](figures/{name}.svg)" for name, text in drawn.items())


def _models(report: dict[str, Any]) -> str:
    """For every run, how far apart the systems are, and the checks nearest to what is allowed."""

    def used(check: dict[str, Any]) -> float:
        if check["value"] is None:
            return float("inf")
        return check["value"] / check["allowed"] if check["allowed"] else 0.0

    parts = []
    for run in report["runs"]:
        pairs = [
            (
                f"{pair['first']} – {pair['second']}",
                f"{pair['logits']['distance']['cosine']:.1e}",
                f"{pair['logits']['distance']['relative']:.1e}",
                f"{pair['logits']['top1']:.2%}",
                f"{pair['logits']['kl_mean']:.1e}",
                f"{pair['adapter']['relative']:.1e}" if pair["adapter"] else "",
            )
            for pair in run["pairs"]
        ]
        header = ("systems", "1 - cosine", "relative", "top-1", "KL", "adapter's gradient")
        kinds: dict[str, list[dict[str, Any]]] = {}
        for check in run["checks"]:
            single = check["quantity"].startswith("gradient of")
            kind = "gradient of one kind of adapter tensor" if single else check["quantity"]
            kinds.setdefault(kind, []).append(check)
        rows = []
        for kind, group in kinds.items():
            nearest = max(group, key=used)
            value = "∞" if nearest["value"] is None else f"{nearest['value']:.1e}"
            passed = f"{sum(check['passed'] for check in group)} of {len(group)}"
            allowed = f"{nearest['allowed']:.1e}"
            rows.append((kind, passed, nearest["systems"], value, allowed, nearest["note"]))
        rows += [(name, "failed", error, "", "", "") for name, error in run["errors"].items()]
        judged = ("quantity", "passed", "nearest to its tolerance", "value", "allowed", "note")
        parts.append(f"{run['name']}:\n\n{_table(header, pairs)}\n\n{_table(judged, rows)}")
    return "\n\n".join(parts)


def _training(report: dict[str, Any]) -> str:
    """For every pair, the worst of the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in report["pairs"]:
        groups.setdefault((pair["kind"], f"{pair['one']} – {pair['other']}"), []).append(pair)

    def cells(key: tuple[str, str], pairs: list[dict[str, Any]]) -> Iterator[str]:
        yield from (*key, ", ".join(str(pair["seed"]) for pair in pairs))
        for quantity in ("mean", "worst", "final", "gradient_norm_median", "relative_drift"):
            values = [pair[quantity] for pair in pairs]
            yield "∞" if None in values else f"{max(values):.1e}"
        judged = [pair["passed"] for pair in pairs if pair["passed"] is not None]
        yield f"{sum(judged)} of {len(judged)}" if judged else "not judged"

    header = (
        "what",
        "runs",
        "seeds",
        "mean Δloss",
        "worst step's Δloss",
        "final evaluation's Δ",
        "gradient norm, median relative Δ",
        "adapters apart / travelled",
        "passed",
    )
    limits, settings = report["limits"], report["settings"]
    allowed = (
        "allowed",
        "",
        "",
        *(f"{limits[k]:.1e}" for k in ("mean", "worst", "final")),
        "",
        "",
        "",
    )
    rows = [allowed, *(cells(key, pairs) for key, pairs in groups.items())]
    failures = "".join(f"\n\n**Failed:** {failure}" for failure in report["failures"])
    return (
        f"{settings['steps']} steps of {settings['rows'] * settings['length']} tokens, rank "
        f"{settings['rank']}, {settings['layers']} layers {settings['hidden']} wide, "
        f"{settings['dtype']}. The worst of the seeds:\n\n{_table(header, rows)}{failures}"
    )


def _controls(report: dict[str, Any]) -> str:
    """Which level caught which fault; what must be caught is bold."""
    outcomes = report["outcomes"]
    levels = list(dict.fromkeys(outcome["level"] for outcome in outcomes))

    def word(outcome: dict[str, Any] | None) -> str:
        if outcome is None:
            return "not run"
        if outcome["error"]:
            return "error"
        if outcome["backend"] is None:
            return "passes" if outcome["passed"] else "FAILS"
        if not outcome["caught"]:
            return "MISSED" if outcome["expected"] else "–"
        return "**caught**" if outcome["expected"] else "caught"

    rows = []
    for fault, backend in dict.fromkeys((o["fault"], o["backend"]) for o in outcomes):
        of_row = {o["level"]: o for o in outcomes if (o["fault"], o["backend"]) == (fault, backend)}
        rows.append((fault, backend or "", *(word(of_row.get(level)) for level in levels)))
    return _table(("fault", "planted in", *levels), rows)


def _source(name: str, report: dict[str, Any]) -> str:
    environment = report["environment"]
    versions = ", ".join(f"{key} {environment[key]}" for key in ("jax", "torch", "triton"))
    return f"`{name}`: {environment['card']}, {versions}, commit {environment['commit']}."


def _agreement(rows: Sequence[dict[str, Any]]) -> str:
    def cells(level: str, dtype: str) -> Iterator[str]:
        group = [row for row in rows if (row["level"], row["dtype"]) == (level, dtype)]
        passed = sum(row["passed"] for row in group)
        # JSON has no infinity: an infinitely wrong row is null.
        nearest = max(group, key=lambda row: float("inf") if row["worst"] is None else row["worst"])
        yield from (level, dtype, f"{passed} of {len(group)}", nearest["quantity"])
        for value in (
            nearest["jax"]["error"],
            nearest["torch"]["error"],
            nearest["difference"],
            nearest["worst"],
        ):
            yield "∞" if value is None else f"{value:.2g}"

    kinds = dict.fromkeys((row["level"], row["dtype"]) for row in rows)
    header = (
        "level",
        "dtype",
        "within tolerance",
        "nearest to its tolerance",
        "JAX vs fp64",
        "torch vs fp64",
        "JAX vs torch",
        "of what is allowed",
    )
    return _table(header, (cells(*kind) for kind in kinds))


def _speed(report: dict[str, Any]) -> str:
    measurements = [m for m in report["measurements"] if not m["refused"] and m["device"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for m in measurements:
        shape = m["shape"]
        wide = shape.get("out", shape.get("in", 1))
        # Candidates of the tuner are in the JSON alone.
        if m.get("config") or shape.get("rows", LARGE_ACTIVATION) * wide < LARGE_ACTIVATION:
            continue
        groups.setdefault((m["group"], f"{m['framework']} {m['variant']}"), []).append(m)

    def cells(key: tuple[str, str], group: list[dict[str, Any]]) -> Iterator[str]:
        yield from (*key, str(len(group)))
        if not all(m["check"] and m["check"]["passed"] and not m["failed"] for m in group):
            yield from ("withheld: its check is red", "", "", "")
            return
        largest = max(group, key=lambda m: m["bytes"])
        yield " × ".join(f"{size} {axis}" for axis, size in largest["shape"].items())
        yield f"{largest['device']['median']:.1f}"
        yield f"{largest['bytes_per_second'] * 1e-12:.2f}"
        shares = [m["share_of_floor"] for m in group]
        yield f"{statistics.geometric_mean(shares):.0%}, worst {min(shares):.0%}"

    header = (
        "work",
        "implementation",
        "shapes",
        "the largest",
        "µs there",
        "TB/s there",
        "of the floor, geometric mean",
    )
    table = _table(header, (cells(key, group) for key, group in groups.items()))
    ceilings = report["ceilings"]
    if not ceilings:
        return table
    return (
        f"{table}\n\nThe floor is the time of the bytes at the copy rate of the same run, "
        f"{ceilings['copy'] * 1e-12:.2f} TB/s, or of the products at its bf16 rate, "
        f"{ceilings['matmul'] * 1e-12:.0f} TFLOP/s, whichever is longer. Device time, medians; "
        "activations of at least 4096 × 4096 elements."
    )


def _growth(report: dict[str, Any]) -> str:
    """How a layer's time grows from the smallest rank to the largest, beside its FLOPs."""
    by_variant: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for m in report["measurements"]:
        if m["group"].startswith("layer") and m["device"] and not m["failed"]:
            key = (f"{m['group']} {m['shape']['in']} × {m['shape']['out']}", m["variant"])
            label = (key[0], f"{m['framework']} {key[1]}")
            by_variant.setdefault(label, {})[m["shape"]["rank"]] = m
    rows = []
    for (work, variant), ranks in by_variant.items():
        low, high = ranks[min(ranks)], ranks[max(ranks)]
        if len(ranks) < 3:
            continue
        time = high["device"]["median"] / low["device"]["median"]
        flops = high["flops"] / low["flops"]
        cells = (f"{min(ranks)} to {max(ranks)}", f"{time:.2f}×", f"{flops:.2f}×")
        rows.append((work, variant, *cells, f"{time / flops:.2f}"))
    if not rows:
        return ""
    header = ("work", "implementation", "ranks", "time", "FLOPs", "time over prediction")
    return f"\n\nGrowth with the rank:\n\n{_table(header, rows)}"


def _table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    options = parser.parse_args(arguments)
    outdated = 0
    for name, body in (
        ("README.md", headline(ROOT)),
        ("docs/measured.md", section(ROOT)),
        ("docs/fidelity.md", fidelity(ROOT)),
    ):
        file = ROOT / name
        old = file.read_text()
        new = updated(old, body)
        if options.check and new != old:
            print(f"{name} is outdated: run `python tools/readme_tables.py`", file=sys.stderr)
            outdated = 1
        elif not options.check:
            file.write_text(new)
    return outdated


if __name__ == "__main__":
    sys.exit(main())
