"""The checks of a run's results; the tolerances are `parity.tolerances`'s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parity import tolerances
from parity.model.execute import BASES, FP64, FP64_BASE, PEFT, side_of
from parity.model.measure import Pair, compare
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
    """Returns every pair of adapted systems, each of them with fp64, and the same of the unadapted
    ones, as far as they have results; and what the pairs must satisfy."""
    adapted = [name for name in results if name not in (FP64, FP64_BASE, *BASES)]
    wanted = [(FP64, FP64_BASE)]
    for reference, systems in ((FP64, adapted), (FP64_BASE, BASES)):
        wanted += itertools.combinations(systems, 2)
        wanted += [(name, reference) for name in systems]
    pairs = {
        (first, second): compare(first, results[first], second, results[second])
        for first, second in wanted
        if first in results and second in results
    }
    checks = [*_agreement(run, pairs, adapted), *_nearness(run, pairs, adapted)]
    return list(pairs.values()), checks


_Pairs = Mapping[tuple[str, str], Pair]


def _agreement(run: Run, pairs: _Pairs, adapted: Sequence[str]) -> Iterator[Check]:
    """Yields the checks of the systems with each other."""
    control = pairs[BASES].cosine if BASES in pairs else 0.0
    allowed = tolerances.caps.model_cosine_distance(run.dtype, control)
    goal = 1 - tolerances.caps.COSINE[run.dtype]
    for first, second in itertools.combinations(adapted, 2):
        cosine = pairs[first, second].cosine
        met = "met" if cosine <= goal else "not met"
        note = f"goal {goal:.0e} {met}; without adapters jax and torch {control:.1e}"
        yield Check(f"{first}, {second}", "logits, 1 - cosine", cosine, allowed, note)
    if (FP64, FP64_BASE) in pairs:
        effect = pairs[FP64, FP64_BASE].cosine
        quantity = "allowed 1 - cosine, in units of what the adapter changes"
        note = f"the adapter changes the logits by 1 - cosine = {effect:.1e}"
        yield Check(FP64, quantity, allowed / effect, tolerances.caps.MODEL_RESOLUTION, note)


def _nearness(run: Run, pairs: _Pairs, adapted: Sequence[str]) -> Iterator[Check]:
    """Ours against fp64, beside PEFT."""
    peft = pairs.get((PEFT, FP64))
    if peft is None or peft.adapter is None:
        return
    allowed_adapter: dict[str, float] = {}
    for name in adapted:
        found = pairs.get((name, FP64))
        if name == PEFT or found is None or found.adapter is None:
            continue
        own = _framework_factor(pairs, name)
        nearness = tolerances.caps.MODEL_NEARNESS[run.dtype] * own
        allowed_adapter[name] = nearness * peft.adapter.relative
        checks = [
            ("logits", found, peft, nearness * peft.relative),
            ("adapter's gradient", found.adapter, peft.adapter, allowed_adapter[name]),
        ]
        for kind, distance in found.gradients.items():
            theirs = peft.gradients[kind]
            allowed = own * tolerances.flash_rule(theirs.relative, 1.0, run.dtype)
            checks.append((f"gradient of {kind}", distance, theirs, allowed))
        for quantity, ours, theirs, allowed in checks:
            note = f"PEFT {theirs.relative:.2e}, framework × {own:.2f}"
            yield Check(f"{name}, fp64", f"{quantity}, relative", ours.relative, allowed, note)
    for first, second in itertools.combinations(allowed_adapter, 2):
        apart = pairs[first, second].adapter
        assert apart is not None
        allowed = allowed_adapter[first] + allowed_adapter[second]
        quantity = "adapter's gradient, relative"
        yield Check(f"{first}, {second}", quantity, apart.relative, allowed)


def _framework_factor(pairs: _Pairs, name: str) -> float:
    """Returns how much further from fp64 the framework's unadapted model is than torch's, or 1."""
    own, torch = (pairs.get((b, FP64_BASE)) for b in (f"{side_of(name)} base", "torch base"))
    if own is None or torch is None or not torch.relative:
        return 1.0
    return max(1.0, own.relative / torch.relative)
