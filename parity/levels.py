"""A small case set of every level of parity, for `parity.controls` to run with and without faults.

Each level answers which of its quantities failed: none, in sound packages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parity import cases, encoder, minilm
from parity.compare import Comparison, run_case
from parity.faults import Level
from parity.minilm import Adapter, Evaluation
from parity.model.sizes import TINY, Run
from parity.sides import SIDES, Backend
from parity.sides.torch.encoder import evaluate

# With zero rows beside ordinary ones, and g near 1: where each fault shows.
OPERATOR_CASES = ("norm 192x128 r16 float32 zero rows", "compose 7x72 bfloat16 near unity")
LAYER_CASES = ("layer 33x96x64 r16 float32 zero rows",)
MODEL_RUN = Run(TINY, "float32", layers=2, tokens=24, last=16)
# Of the encoder's adapter, whose lora_b starts at zero and whose magnitudes at their norms.
LORA_B_DEVIATION = 0.02
MAGNITUDE_DEVIATION = 0.05


@dataclass(frozen=True)
class Failure:
    """`backend` is at fault, or None where the two cannot be told apart."""

    quantity: str
    backend: Backend | None = None


# Given the package in which a fault is planted, or None: the other one's results may be old ones.
Failures = Callable[[Backend | None], list[Failure]]


def levels() -> dict[Level, Failures]:
    """Returns the case sets, cheapest first."""
    return {
        "operator": functools.partial(_cases, OPERATOR_CASES),
        "layer": functools.partial(_cases, LAYER_CASES),
        "encoder": _encoder,
        "model": _model,
        "training": _training,
    }


def _cases(names: Iterable[str], backend: Backend | None) -> list[Failure]:
    known = {case.name: case for case in cases.cpu_cases()}
    return _failures(one for name in names for one in run_case(known[name], "cpu"))


def _failures(comparisons: Iterable[Comparison]) -> list[Failure]:
    def blamed(one: Comparison) -> Backend | None:
        return _only([side for side, score in one.scores.items() if not score.passed])

    return [Failure(one.quantity, blamed(one)) for one in comparisons if not one.passed]


def _only(backends: Sequence[Backend]) -> Backend | None:
    return backends[0] if len(backends) == 1 else None


def _both(run: Callable[[Backend], Any], backend: Backend | None) -> dict[Backend, Any]:
    """Returns what `run`, which is cached, gives for each side: anew where a fault is planted."""
    again = getattr(run, "__wrapped__", run)
    return {side: again(side) if side == backend else run(side) for side in SIDES}


def _encoder(backend: Backend | None) -> list[Failure]:
    """Compares pretrained weights, embeddings and the adapter's gradients in fp32."""
    exact, plain = _references()
    found = _both(_evaluate, backend)
    return _failures(encoder.compare("float32", encoder.PLAIN, exact, found, plain))


@functools.cache
def _references() -> tuple[Evaluation, dict[Backend, Evaluation]]:
    exact = evaluate(encoder.dense(_adapter(), "cpu"), _batch(), True)
    return exact, {side: _evaluate(side, "plain") for side in SIDES}


@functools.cache
def _evaluate(side: Backend, implementation: str | None = None) -> Evaluation:
    level = SIDES[side].encoder
    model = level.adapted(_adapter(), "float32", implementation or SIDES[side].plain)
    return level.evaluate(model, _batch(), True)


@functools.cache
def _batch() -> minilm.Batch:
    return minilm.batch(minilm.sentence_pairs()[:2])


@functools.cache
def _adapter() -> Adapter:
    adapter = minilm.initial_adapter()
    generator = torch.Generator().manual_seed(0)
    for values in adapter.values():
        values["lora_b"].normal_(0, LORA_B_DEVIATION, generator=generator)
        factor = torch.empty_like(values["magnitude"])
        values["magnitude"] *= factor.normal_(1, MAGNITUDE_DEVIATION, generator=generator)
    return adapter


def _model(backend: Backend | None) -> list[Failure]:
    """Compares a tiny decoder in fp32 with transformers with PEFT and with fp64."""
    from parity.model.checks import judge

    def blamed(systems: str) -> Backend | None:
        # A side's own choice of an implementation is called by the side's name.
        return _only([side for side in SIDES if side in systems.split(", ")])

    others = _execute(None)
    found = {side: result[side] for side, result in _both(_execute, backend).items()}
    checks = judge(MODEL_RUN, others | found)[1]
    return [Failure(c.quantity, blamed(c.systems)) for c in checks if not c.passed]


@functools.cache
def _execute(side: Backend | None) -> dict[str, Any]:
    """Returns the results of one side, or of all systems that are neither."""
    # transformers and PEFT, which the levels below can do without.
    from parity.model.execute import execute, systems
    from parity.model.weights import draw

    known = systems(MODEL_RUN)
    names = [side] if side else [name for name in known if name not in SIDES]
    chosen = {name: known[name] for name in names}
    results, errors = execute(MODEL_RUN, draw(MODEL_RUN, "cpu"), chosen)
    if errors:
        raise RuntimeError(f"the model cannot run: {errors}")
    return results


def _training(backend: Backend | None) -> list[Failure]:
    """Compares short training runs in fp32."""
    from parity.training import compare, quick

    found = _both(_train, backend)
    apart = quick.difference(found["jax"], found["torch"])
    return [] if apart.within(compare.FULL_PRECISION) else [Failure("losses, adapters")]


@functools.cache
def _train(side: Backend) -> Any:
    from parity.training import quick

    return quick.train(side)
