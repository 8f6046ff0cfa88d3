"""Makes the measured parts of the documentation from the committed results: no number is typed.

    python tools/measured.py    write the tables that README and pages quote, docs/measured.md and
                                docs/figures/*.svg

mkdocs runs it before it builds the site; docs/measured.md and the figures are not committed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.report import label, time
from tools import bank_figures, bank_tables, quoted, step_parts
from tools.measurements import ROOT, panels, report

# arXiv 2603.22276, its H200: geometric means over shapes, and how far g strays from 1.
PAPER_COMPOSE = {"compose": 2.00, "backward": 1.08}
NEAR_UNITY = 0.0015
# Legible on a light and on a dark page.
INK = "#808080"
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",  # the same file from the same measurements
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}


def measured() -> str:
    """Returns the page of everything that was measured."""
    parts = [
        "# Measured",
        "Medians of device time. The floor is the time of the bytes at the copy rate of the same "
        "run, or of the products at its bf16 rate, whichever is longer.",
    ]
    for name, found in quoted.reports().items():
        environment = found.header["environment"]
        versions = ", ".join(f"{key} {environment[key]}" for key in ("jax", "torch", "triton"))
        parts.append(f"## {Path(name).stem}")
        parts.append(
            f"`{name}`: {environment['card']}, {versions}, commit {environment['commit']}."
        )
        parts.append(found.text())
    parts.append("## Many adapters in one batch: `benchmarks/results/h100/bank.jsonl`")
    parts.append(bank_tables.every_bank())
    drawn = (f"![{title}](figures/{name}.svg)" for name, (title, _) in FIGURES.items())
    return "\n\n".join([*parts, "## Figures", *drawn]) + "\n"


def stability() -> Figure:
    """Draws the error of ΔY in bf16 over |g - 1|, of three ways to compute it, against fp64."""
    import ml_dtypes

    bf16: Any = ml_dtypes.bfloat16
    f32 = np.float32
    rng = np.random.default_rng(0)
    base, lora = rng.normal(size=4096).astype(bf16), (0.1 * rng.normal(size=4096)).astype(bf16)
    distances = np.logspace(-5, -1, 33)
    errors: dict[str, list[float]] = {}
    for distance in distances:
        g = f32(1 + distance * rng.uniform(-1, 1, 4096))
        wide = g.astype(np.float64) - 1
        exact = wide * base.astype(np.float64) + (1 + wide) * lora.astype(np.float64)
        narrow: Any = g.astype(bf16)
        fp32 = (g - f32(1)) * base.astype(f32) + g * lora.astype(f32)
        found = {
            "(g-1)∘base + g∘lora in fp32, rounded once (ours)": fp32.astype(bf16),
            "the same in bf16": (narrow - bf16(1)) * base + narrow * lora,
            "g∘(base + lora) - base in bf16": narrow * (base + lora) - base,
        }
        for name, value in found.items():
            error = float(np.abs(np.asarray(value, np.float64) - exact).max())
            errors.setdefault(name, []).append(error)
    figure, (axes,) = panels(1)
    for (name, values), style in zip(errors.items(), ("-", "--", ":"), strict=True):
        axes.plot(distances, values, style, label=name)
    axes.axvline(NEAR_UNITY, color=INK, linewidth=0.8, label="trained adapters (the paper)")
    axes.set(xscale="log", yscale="log", xlabel="largest |g - 1|", ylabel="peak error against fp64")
    return figure


def compose_speedups() -> Figure:
    """Draws fused over plain in the same framework over the paper's shapes."""
    ops = report("ops")
    figure, both = panels(2)
    for axes, (group, paper) in zip(both, PAPER_COMPOSE.items(), strict=True):
        times = {
            (m["shape"]["rows"] * m["shape"]["out"], label(m)): us
            for m in ops.rows
            if m["group"] == group and (us := time(m))
        }
        for fused, plain in (("jax mosaic", "jax xla"), ("torch triton", "torch eager")):
            sizes = sorted({size for size, label in times if label == fused})
            ratios = [times[size, plain] / times[size, fused] for size in sizes]
            mean = statistics.geometric_mean(ratios)
            axes.plot(sizes, ratios, "o-", markersize=3, label=f"{fused} over {plain}: {mean:.2f}×")
        axes.axhline(paper, color="tab:red", linestyle="--", label=f"the paper: {paper:.2f}×")
        axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="speed-up", title=group)
    return figure


FIGURES: dict[str, tuple[str, Callable[[], Figure]]] = {
    "stability": ("Error near g = 1, in bf16", stability),
    "compose_speedups": ("Compose, fused over plain", compose_speedups),
    "step": ("A step by operator", step_parts.figure),
    "bank_growth": (
        "Rows with adapters of their own, by how many and by rank",
        bank_figures.growth,
    ),
    "served": ("The server's engine, by how many adapters", bank_figures.served),
}


def write(docs: Path = ROOT / "docs") -> None:
    """Writes measured.md and the figures, their legends below."""
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    for name, (_, make) in FIGURES.items():
        with mpl.rc_context(STYLE):
            figure = make()
            for axes in figure.axes:
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
            figure.savefig(docs / "figures" / f"{name}.svg", metadata={"Date": None})
    (docs / "measured.md").write_text(measured())


def on_pre_build(config: Any) -> None:
    """Runs before mkdocs reads the pages: a hook of mkdocs.yml."""
    write()


if __name__ == "__main__":
    for path in (ROOT / name for name in quoted.PAGES):
        path.write_text(quoted.updated(path.read_text()))
    write()
