"""The figures of the pages: one that is computed, and the others from the committed results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import ml_dtypes
import numpy as np
from matplotlib.figure import Figure

from benchmarks.results import row, rows
from tools.tables import timed

# The largest |g - 1| in trained adapters (arXiv 2603.22276).
NEAR_UNITY = 0.0015
INK = "#808080"  # legible on a light and on a dark page
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",  # so that the same measurements give the same file
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}
STYLES = {"base": ":", "LoRA": "o--", "DoRA": "o-"}
COLORS = {"base": "tab:gray", "LoRA": "tab:blue", "DoRA": "tab:orange"}


def panels(count: int, width: float = 5.5) -> tuple[Figure, list[Any]]:
    """Returns a figure, and its axes side by side."""
    figure = Figure(figsize=(width * count, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False).flat)


def stability() -> Figure:
    """Draws the error of ΔY against fp64 over |g - 1|, for three ways to compute it in bf16."""
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
        ways = {
            "(g-1)∘base + g∘lora in fp32, rounded once (ours)": fp32.astype(bf16),
            "the same in bf16": (narrow - bf16(1)) * base + narrow * lora,
            "g∘(base + lora) - base in bf16": narrow * (base + lora) - base,
        }
        for name, value in ways.items():
            error = float(np.abs(np.asarray(value, np.float64) - exact).max())
            errors.setdefault(name, []).append(error)
    figure, (axes,) = panels(1)
    for (name, values), style in zip(errors.items(), ("-", "--", ":"), strict=True):
        axes.plot(distances, values, style, label=name)
    axes.axvline(NEAR_UNITY, color=INK, linewidth=0.8, label="trained adapters (the paper)")
    axes.set(xscale="log", yscale="log", xlabel="largest |g - 1|", ylabel="peak error against fp64")
    return figure


def layer() -> Figure:
    """Draws the time of an adapted projection's forward and backward pass, divided by that of the
    best LoRA by XLA."""
    names = {
        "torch PEFT DoRA, defaults": "PEFT's DoRA, defaults",
        "torch PEFT DoRA, bf16, compiled": "PEFT's DoRA, bf16, compiled",
        "jax XLA DoRA (no Triton)": "DoRA by XLA",
        "torch torch_dora": "torch_dora",
        "jax DoRA (no Triton)": "jax_dora",
        "jax DoRA, norm kept (no Triton)": "jax_dora, norm kept",
    }
    sizes = {"fan_in": 8192, "out": 8192, "rank": 384}
    lines = timed("layer", "h200", group="layer forward+backward", **sizes)
    ratios = {line["label"]: line.get("of_lora") for line in lines}
    figure, (axes,) = panels(1, width=7)
    figure.set_figheight(2)
    bars = axes.barh([*names.values()], [ratios[label] for label in names], color=COLORS["DoRA"])
    axes.bar_label(bars, fmt="{:.2f}", label_type="center", color="white")
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xlabel="time of 8192 × 8192, rank 384, forward and backward, divided by LoRA's (H200)")
    return figure


def bank_growth() -> Figure:
    """Draws a layer's time for 64 rows over the number of requested adapters, and over their rank.
    With more adapters than slots, the time includes loads."""
    figure, both = panels(2)
    labels = {"adapters": "adapters that requests ask for", "rank": "rank of all 64 adapters"}
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        for kind in STYLES:
            lines = [line for line in rows("bank", "h100", mix="growth", kind=kind) if name in line]
            _draw(axes, kind, [line[name] for line in lines], [1e3 * line["ms"] for line in lines])
        axes.set(xlabel=label, ylabel="µs of a layer")
        _from_zero(axes)
    return figure


def served() -> Figure:
    """Draws the throughput and the latency of the server's engine over the number of adapters."""
    figure, both = panels(2)
    labels = {"tokens_per_s": "tokens/s", "first_token_ms": "ms to the first token, median"}
    base = row("serve", "h100", kind="base", qtype="bf16")
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        axes.axhline(base[name], linestyle=STYLES["base"], color=COLORS["base"], label="base")
        for kind in ("LoRA", "DoRA"):
            lines = rows("serve", "h100", kind=kind, qtype="bf16")
            _draw(axes, kind, [line["adapters"] for line in lines], [line[name] for line in lines])
        axes.set(xlabel="adapters", ylabel=label)
        _from_zero(axes)
    return figure


def _draw(axes: Any, kind: str, counts: Sequence[int], values: Sequence[float]) -> None:
    axes.plot(counts, values, STYLES[kind], color=COLORS[kind], markersize=3, label=kind)
    axes.set(xscale="log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()


def _from_zero(axes: Any) -> None:
    """Makes the vertical axis begin at 0, with room above the highest line."""
    axes.set_ylim(0, 1.05 * axes.dataLim.ymax)


# Those of the site, which are not committed. `layer` is README's, and is.
FIGURES: tuple[Callable[[], Figure], ...] = (stability, bank_growth, served)


def write(folder: Path, makers: Sequence[Callable[[], Figure]] = FIGURES) -> None:
    """Writes each figure to FUNCTION.svg, with its legends below the axes."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in makers:
        with mpl.rc_context(STYLE):
            figure = make()
            for axes in figure.axes:
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
            figure.savefig(folder / f"{make.__name__}.svg", metadata={"Date": None})
