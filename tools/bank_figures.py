"""Figures of many adapters in one batch, and of the server that has them."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from tools.measurements import row, rows

STYLES = {"base": ":", "LoRA": "o--", "DoRA": "o-"}
COLORS = {"base": "tab:gray", "LoRA": "tab:blue", "DoRA": "tab:orange"}


def growth() -> Figure:
    """Draws a layer's time for 64 rows over how many adapters are asked for, and over their rank.

    Where LoRA's row includes loads that DoRA's does not, it is left out.
    """
    figure, panels = _panels()
    labels = {"adapters": "adapters that requests ask for", "rank": "rank of all 64 adapters"}
    counts: list[int] = []
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for kind, style in STYLES.items():
            grown = rows("bank", "h100", mix="growth", kind=kind)
            found = [one for one in grown if name in one and not one.get("loads")]
            counts, times = [one[name] for one in found], [1e3 * one["ms"] for one in found]
            axes.plot(counts, times, style, color=COLORS[kind], markersize=3, label=kind)
        _label(axes, counts, label, "µs of a layer")
    return figure


def served() -> Figure:
    """Draws what the server's engine answers with, and after how long, over how many adapters."""
    figure, panels = _panels()
    labels = {"tokens_per_s": "tokens/s", "first_token_ms": "ms to the first token, median"}
    base, counts = row("serve", "h200", kind="base"), []
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        axes.axhline(base[name], linestyle=STYLES["base"], color=COLORS["base"], label="base")
        for kind in ("LoRA", "DoRA"):
            found = rows("serve", "h200", kind=kind)
            counts, values = [one["adapters"] for one in found], [one[name] for one in found]
            axes.plot(counts, values, STYLES[kind], color=COLORS[kind], markersize=3, label=kind)
        _label(axes, counts, "adapters", label)
    return figure


def _label(axes: Any, counts: list[int], x: str, y: str) -> None:
    axes.set(xscale="log", xlabel=x, ylabel=y, ylim=(0, None))
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()


def _panels() -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(11, 4), layout="constrained")
    return figure, list(figure.subplots(1, 2).flat)
