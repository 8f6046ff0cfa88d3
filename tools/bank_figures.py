"""Figures of many adapters in one batch, and of the server that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from tools.measurements import panels, row, rows

STYLES = {"base": ":", "LoRA": "o--", "DoRA": "o-"}
COLORS = {"base": "tab:gray", "LoRA": "tab:blue", "DoRA": "tab:orange"}


def growth() -> Figure:
    """Draws a layer's time for 64 rows over how many adapters are asked for, and over their rank.

    Where LoRA's row includes loads that DoRA's does not, it is left out.
    """
    figure, both = panels(2)
    labels = {"adapters": "adapters that requests ask for", "rank": "rank of all 64 adapters"}
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        for kind in STYLES:
            grown = rows("bank", "h100", mix="growth", kind=kind)
            found = [one for one in grown if name in one and not one.get("loads")]
            counts = [one[name] for one in found]
            _draw(axes, kind, counts, [1e3 * one["ms"] for one in found])
        axes.set(xlabel=label, ylabel="µs of a layer", ylim=(0, None))
    return figure


def served() -> Figure:
    """Draws what the server's engine answers with, and after how long, over how many adapters."""
    figure, both = panels(2)
    labels = {"tokens_per_s": "tokens/s", "first_token_ms": "ms to the first token, median"}
    base = row("serve", "h100", kind="base")
    for axes, (name, label) in zip(both, labels.items(), strict=True):
        axes.axhline(base[name], linestyle=STYLES["base"], color=COLORS["base"], label="base")
        for kind in ("LoRA", "DoRA"):
            found = rows("serve", "h100", kind=kind)
            _draw(axes, kind, [one["adapters"] for one in found], [one[name] for one in found])
        axes.set(xlabel="adapters", ylabel=label, ylim=(0, None))
    return figure


def _draw(axes: Any, kind: str, counts: Sequence[int], values: Sequence[float]) -> None:
    axes.plot(counts, values, STYLES[kind], color=COLORS[kind], markersize=3, label=kind)
    axes.set(xscale="log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
