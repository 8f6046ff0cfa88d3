"""The checks of a run's results; the tolerances are `parity.tolerances`'s."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from parity import tolerances
from parity.model.execute import BASES, FP64, FP64_BASE, PEFT, side_of
from parity.model.measure import Pair, compare
from parity.model.sizes import Run
from parity.model.weights import Result
from parity.report import Report


def judge(report: Report, run: Run, results: Mapping[str, Result]) -> None:
    """Adds what the systems that have results must satisfy; and, judging nothing, how far each pair
    of adapted systems is apart, each of them from fp64, and the same of the unadapted ones."""
    adapted = [name for name in results if name not in (FP64, FP64_BASE, *BASES)]
    wanted = [(FP64, FP64_BASE)]
    for reference, systems in ((FP64, adapted), (FP64_BASE, BASES)):
        wanted += itertools.combinations(systems, 2)
        wanted += [(name, reference) for name in systems]
    pairs = {
        (first, second): compare(results[first], results[second])
        for first, second in wanted
        if first in results and second in results
    }
    for systems, quantity, value, allowed, *note in (
        *_agreement(run, pairs, adapted),
        *_nearness(run, pairs, adapted),
    ):
        told = {"note": note[0]} if note else {}
        ok = value <= allowed  # not so where it is NaN
        report.add(run.name, quantity, side=systems, error=value, bound=allowed, ok=ok, **told)
    for (first, second), pair in pairs.items():
        found = {k: v for k, v in dataclasses.asdict(pair).items() if v not in (None, {})}
        report.add(run.name, "distance", side=f"{first}, {second}", **found)


# The systems, the quantity, its value, the most that it may be, and what is worth knowing beside.
_Check = tuple[str, str, float, float] | tuple[str, str, float, float, str]
_Pairs = Mapping[tuple[str, str], Pair]


def _agreement(run: Run, pairs: _Pairs, adapted: Sequence[str]) -> Iterator[_Check]:
    """Yields the checks of the systems with each other."""
    control = pairs[BASES].cosine if BASES in pairs else 0.0
    allowed = tolerances.caps.model_cosine_distance(run.dtype, control)
    goal = 1 - tolerances.caps.COSINE[run.dtype]
    for first, second in itertools.combinations(adapted, 2):
        cosine = pairs[first, second].cosine
        met = "met" if cosine <= goal else "not met"
        note = f"goal {goal:.0e} {met}; without adapters jax and torch {control:.1e}"
        yield (f"{first}, {second}", "logits, 1 - cosine", cosine, allowed, note)
    if (FP64, FP64_BASE) in pairs:
        effect = pairs[FP64, FP64_BASE].cosine
        quantity = "allowed 1 - cosine, in units of what the adapter changes"
        note = f"the adapter changes the logits by 1 - cosine = {effect:.1e}"
        yield (FP64, quantity, allowed / effect, tolerances.caps.MODEL_RESOLUTION, note)


def _nearness(run: Run, pairs: _Pairs, adapted: Sequence[str]) -> Iterator[_Check]:
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
            yield (f"{name}, fp64", f"{quantity}, relative", ours.relative, allowed, note)
    for first, second in itertools.combinations(allowed_adapter, 2):
        apart = pairs[first, second].adapter
        assert apart is not None
        allowed = allowed_adapter[first] + allowed_adapter[second]
        quantity = "adapter's gradient, relative"
        yield (f"{first}, {second}", quantity, apart.relative, allowed)


def _framework_factor(pairs: _Pairs, name: str) -> float:
    """Returns how much further from fp64 the framework's unadapted model is than torch's, or 1."""
    own, torch = (pairs.get((b, FP64_BASE)) for b in (f"{side_of(name)} base", "torch base"))
    if own is None or torch is None or not torch.relative:
        return 1.0
    return max(1.0, own.relative / torch.relative)
