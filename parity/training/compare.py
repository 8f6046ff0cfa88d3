"""Two runs from the same state on the same batches, and how far they came apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity import tolerances
from parity.training.adapter import Adapter, flat
from parity.training.run import Run


@dataclass(frozen=True)
class Limits:
    """The largest mean and single |Δloss| over the steps, and |Δ| of the final evaluation."""

    mean: float
    worst: float
    final: float


PAPER = Limits(
    tolerances.TRAINING_MEAN_LOSS_DIFFERENCE,
    tolerances.TRAINING_WORST_LOSS_DIFFERENCE,
    tolerances.TRAINING_FINAL_EVAL_DIFFERENCE,
)
# Of fp32 base weights and activations.
FULL_PRECISION = Limits(
    tolerances.TRAINING_FP32_MEAN_LOSS_DIFFERENCE,
    tolerances.TRAINING_FP32_WORST_LOSS_DIFFERENCE,
    tolerances.TRAINING_FP32_FINAL_EVAL_DIFFERENCE,
)


@dataclass(frozen=True)
class Difference:
    """The difference of two runs; losses in nats.

    Attributes:
      mean, worst, final: of |Δloss| over the steps, and of the evaluation after the last.
      worst_step: where `worst` is, counted from 1.
      gradient_norm_median, gradient_norm_worst: of the gradient norms' relative difference.
      drift: ‖a - b‖ between the final adapters,
      travelled: and the longer of their distances from the initial adapter.
      finite: every loss and gradient norm is a number.
    """

    mean: float
    worst: float
    worst_step: int
    final: float
    gradient_norm_median: float
    gradient_norm_worst: float
    drift: float
    travelled: float
    finite: bool

    def verdicts(self, limits: Limits) -> list[bool]:
        """Returns whether mean, worst and final are each within their limit."""
        figures = (self.mean, self.worst, self.final)
        allowed = (limits.mean, limits.worst, limits.final)
        return [self.finite and f <= a for f, a in zip(figures, allowed, strict=True)]

    def within(self, limits: Limits) -> bool:
        return all(self.verdicts(limits))


def compare(one: Run, other: Run, start: Adapter) -> Difference:
    """`start` is the adapter that both began with."""
    apart = np.abs(one.losses - other.losses)
    norms = np.abs(one.gradient_norms - other.gradient_norms)
    norms = norms / np.maximum(np.maximum(one.gradient_norms, other.gradient_norms), 1e-30)
    initial, a, b = (flat(adapter) for adapter in (start, one.adapter, other.adapter))
    numbers = np.concatenate([one.losses, other.losses, norms])
    return Difference(
        mean=float(apart.mean()),
        worst=float(apart.max()),
        worst_step=int(apart.argmax()) + 1,
        final=abs(one.eval_after - other.eval_after),
        gradient_norm_median=float(np.median(norms)),
        gradient_norm_worst=float(norms.max()),
        drift=float(np.linalg.norm(a - b)),
        travelled=max(float(np.linalg.norm(end - initial)) for end in (a, b)),
        finite=bool(np.isfinite(numbers).all()),
    )
