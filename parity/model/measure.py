"""How far two systems' results lie apart; all sums in fp64, on the device of the results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.model.weights import Result

ROWS = 64  # of logits, in fp64 at a time


@dataclass(frozen=True)
class Distance:
    """Between two tensors, the second of which is the one to compare with.

    Attributes:
      cosine: 1 - cosine of the angle.
      relative: ‖a - b‖ / ‖b‖.
      peak: max |a - b|.
    """

    cosine: float
    relative: float
    peak: float


@dataclass(frozen=True)
class LogitsDistance:
    """Attributes:
    distance: of all logits as one vector.
    top1: share of the tokens whose largest logit is the same.
    kl_mean, kl_max: KL(second ‖ first) per token, in nats.
    """

    distance: Distance
    top1: float
    kl_mean: float
    kl_max: float


@dataclass(frozen=True)
class Pair:
    """Two systems' results side by side.

    Attributes:
      gradients: by "q_proj.lora_a" and the like, all layers' in one vector; empty where one of the
        two has none.
      adapter: all of them in one vector.
    """

    first: str
    second: str
    logits: LogitsDistance
    gradients: dict[str, Distance]
    adapter: Distance | None


class _Sums:
    """‖a‖², ‖b‖², ‖a - b‖² and max |a - b| of what was added."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._peak: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        a, b = a.double(), b.double()
        if a.shape != b.shape:
            raise ValueError(f"results of shapes {tuple(a.shape)} and {tuple(b.shape)}")
        difference = a - b
        sums = torch.stack([(a * a).sum(), (b * b).sum(), (difference * difference).sum()])
        peak = difference.abs().max()
        self._sums = sums if self._sums is None else self._sums + sums
        self._peak = peak if self._peak is None else torch.maximum(self._peak, peak)

    def merge(self, other: _Sums) -> None:
        if other._sums is not None and other._peak is not None:
            self._sums = other._sums if self._sums is None else self._sums + other._sums
            self._peak = (
                other._peak if self._peak is None else torch.maximum(self._peak, other._peak)
            )

    def distance(self) -> Distance:
        assert self._sums is not None
        assert self._peak is not None
        aa, bb, dd = self._sums.tolist()
        a, b = aa**0.5, bb**0.5
        if not a * b:
            return Distance(float("nan"), float("nan"), self._peak.item())
        # 1 - a·b / (‖a‖‖b‖), without taking the cosine from 1.
        cosine = max(0.0, dd - (a - b) ** 2) / (2 * a * b) if dd == dd else dd
        return Distance(cosine, (dd / bb) ** 0.5, self._peak.item())


def compare(first: str, a: Result, second: str, b: Result) -> Pair:
    gradients: dict[str, Distance] = {}
    whole = _Sums()
    for kind in a.gradients.keys() & b.gradients.keys():
        sums = _Sums()
        for one, other in zip(a.gradients[kind], b.gradients[kind], strict=True):
            sums.add(one, other)
        gradients[kind] = sums.distance()
        whole.merge(sums)
    return Pair(
        first,
        second,
        compare_logits(a.logits, b.logits),
        dict(sorted(gradients.items())),
        whole.distance() if gradients else None,
    )


def compare_logits(a: Tensor, b: Tensor) -> LogitsDistance:
    sums = _Sums()
    same, divergences = [], []
    for one, other in zip(a.split(ROWS), b.split(ROWS), strict=True):
        sums.add(one, other)
        same.append((one.argmax(-1) == other.argmax(-1)).double())
        log_p, log_q = other.double().log_softmax(-1), one.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    kl = torch.cat(divergences)
    return LogitsDistance(
        sums.distance(), torch.cat(same).mean().item(), kl.mean().item(), kl.max().item()
    )
