"""The checks of a run's results; the tolerances are `parity.tolerances`'s."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from parity import tolerances
from parity.model.measure import Pair, compare
from parity.model.sizes import Run
from parity.model.weights import Result
from parity.report import Report

FP64, FP64_BASE, PEFT = "fp64", "fp64 base", "torch peft"
BASES = ("torch base", "jax base")


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

    def check(systems: str, quantity: str, value: float, allowed: float, **note: str) -> None:
        ok = value <= allowed  # not so where it is NaN
        report.add(run.name, quantity, side=systems, error=value, bound=allowed, ok=ok, **note)

    _check_agreement(check, run, pairs, adapted)
    _check_nearness(check, run, pairs, adapted)
    for (first, second), pair in pairs.items():
        found = {k: v for k, v in dataclasses.asdict(pair).items() if v not in (None, {})}
        report.add(run.name, "distance", side=f"{first}, {second}", **found)


# Adds a check of systems: the quantity, its value, the most that it may be, and a note.
_Check = Callable[..., None]
_Pairs = Mapping[tuple[str, str], Pair]


def _check_agreement(check: _Check, run: Run, pairs: _Pairs, adapted: Sequence[str]) -> None:
    """Checks the systems against each other."""
    control = pairs[BASES].cosine if BASES in pairs else 0.0
    allowed = tolerances.caps.model_cosine_distance(run.dtype, control)
    goal = 1 - tolerances.caps.COSINE[run.dtype]
    for first, second in itertools.combinations(adapted, 2):
        cosine = pairs[first, second].cosine
        met = "met" if cosine <= goal else "not met"
        note = f"goal {goal:.0e} {met}; without adapters jax and torch {control:.1e}"
        check(f"{first}, {second}", "logits, 1 - cosine", cosine, allowed, note=note)
    if (FP64, FP64_BASE) in pairs:
        effect = pairs[FP64, FP64_BASE].cosine
        quantity = "allowed 1 - cosine, in units of what the adapter changes"
        note = f"the adapter changes the logits by 1 - cosine = {effect:.1e}"
        check(FP64, quantity, allowed / effect, tolerances.caps.MODEL_RESOLUTION, note=note)


def _check_nearness(check: _Check, run: Run, pairs: _Pairs, adapted: Sequence[str]) -> None:
    """Checks ours against fp64, beside PEFT."""
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
        beside = [
            ("logits", found, peft, nearness * peft.relative),
            ("adapter's gradient", found.adapter, peft.adapter, allowed_adapter[name]),
        ]
        for kind, distance in found.gradients.items():
            theirs = peft.gradients[kind]
            allowed = own * tolerances.flash_rule(theirs.relative, 1.0, run.dtype)
            beside.append((f"gradient of {kind}", distance, theirs, allowed))
        for quantity, ours, theirs, allowed in beside:
            note = f"PEFT {theirs.relative:.2e}, framework × {own:.2f}"
            check(f"{name}, fp64", f"{quantity}, relative", ours.relative, allowed, note=note)
    for first, second in itertools.combinations(allowed_adapter, 2):
        apart = pairs[first, second].adapter
        assert apart is not None
        allowed = allowed_adapter[first] + allowed_adapter[second]
        check(f"{first}, {second}", "adapter's gradient, relative", apart.relative, allowed)


def _framework_factor(pairs: _Pairs, name: str) -> float:
    """Returns how much further from fp64 the framework's unadapted model is than torch's, or 1."""
    side = name.partition(" ")[0]
    own, torch = (pairs.get((base, FP64_BASE)) for base in (f"{side} base", "torch base"))
    if own is None or torch is None or not torch.relative:
        return 1.0
    return max(1.0, own.relative / torch.relative)
