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
from parity.model.weights import draw
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
        "encoder": _Encoder(),
        "model": _Model(),
        "training": _Training(),
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


def _sides(backend: Backend | None) -> list[Backend]:
    return [backend] if backend else list(SIDES)


class _Level:
    """Runs the sound packages once, and after that only the one in which a fault is planted."""

    def __init__(self) -> None:
        self._sound: dict[str, Any] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        if not self._sound:
            self._sound = self.run(None)
        return self.judge(self._sound | (self.run(backend) if backend else {}))

    def run(self, backend: Backend | None) -> dict[str, Any]:
        """Returns results by name: those of one package, or all."""
        raise NotImplementedError

    def judge(self, found: Any) -> list[Failure]:
        raise NotImplementedError


class _Encoder(_Level):
    """Pretrained weights, embeddings and the adapter's gradients in fp32."""

    def run(self, backend: Backend | None) -> dict[str, Any]:
        if backend is None:
            self._exact = evaluate(encoder.dense(self._adapter, "cpu"), self._batch, True)
            self._plain: dict[Backend, Evaluation] = {
                side: self._evaluate(side, "plain") for side in SIDES
            }
        return {side: self._evaluate(side, SIDES[side].plain) for side in _sides(backend)}

    def judge(self, found: Any) -> list[Failure]:
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


class _Model(_Level):
    """A tiny decoder in fp32 against transformers with PEFT and against fp64."""

    def run(self, backend: Backend | None) -> dict[str, Any]:
        # transformers and PEFT, which the levels below can do without.
        from parity.model.execute import execute, systems

        chosen = systems(MODEL_RUN)
        weights = draw(MODEL_RUN, "cpu")
        executed = execute(MODEL_RUN, weights, {backend: chosen[backend]} if backend else chosen)
        if executed.errors:
            raise RuntimeError(f"the model cannot run: {executed.errors}")
        return executed.results

    def judge(self, found: Any) -> list[Failure]:
        from parity.model.checks import judge

        def blamed(systems: str) -> Backend | None:
            # A side's own choice of an implementation is called by the side's name.
            return _only([side for side in SIDES if side in systems.split(", ")])

        checks = judge(MODEL_RUN, found)[1]
        return [Failure(c.quantity, blamed(c.systems)) for c in checks if not c.passed]


class _Training(_Level):
    """A short training run in fp32."""

    def run(self, backend: Backend | None) -> dict[str, Any]:
        from parity.training import quick

        return {side: quick.train(side) for side in _sides(backend)}

    def judge(self, found: Any) -> list[Failure]:
        from parity.training import compare, quick

        apart = quick.difference(found["jax"], found["torch"])
        return [] if apart.within(compare.FULL_PRECISION) else [Failure("losses, adapters")]
