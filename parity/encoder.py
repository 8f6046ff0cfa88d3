"""Real input: a pretrained sentence encoder, adapted and trained in both frameworks.

The same initial adapter is trained on the same batch in Flax, in torch and, densely, in fp64. The
adapter that torch trained is then carried to all of them, and embeddings and gradients compared.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from parity import minilm, minilm_jax, minilm_torch, oracle, tolerances
from parity.compare import Row, Side
from parity.jax_side import interpreted
from parity.minilm_torch import Adapter, Evaluation
from parity.report import Report

CASE = "encoder all-MiniLM-L6-v2"
FIGURE = "encoder.png"
STEPS = {"cpu": 6, "cuda": 100}
PAIRS = {"cpu": 4, "cuda": None}  # None: all
QUICK_STEPS = 2
PLAIN_NAMES = ("xla", "eager")
KERNEL_NAMES = ("mosaic", "triton")


def run_encoder(report: Report, device: str, folder: Path, *, quick: bool) -> None:
    """Adds rows and facts to the report and a figure to its folder."""
    steps = QUICK_STEPS if quick else STEPS[device]
    pairs = minilm.sentence_pairs()[: 2 if quick else PAIRS[device]]
    batch = minilm.batch(pairs)
    start = minilm_torch.initial_adapter()
    dtypes = ("float32", "bfloat16")
    native = device == "cuda"
    names = KERNEL_NAMES if native else PLAIN_NAMES

    # In fp32: Adam's first steps are the signs of gradients, and in bf16 many of those are noise.
    losses: dict[str, list[float]] = {}
    losses["fp64"], _ = minilm_torch.train(_dense(start, device), batch, steps)
    losses["JAX"], _ = minilm_jax.train(_jax("dora", start, "float32", names[0]), batch, steps)
    ours = _torch("dora", start, "float32", device, names[1])
    losses["torch"], trained = minilm_torch.train(ours, batch, steps)
    report.rows += _training_rows(names, losses)

    for dtype in dtypes:
        # Without bf16 hardware its gradients would cost more than all else.
        gradients = native or dtype == "float32"
        # Of the weights as that dtype holds them: their rounding is nobody's error here.
        exact = minilm_torch.evaluate(_dense(trained, device, dtype), batch, gradients)
        plain = _both("plain", trained, dtype, device, PLAIN_NAMES, batch, gradients)
        for implementations in (PLAIN_NAMES, KERNEL_NAMES) if native else (PLAIN_NAMES,):
            ours = _both("dora", trained, dtype, device, implementations, batch, gradients)
            report.rows += evaluation_rows(dtype, implementations, exact, ours, plain)
    if not native:
        report.rows += _interpreted_rows(trained, pairs[:1])

    before, after = _g(start), _g(trained)
    report.facts |= {
        "encoder steps": steps,
        "encoder loss before and after": [losses["fp64"][0], losses["fp64"][-1]],
        "encoder |g - 1| after training, largest": float(np.abs(after - 1).max()),
        "encoder |g - 1| after training, median": float(np.median(np.abs(after - 1))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _plot(before, after, losses, folder / FIGURE)
    report.figures.append(FIGURE)


def _training_rows(implementations: tuple[str, str], losses: dict[str, list[float]]) -> list[Row]:
    def apart(one: str, other: str) -> np.ndarray:
        return np.abs(np.array(losses[one]) - np.array(losses[other]))

    rows = []
    for quantity, statistic, allowed in (
        ("mean |Δloss|", np.mean, tolerances.TRAINING_MEAN_LOSS_DIFFERENCE),
        ("worst |Δloss|", np.max, tolerances.TRAINING_WORST_LOSS_DIFFERENCE),
    ):
        sides = [
            Side(implementation, float(statistic(apart(name, "fp64"))), 0.0, allowed, 0.0)
            for name, implementation in zip(("JAX", "torch"), implementations, strict=True)
        ]
        between = float(statistic(apart("JAX", "torch")))
        rows.append(_row("float32", quantity, sides, between, allowed, max(losses["fp64"])))
    return rows


def evaluation_rows(
    dtype: str,
    implementations: tuple[str, str],
    exact: Evaluation,
    ours: tuple[Evaluation, Evaluation],
    plain: tuple[Evaluation, Evaluation],
) -> list[Row]:
    rows = []
    for quantity, distance, floor in (
        ("embeddings", lambda a, b: float((a - b).abs().max()), 0.0),
        ("embeddings, 1 - cosine", _cosine_distance, 1 - tolerances.EMBEDDING_COSINE[dtype]),
    ):
        peak = float(exact.embeddings.abs().max()) if not floor else 0.0
        sides = []
        for implementation, our, their in zip(implementations, ours, plain, strict=True):
            plain_error = distance(their.embeddings, exact.embeddings)
            allowed = tolerances.flash_rule(plain_error, peak, dtype, floor)
            error = distance(our.embeddings, exact.embeddings)
            sides.append(Side(implementation, error, plain_error, allowed, 0.0))
        between = distance(ours[0].embeddings, ours[1].embeddings)
        allowed = floor or sides[0].tolerance + sides[1].tolerance
        rows.append(_row(dtype, quantity, sides, between, allowed, peak))
    for name, want in exact.gradients.items():

        def relative(got: torch.Tensor, want: torch.Tensor = want) -> float:
            return float((got - want).norm() / want.norm())

        sides = []
        for implementation, our, their in zip(implementations, ours, plain, strict=True):
            plain_error = relative(their.gradients[name])
            allowed = tolerances.flash_rule(plain_error, 1.0, dtype)
            error = relative(our.gradients[name])
            sides.append(Side(implementation, error, plain_error, allowed, 0.0))
        between = relative(ours[0].gradients[name] - ours[1].gradients[name] + want)
        allowed = sides[0].tolerance + sides[1].tolerance
        rows.append(_row(dtype, f"d_{name}, relative", sides, between, allowed, 1.0))
    return rows


def _interpreted_rows(adapter: Adapter, pairs: list[tuple[str, str]]) -> list[Row]:
    """The kernels inside the model: interpreted they take seconds, so in one of its projections."""
    batch = minilm.batch(pairs)
    projection = minilm.projection_names()[0]
    exact = minilm_torch.evaluate(_dense(adapter, "cpu"), batch, False)
    plain = _both("plain", adapter, "float32", "cpu", PLAIN_NAMES, batch, False)
    kernels = ({projection: KERNEL_NAMES[0]}, {projection: KERNEL_NAMES[1]})
    with interpreted():
        ours = _both("dora", adapter, "float32", "cpu", kernels, batch, False)
    return evaluation_rows("float32", KERNEL_NAMES, exact, ours, plain)


def _row(
    dtype: str, quantity: str, sides: list[Side], difference: float, allowed: float, peak: float
) -> Row:
    return Row(
        case=CASE,
        level="encoder",
        dtype=dtype,
        quantity=quantity,
        jax=sides[0],
        torch=sides[1],
        difference=difference,
        difference_tolerance=allowed,
        peak=float(peak),
    )


def _cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """`1 - cosine` of the worst pair, as `|a - b|² / 2` of unit vectors, which does not cancel."""
    a, b = (v / v.norm(dim=-1, keepdim=True) for v in (a, b))
    return float(((a - b) ** 2).sum(-1).max() / 2)


Implementation = str | dict[str, str]  # of all projections, or of those named


def _both(
    kind: str,
    adapter: Adapter,
    dtype: str,
    device: str,
    implementations: tuple[Implementation, Implementation],
    batch: minilm.Batch,
    gradients: bool,
) -> tuple[Evaluation, Evaluation]:
    """The batch in JAX and in torch."""
    ours = _jax(kind, adapter, dtype, implementations[0])
    theirs = _torch(kind, adapter, dtype, device, implementations[1])
    return (
        minilm_jax.evaluate(ours, batch, gradients),
        minilm_torch.evaluate(theirs, batch, gradients),
    )


def _jax(kind: str, adapter: Adapter, dtype: str, implementation: Implementation):
    return minilm_jax.adapted(kind, adapter, dtype, _by_projection(implementation))


def _torch(kind: str, adapter: Adapter, dtype: str, device: str, implementation: Implementation):
    names = _by_projection(implementation)
    return minilm_torch.adapted(kind, adapter, getattr(torch, dtype), device, names)


def _by_projection(implementation: Implementation) -> dict[str, str]:
    if isinstance(implementation, str):
        return dict.fromkeys(minilm.projection_names(), implementation)
    return implementation


def _dense(adapter: Adapter, device: str, stored: str = "float32"):
    """The dense fp64 encoder, of weights that were rounded to `stored`."""
    rounded = getattr(torch, stored)
    return minilm_torch.adapted("dense", adapter, torch.float64, device, {}, rounded)


def _g(adapter: Adapter) -> np.ndarray:
    """All projections' g, by the oracle."""
    parts = []
    for name, values in adapter.items():
        lora_a, lora_b, magnitude = (values[key].numpy() for key in minilm_torch.ADAPTER)
        weight = minilm.weights()[f"{name}.weight"]
        norm = oracle.norm(weight, lora_a, lora_b, minilm.SCALE)
        parts.append(oracle.magnitude_scale(magnitude, norm, "float32"))
    return np.concatenate(parts)


def _plot(
    before: np.ndarray, after: np.ndarray, losses: dict[str, list[float]], path: Path
) -> None:
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
    limit = max(np.abs(after - 1).max(), np.abs(before - 1).max())
    bins = 1 + np.linspace(-limit, limit, 81)
    left.hist(after, bins, label="after training", color="tab:blue")
    left.hist(before, bins, label="before", color="tab:orange", alpha=0.6)
    left.set(xlabel="g = m / ‖W + sBA‖", ylabel="output features", yscale="log")
    left.set_title(f"g in the {len(minilm.projection_names())} adapted projections")
    left.legend(frameon=False)
    right.plot(losses["JAX"], "-", label="JAX")
    right.plot(losses["torch"], "--", label="torch")
    right.plot(losses["fp64"], ":", color="black", label="dense fp64")
    right.set(xlabel="step", ylabel="loss", title="training the adapter, fp32")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)
