"""A figure a seed, from the contents of training.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure


def draw(report: dict[str, Any], folder: Path, prefix: str = "training_seed") -> list[Path]:
    """Loss, |Δloss| and gradient norm over the steps, in `folder`; returns the files."""
    return [
        _draw_seed(report, seed, curves, folder / f"{prefix}{seed}.png")
        for seed, curves in report["curves"].items()
    ]


def _draw_seed(report: dict[str, Any], seed: str, curves: dict[str, Any], path: Path) -> Path:
    every, limits = report["curve_every"], report["limits"]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 3.8), layout="constrained")
        losses, apart, norms = figure.subplots(1, 3)

    def plot(axes: Any, values: list[float | None], label: str, style: str = "-") -> None:
        numbers = [np.nan if value is None else value for value in values]
        axes.plot(np.arange(len(numbers)) * every + 1, numbers, style, label=label, linewidth=0.9)

    for name, curve in curves.items():
        if "loss" in curve:
            plot(losses, curve["loss"], name, "-" if name.startswith("jax") else "--")
            plot(norms, curve["gradient_norm"], name, "-" if name.startswith("jax") else "--")
        else:
            floor = name.startswith("rounding floor")
            plot(apart, curve["mean_difference"], name, ":" if floor else "-")
    apart.axhline(limits["mean"], color="black", linewidth=0.8, label="allowed over all steps")
    losses.set(xlabel="step", ylabel="loss, nats a byte", title=f"seed {seed}: loss")
    apart.set(xlabel="step", yscale="log", title=f"|Δloss|, mean of {every} steps")
    apart.set_ylim(limits["mean"] * 1e-3, limits["worst"] * 3)
    norms.set(xlabel="step", yscale="log", title="gradient norm")
    for axes in (losses, apart, norms):
        axes.legend(frameon=False, fontsize=6)
    figure.savefig(path, dpi=110)
    return path
