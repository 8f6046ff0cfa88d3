"""Draws every figure of the docs from committed JSON, the paper's published numbers beside ours.

    python tools/figures.py                    all of docs/figures
    python tools/figures.py --allow-missing    those whose measurements are there

The one figure without a file of measurements is computed here, on the CPU, from random numbers.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
Reports = dict[str, dict[str, Any]]  # contents by file name

STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",  # the same file from the same measurements
}

# arXiv 2603.22276, its H200: geometric means, and ranges over six models.
PAPER_COMPOSE_FORWARD, PAPER_COMPOSE_BACKWARD = 2.00, 1.08
PAPER_NORM_MEMORY_FP32, PAPER_NORM_MEMORY_BF16 = 3.2, 0.8
PAPER_OVER_PEFT = {"model inference": (1.59, 2.03), "model gradient": (1.50, 1.87)}
PAPER_LESS_PEAK_GB = (0.3, 6.7)
# Of the paper's trained adapters: how far g strays from 1.
NEAR_UNITY = 0.0015


@dataclass(frozen=True)
class Wanted:
    """A figure: what draws it, from which files, and the command that makes them."""

    name: str
    draw: Callable[[Reports], Figure]
    pattern: str = ""
    command: str = ""

    def reports(self, root: Path) -> Reports:
        paths = sorted(root.glob(self.pattern)) if self.pattern else []
        return {path.name: json.loads(path.read_text()) for path in paths}


def stability(_: Reports) -> Figure:
    """Error of ΔY in bf16 over |g - 1|, of three ways to compute it, against fp64."""
    import ml_dtypes

    bf16: Any = ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    base: Any = rng.normal(size=4096).astype(bf16)
    lora: Any = (0.1 * rng.normal(size=4096)).astype(bf16)
    distances = np.logspace(-5, -1, 33)
    errors: dict[str, list[float]] = {}
    for distance in distances:
        g = np.float32(1 + distance * rng.uniform(-1, 1, 4096)).astype(np.float32)
        wide = g.astype(np.float64) - 1
        exact = wide * base.astype(np.float64) + (1 + wide) * lora.astype(np.float64)
        f32 = np.float32
        ours = (g - f32(1)) * base.astype(f32) + g * lora.astype(f32)
        narrow: Any = g.astype(bf16)
        found = {
            "(g-1)∘base + g∘lora in fp32, rounded once (ours)": ours.astype(bf16),
            "the same in bf16": (narrow - bf16(1)) * base + narrow * lora,
            "g∘(base + lora) - base in bf16": narrow * (base + lora) - base,
        }
        for name, value in found.items():
            apart = np.abs(value.astype(np.float64) - exact)
            errors.setdefault(name, []).append(float(apart.max()))
    figure, axes = _axes(1, (6.5, 3.6))
    for (name, values), style in zip(errors.items(), ("-", "--", ":"), strict=True):
        axes[0].plot(distances, values, style, label=name)
    axes[0].axvline(NEAR_UNITY, color="grey", linewidth=0.8)
    axes[0].text(NEAR_UNITY, min(map(min, errors.values())), " trained adapters (the paper)")
    axes[0].set(xscale="log", yscale="log", xlabel="largest |g - 1|")
    axes[0].set(ylabel="peak error against fp64", title="ΔY near g = 1, bf16, base ~ N(0, 1)")
    axes[0].legend()
    return figure


def compose_speedups(reports: Reports) -> Figure:
    """Fused over plain in the same framework, device time, over the paper's shapes."""
    measurements = _correct(reports)
    figure, axes = _axes(2, (11, 7), rows=2)
    published = (PAPER_COMPOSE_FORWARD, PAPER_COMPOSE_BACKWARD)
    for one, group, paper in zip(axes, ("compose", "backward"), published, strict=True):
        of_group = [m for m in measurements if m["group"] == group and m["device"]]
        shapes = sorted({_size(m) for m in of_group}, key=lambda size: (math.prod(size), size))
        for i, (framework, fused, plain) in enumerate(
            (("jax", "mosaic", "xla"), ("torch", "triton", "eager"))
        ):
            times = {
                (_size(m), m["variant"]): m["device"]["median"]
                for m in of_group
                if m["framework"] == framework
            }
            points = {
                shapes.index(shape): times[shape, plain] / times[shape, fused]
                for shape in shapes
                if {(shape, plain), (shape, fused)} <= set(times)
            }
            if points:
                mean = statistics.geometric_mean(points.values())
                label = f"{framework}: {fused} over {plain}, geometric mean {mean:.2f}×"
                one.bar([at + 0.4 * i for at in points], list(points.values()), 0.38, label=label)
        one.axhline(1, color="black", linewidth=0.8)
        label = f"the paper: {paper:.2f}× (Triton over eager)"
        one.axhline(paper, color="tab:red", linestyle="--", linewidth=0.9, label=label)
        names = [f"{rows}×{out}" for rows, out in shapes]
        one.set_xticks(np.arange(len(shapes)) + 0.2, names, rotation=45, ha="right")
        one.set(ylabel="speed-up, device time", title=f"{group}, bf16")
        one.legend()
    return figure


def norm_over_rank(reports: Reports) -> Figure:
    """Memory and time of the norm over the rank, on the widest-measured kernel."""
    measurements = [m for m in _correct(reports) if m["group"] == "norm"]
    sizes = {(m["shape"]["in"], m["shape"]["out"]) for m in measurements}
    n_in, n_out = max(
        sizes,
        key=lambda s: len({m["shape"]["rank"] for m in measurements if _in_out(m) == s}),
    )
    figure, (memory, times) = _axes(2, (11, 4))
    labels = dict.fromkeys(f"{m['framework']} {m['variant']}" for m in measurements)
    for label in labels:
        mine = sorted(
            (m["shape"]["rank"], m["temp_bytes"], m["device"])
            for m in measurements
            if _in_out(m) == (n_in, n_out) and f"{m['framework']} {m['variant']}" == label
        )
        style = "o-" if label.startswith("jax") else "s--"
        held = [(rank, held / 2**20) for rank, held, _ in mine if held is not None]
        spent = [(rank, device["median"]) for rank, _, device in mine if device]
        for axes, points in ((memory, held), (times, spent)):
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=3, label=label)
    dense = f"the paper: {PAPER_NORM_MEMORY_FP32}× less than dense in fp32, "
    dense += f"{PAPER_NORM_MEMORY_BF16}× in bf16"
    memory.set(xlabel="rank", ylabel="temporary memory, MiB", yscale="symlog", title=dense)
    times.set(xlabel="rank", ylabel="device time, µs", yscale="log")
    times.set_title(f"norm of a {n_in} × {n_out} kernel, bf16")
    memory.legend(fontsize=6)
    return figure


def model_times(reports: Reports) -> Figure:
    """Milliseconds of a whole model, and the factor over PEFT's DoRA where that was measured."""
    measurements = [m for m in _correct(reports) if m["wall"]]
    figure, axes = _axes(2, (11, 3.8))
    for one, (group, (low, high)) in zip(axes, PAPER_OVER_PEFT.items(), strict=True):
        found = _by_label(measurements, group)
        peft = found.get("torch PEFT DoRA, defaults")
        names, values = list(found), [m["wall"]["median"] * 1e-3 for m in found.values()]
        bars = one.barh(names, values, color=[_colour(name) for name in names])
        for bar, value in zip(bars, values, strict=True):
            text = f" {value:.0f}"
            if peft:
                text += f" ({peft['wall']['median'] * 1e-3 / value:.2f}× over PEFT)"
            one.text(value, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=7)
        one.invert_yaxis()
        one.margins(x=0.25)
        one.set(xlabel="ms a micro-step", title=f"{group}; the paper over PEFT: {low}–{high}×")
    return figure


def model_memory(reports: Reports) -> Figure:
    """Peak memory of a whole model."""
    measurements = [m for m in _correct(reports) if m["peak_bytes"]]
    figure, axes = _axes(2, (11, 3.8))
    low, high = PAPER_LESS_PEAK_GB
    for one, group in zip(axes, PAPER_OVER_PEFT, strict=True):
        found = _by_label(measurements, group)
        values = [m["peak_bytes"] / 2**30 for m in found.values()]
        bars = one.barh(list(found), values, color=[_colour(name) for name in found])
        one.bar_label(bars, fmt=" %.1f", fontsize=7)
        one.invert_yaxis()
        one.margins(x=0.15)
        one.set(xlabel="peak GiB", title=f"{group}; the paper: {low}–{high} GB below PEFT")
    return figure


def convergence(reports: Reports) -> Figure:
    """Losses of the first seed, and how far pairs of runs came apart in every seed."""
    (report,) = reports.values()
    every, limits = report["curve_every"], report["limits"]
    figure, (losses, means, finals) = _axes(3, (13, 4))
    seed, curves = next(iter(report["curves"].items()))
    for name, curve in curves.items():
        if "loss" in curve and "one ulp" not in name:
            steps = np.arange(len(curve["loss"])) * every + 1
            values = [np.nan if v is None else v for v in curve["loss"]]
            style = "-" if name.startswith("jax") else "--"
            losses.plot(steps, values, style, linewidth=0.8, label=name)
    losses.set(xlabel="step", ylabel="loss, nats a byte", title=f"seed {seed}")
    losses.legend()
    labels = list(dict.fromkeys(f"{p['one']} – {p['other']}" for p in report["pairs"]))
    for axes, key, what in ((means, "mean", "mean |Δloss|"), (finals, "final", "final eval |Δ|")):
        for pair in report["pairs"]:
            if pair[key]:
                at = labels.index(f"{pair['one']} – {pair['other']}")
                axes.plot(pair[key], at, "o", color=f"C{pair['seed']}", markersize=4)
        axes.axvline(limits[key], color="tab:red", linestyle="--", label="the paper")
        axes.set(xscale="log", xlabel=what)
        axes.set_yticks(range(len(labels)), labels if axes is means else [""] * len(labels))
        axes.legend()
    means.set_title("every seed")
    return figure


BENCHMARKS = "benchmarks/results/h200"
FIGURES = (
    Wanted("stability", stability),
    Wanted(
        "compose_speedups",
        compose_speedups,
        f"{BENCHMARKS}/ops.json",
        f"python -m benchmarks ops --out {BENCHMARKS}",
    ),
    Wanted(
        "norm_over_rank",
        norm_over_rank,
        f"{BENCHMARKS}/ops.json",
        f"python -m benchmarks ops --out {BENCHMARKS}",
    ),
    Wanted(
        "model_times",
        model_times,
        f"{BENCHMARKS}/model.json",
        f"python -m benchmarks model --out {BENCHMARKS}",
    ),
    Wanted(
        "model_memory",
        model_memory,
        f"{BENCHMARKS}/model.json",
        f"python -m benchmarks model --out {BENCHMARKS}",
    ),
    Wanted(
        "convergence",
        convergence,
        "parity/reports/cuda/training.json",
        "python -m parity training --device cuda",
    ),
)


def _axes(count: int, size: tuple[float, float], rows: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, count // rows, squeeze=False)
    return figure, list(grid.flat)


def _correct(reports: Reports) -> list[dict[str, Any]]:
    """Measurements whose check is green: nothing is drawn of what is not correct."""
    return [
        m
        for report in reports.values()
        for m in report["measurements"]
        if not m["refused"] and not m["failed"] and m["check"] and m["check"]["passed"]
    ]


def _by_label(measurements: Iterable[dict[str, Any]], group: str) -> dict[str, dict[str, Any]]:
    """Of a group, by who ran; of several reports the last by name counts."""
    return {f"{m['framework']} {m['variant']}": m for m in measurements if m["group"] == group}


def _size(m: dict[str, Any]) -> tuple[int, int]:
    return m["shape"]["rows"], m["shape"]["out"]


def _in_out(m: dict[str, Any]) -> tuple[int, int]:
    return m["shape"]["in"], m["shape"]["out"]


def _colour(label: str) -> str:
    if "LoRA" in label or "base" in label:
        return "tab:grey"
    return "tab:orange" if "PEFT" in label else "tab:blue"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--allow-missing", action="store_true", help="leave out what lacks its JSON"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository with the JSON")
    parser.add_argument("--out", type=Path, help="folder; default docs/figures")
    options = parser.parse_args(arguments)
    folder = options.out or options.root / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for wanted in FIGURES:
        reports = wanted.reports(options.root)
        if wanted.pattern and not reports:
            told = f"{wanted.name}: no {wanted.pattern}; make it with `{wanted.command}`"
            print(told, file=sys.stderr)
            missing += 1
            continue
        with mpl.rc_context(STYLE):
            figure = wanted.draw(reports)
            path = folder / f"{wanted.name}.svg"
            figure.savefig(path, metadata={"Date": None})
        print(path)
    return 1 if missing and not options.allow_missing else 0


if __name__ == "__main__":
    sys.exit(main())
