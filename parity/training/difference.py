"""Compares two runs that start from the same state and use the same batches."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parity import tolerances
from parity.training.adapter import Adapter, flatten


@dataclass
class Run:
    """The results of one run.

    Attributes:
      losses: f64[steps], the batch's mean cross-entropy in nats before each step.
      gradient_norms: f64[steps], over all adapters.
      eval_before, eval_after: mean cross-entropy of the held-out rows.
      adapter: the adapter after the last step.
      seconds: wall time of the steps, including compilation.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    eval_before: float
    eval_after: float
    adapter: Adapter
    seconds: float


class Figures(NamedTuple):
    """The mean and the largest |Δloss| over the steps, and the |Δ| of the final evaluation."""

    mean: float
    worst: float
    final: float


# The limits for these figures: the paper's, and those for fp32.
PAPER = Figures(
    tolerances.caps.TRAINING_MEAN_LOSS_DIFFERENCE,
    tolerances.caps.TRAINING_WORST_LOSS_DIFFERENCE,
    tolerances.caps.TRAINING_FINAL_EVAL_DIFFERENCE,
)
FULL_PRECISION = Figures(
    tolerances.caps.TRAINING_FP32_MEAN_LOSS_DIFFERENCE,
    tolerances.caps.TRAINING_FP32_WORST_LOSS_DIFFERENCE,
    tolerances.caps.TRAINING_FP32_FINAL_EVAL_DIFFERENCE,
)


@dataclass(frozen=True)
class Difference:
    """The difference between two runs.

    Attributes:
      figures: in nats; NaN if a loss or a gradient norm is not finite.
      worst_step: the step with the largest |Δloss|, counted from 1.
      gradient_norm_median, gradient_norm_worst: of the relative difference of the gradient norms.
      drift: ‖a - b‖ between the final adapters.
      travelled: the larger distance of a final adapter from the initial one.
    """

    figures: Figures
    worst_step: int
    gradient_norm_median: float
    gradient_norm_worst: float
    drift: float
    travelled: float

    def verdicts(self, limits: Figures) -> list[bool]:
        """Returns whether each figure is within its limit."""
        return [figure <= limit for figure, limit in zip(self.figures, limits, strict=True)]

    def within(self, limits: Figures) -> bool:
        return all(self.verdicts(limits))


def compare(first: Run, second: Run, start: Adapter) -> Difference:
    """Compares two runs that started with the adapter `start`."""
    losses = np.abs(first.losses - second.losses)
    norms = np.abs(first.gradient_norms - second.gradient_norms)
    norms = norms / np.maximum(np.maximum(first.gradient_norms, second.gradient_norms), 1e-30)
    initial, a, b = (flatten(adapter) for adapter in (start, first.adapter, second.adapter))
    figures = Figures(losses.mean(), losses.max(), abs(first.eval_after - second.eval_after))
    finite = np.isfinite(np.concatenate([first.losses, second.losses, norms])).all()
    return Difference(
        figures=Figures(*(float(figure) if finite else math.nan for figure in figures)),
        worst_step=int(losses.argmax()) + 1,
        gradient_norm_median=float(np.median(norms)),
        gradient_norm_worst=float(norms.max()),
        drift=float(np.linalg.norm(a - b)),
        travelled=max(float(np.linalg.norm(end - initial)) for end in (a, b)),
    )
