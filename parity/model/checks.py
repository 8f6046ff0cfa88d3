"""The checks of a run's results; the tolerances are `parity.tolerances`'s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parity import tolerances
from parity.model.execute import BASES, FP64, FP64_BASE, PEFT, side_of
from parity.model.measure import Distance, Pair, compare
from parity.model.sizes import Run
from parity.model.weights import Result


@dataclass(frozen=True)
class Check:
    """`value` may be at most `allowed`; `note` says what is worth knowing beside it."""

    systems: str
    quantity: str
    value: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.allowed  # not so where it is NaN


def judge(run: Run, results: Mapping[str, Result]) -> tuple[list[Pair], list[Check]]:
    """Returns every pair of the systems that have a result, and what they must satisfy."""
    pairs = _Pairs(results)
    return list(pairs.found.values()), [*_agreement(run, pairs), *_nearness(run, pairs)]


class _Pairs:
    """Compares every pair of adapted systems, each with fp64, and the same of the unadapted
    ones."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self.adapted = [name for name in results if name not in (FP64, FP64_BASE, *BASES)]
        self.ours = [name for name in self.adapted if name != PEFT]
        wanted = [(FP64, FP64_BASE)]
        bases = [name for name in BASES if name in results]
        for reference, systems in ((FP64, self.adapted), (FP64_BASE, bases)):
            wanted += itertools.combinations(systems, 2)
            wanted += [(name, reference) for name in systems]
        self.found = {
            (first, second): compare(first, results[first], second, results[second])
            for first, second in wanted
            if first in results and second in results
        }

    def get(self, first: str, second: str) -> Pair | None:
        return self.found.get((first, second))

    def logits(self, first: str, second: str) -> Distance | None:
        pair = self.get(first, second)
        return None if pair is None else pair.logits.distance


def _agreement(run: Run, pairs: _Pairs) -> Iterator[Check]:
    """The systems with each other."""
    base = pairs.logits(*BASES)
    control = 0.0 if base is None else base.cosine
    allowed = tolerances.model_cosine_distance(run.dtype, control)
    goal = 1 - tolerances.COSINE[run.dtype]
    for first, second in itertools.combinations(pairs.adapted, 2):
        found = pairs.logits(first, second)
        assert found is not None
        met = "met" if found.cosine <= goal else "not met"
        note = f"goal {goal:.0e} {met}; without adapters jax and torch {control:.1e}"
        systems = f"{first}, {second}"
        yield Check(systems, "logits, 1 - cosine", found.cosine, allowed, note)
    effect = pairs.logits(FP64, FP64_BASE)
    if effect is not None:
        yield Check(
            "fp64",
            "allowed 1 - cosine, in units of what the adapter changes",
            allowed / effect.cosine,
            tolerances.MODEL_RESOLUTION,
            f"the adapter changes the logits by 1 - cosine = {effect.cosine:.1e}",
        )


def _nearness(run: Run, pairs: _Pairs) -> Iterator[Check]:
    """Ours against fp64, beside PEFT."""
    peft = pairs.get(PEFT, FP64)
    if peft is None or peft.adapter is None:
        return
    allowed_adapter: dict[str, float] = {}
    for name in pairs.ours:
        found = pairs.get(name, FP64)
        if found is None or found.adapter is None:
            continue
        own = _framework_factor(pairs, name)
        nearness = tolerances.MODEL_NEARNESS[run.dtype] * own
        allowed_adapter[name] = nearness * peft.adapter.relative

        def check(quantity, ours, theirs, allowed, name=name, own=own):
            note = f"PEFT {theirs.relative:.2e}, framework × {own:.2f}"
            return Check(f"{name}, fp64", f"{quantity}, relative", ours.relative, allowed, note)

        ours, theirs = found.logits.distance, peft.logits.distance
        yield check("logits", ours, theirs, nearness * theirs.relative)
        yield check("adapter's gradient", found.adapter, peft.adapter, allowed_adapter[name])
        for kind, distance in found.gradients.items():
            theirs = peft.gradients[kind]
            allowed = own * tolerances.flash_rule(theirs.relative, 1.0, run.dtype)
            yield check(f"gradient of {kind}", distance, theirs, allowed)
    for first, second in itertools.combinations(allowed_adapter, 2):
        pair = pairs.get(first, second)
        assert pair is not None
        assert pair.adapter is not None
        allowed = allowed_adapter[first] + allowed_adapter[second]
        quantity = "adapter's gradient, relative"
        yield Check(f"{first}, {second}", quantity, pair.adapter.relative, allowed)


def _framework_factor(pairs: _Pairs, name: str) -> float:
    """Returns how much further from fp64 the framework's unadapted model is than torch's, or 1."""
    own, torch = (pairs.logits(b, FP64_BASE) for b in (f"{side_of(name)} base", "torch base"))
    if own is None or torch is None or not torch.relative:
        return 1.0
    return max(1.0, own.relative / torch.relative)
