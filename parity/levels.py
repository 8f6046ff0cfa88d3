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
from parity.model.weights import Result, Weights, draw
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
    """The case sets, cheapest first."""
    return {
        "operator": functools.partial(_cases, OPERATOR_CASES),
        "layer": functools.partial(_cases, LAYER_CASES),
        "encoder": _Encoder(),
        "model": _Model(),
        "training": _Training(),
    }


def _cases(names: Iterable[str], backend: Backend | None) -> list[Failure]:
    known = {case.name: case for case in cases.cpu_cases()}
    return _failures(one for name in names for one in run_case(known[name], "cpu"))


def _failures(comparisons: Iterable[Comparison]) -> list[Failure]:
    found = []
    for one in comparisons:
        if not one.passed:
            wrong: list[Backend] = [side for side, score in one.scores.items() if not score.passed]
            found.append(Failure(one.quantity, _only(wrong)))
    return found


def _only(backends: Sequence[Backend]) -> Backend | None:
    return backends[0] if len(backends) == 1 else None


class _Encoder:
    """Pretrained weights, embeddings and the adapter's gradients in fp32."""

    def __init__(self) -> None:
        self._exact: Evaluation | None = None
        self._plain: dict[Backend, Evaluation] = {}
        self._sound: dict[Backend, Evaluation] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        if self._exact is None:
            self._exact = evaluate(encoder.dense(self._adapter, "cpu"), self._batch, True)
            self._plain = {side: self._evaluate(side, "plain") for side in SIDES}
            self._sound = {side: self._evaluate(side, SIDES[side].plain) for side in SIDES}
        found = dict(self._sound)
        if backend is not None:
            found[backend] = self._evaluate(backend, SIDES[backend].plain)
        compared = encoder.compare("float32", encoder.PLAIN, self._exact, found, self._plain)
        return _failures(compared)

    def _evaluate(self, side: Backend, implementation: str) -> Evaluation:
        level = SIDES[side].encoder
        model = level.adapted(self._adapter, "float32", implementation)
        return level.evaluate(model, self._batch, True)

    @functools.cached_property
    def _batch(self) -> minilm.Batch:
        return minilm.batch(minilm.sentence_pairs()[:2])

    @functools.cached_property
    def _adapter(self) -> Adapter:
        adapter = minilm.initial_adapter()
        generator = torch.Generator().manual_seed(0)
        for values in adapter.values():
            values["lora_b"].normal_(0, LORA_B_DEVIATION, generator=generator)
            factor = torch.empty_like(values["magnitude"])
            values["magnitude"] *= factor.normal_(1, MAGNITUDE_DEVIATION, generator=generator)
        return adapter


class _Model:
    """A tiny decoder in fp32 against transformers with PEFT and against fp64."""

    def __init__(self) -> None:
        self._sound: dict[str, Result] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        # transformers and PEFT, which the levels below can do without.
        from parity.model.checks import judge
        from parity.model.execute import systems

        if not self._sound:
            self._sound = self._execute(list(systems(MODEL_RUN)))
        found = dict(self._sound)
        if backend is not None:
            found |= self._execute([backend])
        failures = []
        for check in judge(MODEL_RUN, found)[1]:
            if not check.passed:
                # A side's own choice of an implementation is called by the side's name.
                sides: list[Backend] = [side for side in SIDES if side in check.systems.split(", ")]
                failures.append(Failure(check.quantity, _only(sides)))
        return failures

    def _execute(self, names: Sequence[str]) -> dict[str, Result]:
        from parity.model.execute import execute, systems

        chosen = {name: system for name, system in systems(MODEL_RUN).items() if name in names}
        executed = execute(MODEL_RUN, self._weights, chosen)
        if executed.errors:
            raise RuntimeError(f"the model cannot run: {executed.errors}")
        return executed.results

    @functools.cached_property
    def _weights(self) -> Weights:
        return draw(MODEL_RUN, "cpu")


class _Training:
    """A short training run in fp32."""

    def __init__(self) -> None:
        self._sound: dict[Backend, Any] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        from parity.training import compare, quick

        if not self._sound:
            self._sound = {side: quick.train(side) for side in SIDES}
        found = dict(self._sound)
        if backend is not None:
            found[backend] = quick.train(backend)
        apart = quick.difference(found["jax"], found["torch"])
        return [] if apart.within(compare.FULL_PRECISION) else [Failure("losses, adapters")]
