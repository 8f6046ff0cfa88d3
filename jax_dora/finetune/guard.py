"""Reasons to stop: a loss that diverges, a person who interrupts."""

import math
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

from jax_dora.finetune.training import Metrics


class DivergedError(RuntimeError):
    """Training went wrong in a way that going on cannot fix."""


class LossGuard:
    """Stops when something is not finite, or the loss is far above its running mean.

    Attributes:
      mean: of the losses so far, of which the last counts a tenth; None before the first.
    """

    # Batches differ: a loss three times the mean is rare where the mean is 2, and common where it
    # is 0.01, so that the distance has to be two nats as well.
    FACTOR, DISTANCE, MEMORY = 3.0, 2.0, 0.9

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def check(self, step: int, metrics: Metrics, base_loss: Callable[[], float]) -> None:
        """Takes the loss into the mean; `base_loss` is that of the same rows without the adapter,
        for the message."""
        loss = float(metrics.loss)
        if not metrics.finite:
            wrong = "the gradient or the updated adapter" if math.isfinite(loss) else "the loss"
            base = base_loss()
            told = f"the base model's own loss on the same rows is {base:.4g}"
            if not math.isfinite(base):
                told += ", not finite either: check its weights, or pass --dtype float32"
            raise DivergedError(
                f"step {step}: {wrong} is not finite (loss {loss:.4g}, gradient norm "
                f"{float(metrics.gradient_norm):.4g}); {told}"
            )
        if self.mean is not None:
            limit = max(self.FACTOR * self.mean, self.mean + self.DISTANCE)
            if loss > limit:
                raise DivergedError(
                    f"step {step}: the loss is {loss:.4g}, over {limit:.4g} where it was "
                    f"{self.mean:.4g} on average"
                )
        last = 1 - self.MEMORY
        self.mean = loss if self.mean is None else self.MEMORY * self.mean + last * loss


class Interruption:
    """While it lasts, the first Ctrl-C (or SIGTERM) only asks; a second one interrupts."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    TOLD = b"\nFinishing the step, then saving; once more to stop at once.\n"

    def __enter__(self) -> Self:
        self.requested = False
        self._before = {one: signal.signal(one, self._ask) for one in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        # Past every lock that printing may hold at this moment.
        os.write(2, self.TOLD)

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
