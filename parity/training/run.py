"""The results of one run, and their file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.training import adapter as adapters
from parity.training.adapter import Adapter


@dataclass
class Run:
    """
    Attributes:
      losses: f64[steps], the batch's mean cross-entropy in nats before each step.
      gradient_norms: f64[steps], over all adapters.
      eval_before, eval_after: mean cross-entropy of the held-out rows.
      adapter: after the last step.
      seconds: wall time of the steps, compilation included.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    eval_before: float
    eval_after: float
    adapter: Adapter
    seconds: float

    def save(self, file: Path) -> None:
        arrays: dict[str, Any] = {
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "evals": np.array([self.eval_before, self.eval_after]),
            "seconds": np.array(self.seconds),
        }
        for projection, one in self.adapter.items():
            arrays |= {f"{projection}/{name}": array for name, array in one.items()}
        np.savez(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> Run:
        with np.load(file) as stored:
            arrays = dict(stored)
        adapter: Adapter = {}
        for name in [name for name in arrays if name.endswith(adapters.NAMES)]:
            projection, _, leaf = name.partition("/")
            adapter.setdefault(projection, {})[leaf] = arrays[name]
        before, after = map(float, arrays["evals"])
        return cls(
            arrays["losses"],
            arrays["gradient_norms"],
            before,
            after,
            adapter,
            float(arrays["seconds"]),
        )
