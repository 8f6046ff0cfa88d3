"""The settings of a training run, the same for both frameworks: model, text and hyperparameters."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from parity.model.sizes import Sizes


@dataclass(frozen=True)
class Settings(Sizes):
    """A byte-level decoder of the Qwen3 type, its adapter, and the training run.

    Rank, alpha and the number of steps are the paper's (arXiv 2603.22276). The model is small
    enough that 2,000 steps with three seeds and four implementations take minutes, and wide enough
    that `jax_dora` chooses the fused norm in five of seven projections. Its sizes are multiples of
    64, which every kernel accepts.

    Attributes:
      dtype: of the base weights and activations; adapters and optimizer states are fp32.
      length: the number of predicted bytes per row. A step predicts rows · length bytes, and the
        bf16 rounding errors of single logits average out over them.
      learning_rate: the peak. At 1e-4, two runs of one framework whose initial adapters differ by
        one unit in the last place end 1.8e-4 apart in the final evaluation, more than the paper's
        tolerance.
      base_steps: the steps of pre-training, which creates the base model.
      eval_rows: rows of held-out text in the final evaluation.
      lora_b_deviation: of the initial lora_b; 0 is a fresh adapter.
    """

    hidden: int = 1024
    intermediate: int = 2048
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 256
    rank: int = 384
    alpha: int = 192
    rope_theta: float = 10_000.0
    layers: int = 3
    dtype: str = "bfloat16"
    length: int = 256
    rows: int = 16
    steps: int = 2000
    warmup: int = 100
    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    base_steps: int = 600
    base_learning_rate: float = 1e-3
    eval_rows: int = 1024
    lora_b_deviation: float = 0.0

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """Returns settings for a run that takes seconds on a CPU."""
        sizes = cls(64, 128, 4, 2, 16, rank=24, alpha=12, layers=2)
        run = replace(sizes, length=64, rows=8, steps=40, warmup=5, eval_rows=64)
        return replace(replace(run, base_steps=50, base_learning_rate=3e-3), **changes)

    def learning_rates(self) -> np.ndarray:
        """Returns f64[steps]: a linear warmup from 1/warmup of the peak, then half a cosine down to
        0."""
        return schedule(self.steps, self.warmup, self.learning_rate)


def schedule(steps: int, warmup: int, peak: float) -> np.ndarray:
    """Returns the learning rates, f64[steps]; that of the last step is slightly above 0."""
    step = np.arange(steps)
    warmup = min(warmup, steps - 1)
    rise = (step + 1) / max(warmup, 1)
    fall = 0.5 * (1 + np.cos(np.pi * (step - warmup) / (steps - warmup)))
    return peak * np.where(step < warmup, rise, fall)
