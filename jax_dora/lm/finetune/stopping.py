"""Decides when training has to stop: when the loss diverges, or on Ctrl-C."""

import math
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from jax_dora.lm.finetune.training import Metrics


class DivergedError(RuntimeError):
    """Raised when the loss or the adapter has diverged, so that more steps would not help."""


class DivergenceCheck:
    """Raises an error when a value is not finite, or the loss is far above its running mean.

    Attributes:
      mean: the exponential running mean of the losses, in which the latest loss has weight 0.1;
        None before the first loss.
    """

    # Losses of different batches vary. A loss of three times the mean is rare if the mean is 2, but
    # common if the mean is 0.01. So the loss also has to exceed the mean by two nats.
    FACTOR, DISTANCE, DECAY = 3.0, 2.0, 0.9

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def check(self, step: int, metrics: Metrics, base_loss: Callable[[], float]) -> None:
        """Checks the metrics of a step and updates the mean.

        Args:
          step: the number of the step, for the error message.
          metrics: the metrics of the step.
          base_loss: returns the loss of the base model on the same rows, for the error message.

        Raises:
          DivergedError: the loss, the gradient or the adapter is not finite, or the loss is too
          high.
        """
        loss = float(metrics.loss)
        if not metrics.finite:
            subject = "the gradient or the updated adapter" if math.isfinite(loss) else "the loss"
            base = base_loss()
            base_message = f"the base model's own loss on the same rows is {base:.4g}"
            if not math.isfinite(base):
                base_message += ", not finite either: check its weights, or pass dtype=float32"
            raise DivergedError(
                f"step {step}: {subject} is not finite (loss {loss:.4g}, gradient norm "
                f"{float(metrics.gradient_norm):.4g}); {base_message}"
            )
        if self.mean is not None:
            limit = max(self.FACTOR * self.mean, self.mean + self.DISTANCE)
            if loss > limit:
                raise DivergedError(
                    f"step {step}: the loss has diverged: it is {loss:.4g}, above the limit of "
                    f"{limit:.4g}, and its running mean was {self.mean:.4g}"
                )
        new = 1 - self.DECAY
        self.mean = loss if self.mean is None else self.DECAY * self.mean + new * loss


class Interruption:
    """A context in which the first Ctrl-C (or SIGTERM) only sets `requested`.

    The second one interrupts as usual.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    MESSAGE = b"\nFinishing the current step and saving. Press Ctrl-C again to stop at once.\n"

    def __enter__(self) -> Self:
        self.requested = False
        # Only the main thread can set handlers.
        is_main = threading.current_thread() is threading.main_thread()
        signals = self.SIGNALS if is_main else ()
        self._handlers = {one: signal.signal(one, self._request) for one in signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore_handlers()
        # Unlike print, os.write cannot wait for a lock that the interrupted code holds.
        os.write(2, self.MESSAGE)

    def _restore_handlers(self) -> None:
        for one, handler in self._handlers.items():
            signal.signal(one, handler)
