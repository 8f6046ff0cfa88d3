"""Distances between the results of two systems. All sums are in fp64, on the device of the
results."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.model.weights import Result

ROWS = 64  # rows of logits that are converted to fp64 at a time


@dataclass(frozen=True)
class Distance:
    """The distance between a tensor and a reference.

    Attributes:
      cosine: 1 - cosine of the angle.
      relative: ‖a - b‖ / ‖b‖.
      peak: max |a - b|.
    """

    cosine: float
    relative: float
    peak: float


@dataclass(frozen=True)
class LogitsDistance(Distance):
    """The distance between all logits as one vector.

    Attributes:
      top1: the share of tokens with the same largest logit.
      kl_mean, kl_max: KL(second ‖ first) per token, in nats.
    """

    top1: float
    kl_mean: float
    kl_max: float


@dataclass(frozen=True)
class Pair(LogitsDistance):
    """The distance between two systems' logits and gradients.

    Attributes:
      gradients: by names such as "self_attn.q_proj.lora_a", all layers in one vector; empty if one
        of the two systems has none.
      adapter: all gradients in one vector.
    """

    adapter: Distance | None
    gradients: dict[str, Distance]


def measure(parts: Iterable[tuple[Tensor, Tensor]]) -> Distance:
    """Returns the distance between two vectors given in parts, of which only one part at a time is
    in fp64."""
    sums, peaks = [], []
    for first, second in parts:
        if first.shape != second.shape:
            raise ValueError(f"results of shapes {tuple(first.shape)} and {tuple(second.shape)}")
        a, b = first.double(), second.double()
        difference = a - b
        sums.append(torch.stack([(v * v).sum() for v in (a, b, difference)]))
        peaks.append(difference.abs().max())
    aa, bb, dd = torch.stack(sums).sum(0).tolist()
    peak, a, b = torch.stack(peaks).max().item(), aa**0.5, bb**0.5
    if not a * b:
        return Distance(float("nan"), float("nan"), peak)
    # 1 - a·b / (‖a‖‖b‖), computed without cancellation.
    cosine = max(0.0, dd - (a - b) ** 2) / (2 * a * b) if dd == dd else dd
    return Distance(cosine, (dd / bb) ** 0.5, peak)


def compare(a: Result, b: Result) -> Pair:
    kinds = {
        kind: list(zip(a.gradients[kind], b.gradients[kind], strict=True))
        for kind in sorted(a.gradients.keys() & b.gradients.keys())
    }
    adapter = measure(part for parts in kinds.values() for part in parts) if kinds else None
    gradients = {kind: measure(parts) for kind, parts in kinds.items()}
    logits = vars(compare_logits(a.logits, b.logits))
    return Pair(**logits, adapter=adapter, gradients=gradients)


def compare_logits(a: Tensor, b: Tensor) -> LogitsDistance:
    rows = list(zip(a.split(ROWS), b.split(ROWS), strict=True))
    same, divergences = [], []
    for first, second in rows:
        same.append((first.argmax(-1) == second.argmax(-1)).double())
        log_p, log_q = second.double().log_softmax(-1), first.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    kl, top1 = torch.cat(divergences), torch.cat(same).mean().item()
    distance, kl_mean, kl_max = measure(rows), kl.mean().item(), kl.max().item()
    return LogitsDistance(**vars(distance), top1=top1, kl_mean=kl_mean, kl_max=kl_max)
