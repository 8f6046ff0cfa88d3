"""Judges the results of a run, with the tolerances of `parity.tolerances.caps`."""

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
    """Adds to the report the checks of all systems that have results, and the measured distances:
    between each pair of adapted systems and from each to fp64, and the same for the unadapted
    systems."""
    adapted = [name for name in results if name not in (FP64, FP64_BASE, *BASES)]
    compared = [(FP64, FP64_BASE)]
    for reference, systems in ((FP64, adapted), (FP64_BASE, BASES)):
        compared += itertools.combinations(systems, 2)
        compared += [(name, reference) for name in systems]
    pairs = {
        (first, second): compare(results[first], results[second])
        for first, second in compared
        if first in results and second in results
    }

    def check(systems: str, quantity: str, value: float, limit: float, **note: str) -> None:
        ok = value <= limit  # False for NaN
        report.add(run.name, quantity, side=systems, error=value, bound=limit, ok=ok, **note)

    _check_agreement(check, run, pairs, adapted)
    _check_distance_from_fp64(check, run, pairs, adapted)
    for (first, second), pair in pairs.items():
        measured = {k: v for k, v in dataclasses.asdict(pair).items() if v not in (None, {})}
        report.add(run.name, "distance", side=f"{first}, {second}", **measured)


# Adds a check to the report: the systems, the quantity, its value, its limit, and a note.
_Check = Callable[..., None]
_Pairs = Mapping[tuple[str, str], Pair]


def _check_agreement(check: _Check, run: Run, pairs: _Pairs, adapted: Sequence[str]) -> None:
    """Checks the systems against each other: the cosine of their logits."""
    control = pairs[BASES].cosine if BASES in pairs else 0.0
    limit = tolerances.caps.model_cosine_distance(run.dtype, control)
    goal = 1 - tolerances.caps.COSINE[run.dtype]
    for first, second in itertools.combinations(adapted, 2):
        cosine = pairs[first, second].cosine
        met = "met" if cosine <= goal else "not met"
        note = f"goal {goal:.0e} {met}; without adapters jax and torch {control:.1e}"
        check(f"{first}, {second}", "logits, 1 - cosine", cosine, limit, note=note)
    if (FP64, FP64_BASE) in pairs:
        effect = pairs[FP64, FP64_BASE].cosine
        quantity = "allowed 1 - cosine, in units of what the adapter changes"
        note = f"the adapter changes the logits by 1 - cosine = {effect:.1e}"
        check(FP64, quantity, limit / effect, tolerances.caps.MODEL_RESOLUTION, note=note)


def _check_distance_from_fp64(
    check: _Check, run: Run, pairs: _Pairs, adapted: Sequence[str]
) -> None:
    """Checks our systems' distances from fp64 against PEFT's distances."""
    peft = pairs.get((PEFT, FP64))
    if peft is None or peft.adapter is None:
        return
    adapter_limits: dict[str, float] = {}
    for name in adapted:
        pair = pairs.get((name, FP64))
        if name == PEFT or pair is None or pair.adapter is None:
            continue
        framework = _framework_factor(pairs, name)
        factor = tolerances.caps.MODEL_NEARNESS[run.dtype] * framework
        adapter_limits[name] = factor * peft.adapter.relative
        # (quantity, our distance from fp64, PEFT's distance, limit)
        checks = [
            ("logits", pair, peft, factor * peft.relative),
            ("adapter's gradient", pair.adapter, peft.adapter, adapter_limits[name]),
        ]
        for kind, ours in pair.gradients.items():
            theirs = peft.gradients[kind]
            limit = framework * tolerances.flash_rule(theirs.relative, 1.0, run.dtype)
            checks.append((f"gradient of {kind}", ours, theirs, limit))
        for quantity, ours, theirs, limit in checks:
            note = f"PEFT {theirs.relative:.2e}, framework × {framework:.2f}"
            check(f"{name}, fp64", f"{quantity}, relative", ours.relative, limit, note=note)
    for first, second in itertools.combinations(adapter_limits, 2):
        difference = pairs[first, second].adapter
        assert difference is not None
        limit = adapter_limits[first] + adapter_limits[second]
        check(f"{first}, {second}", "adapter's gradient, relative", difference.relative, limit)


def _framework_factor(pairs: _Pairs, name: str) -> float:
    """Returns the ratio of distances from fp64 of the framework's unadapted model and torch's, at
    least 1."""
    side = name.partition(" ")[0]
    own, torch = (pairs.get((base, FP64_BASE)) for base in (f"{side} base", "torch base"))
    if own is None or torch is None or not torch.relative:
        return 1.0
    return max(1.0, own.relative / torch.relative)
