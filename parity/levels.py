"""A small case set of every level of parity, for `parity.controls` to run with and without faults.

Each level answers which of its quantities failed: none, in sound packages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from parity import cases, encoder, minilm, minilm_jax, minilm_torch
from parity.compare import Row, run_case
from parity.faults import BACKENDS, Backend, Level
from parity.minilm_torch import Adapter, Evaluation
from parity.model.sizes import TINY, Run
from parity.model.weights import Result, Weights, draw

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
    rows = [row for name in names for row in run_case(known[name], "cpu")]
    return _failures(rows)


def _failures(rows: Iterable[Row]) -> list[Failure]:
    found = []
    for row in rows:
        if not row.passed:
            sound = {"jax": row.jax.passed, "torch": row.torch.passed}
            sides: list[Backend] = [b for b in BACKENDS if not sound[b]]
            found.append(Failure(row.quantity, _only(sides)))
    return found


def _only(backends: Sequence[Backend]) -> Backend | None:
    return backends[0] if len(backends) == 1 else None


class _Encoder:
    """Pretrained weights, embeddings and the adapter's gradients in fp32."""

    def __init__(self) -> None:
        self._sound: dict[str, Evaluation] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        if not self._sound:
            self._sound = {
                "fp64": minilm_torch.evaluate(
                    minilm_torch.adapted(
                        "dense", self._adapter, torch.float64, "cpu", {}, torch.float32
                    ),
                    self._batch,
                    True,
                ),
                **{f"plain {side}": self._evaluate("plain", side) for side in ("jax", "torch")},
                **{side: self._evaluate("dora", side) for side in ("jax", "torch")},
            }
        found = dict(self._sound)
        if backend is not None:
            found[backend] = self._evaluate("dora", backend)
        rows = encoder.evaluation_rows(
            "float32",
            encoder.PLAIN_NAMES,
            found["fp64"],
            (found["jax"], found["torch"]),
            (found["plain jax"], found["plain torch"]),
        )
        return _failures(rows)

    def _evaluate(self, kind: str, side: str) -> Evaluation:
        if side == "jax":
            names = dict.fromkeys(minilm.projection_names(), "xla")
            model = minilm_jax.adapted(kind, self._adapter, "float32", names)
            return minilm_jax.evaluate(model, self._batch, True)
        names = dict.fromkeys(minilm.projection_names(), "eager")
        model = minilm_torch.adapted(kind, self._adapter, torch.float32, "cpu", names)
        return minilm_torch.evaluate(model, self._batch, True)

    @functools.cached_property
    def _batch(self) -> minilm.Batch:
        return minilm.batch(minilm.sentence_pairs()[:2])

    @functools.cached_property
    def _adapter(self) -> Adapter:
        adapter = minilm_torch.initial_adapter()
        generator = torch.Generator().manual_seed(0)
        for values in adapter.values():
            values["lora_b"].normal_(0, LORA_B_DEVIATION, generator=generator)
            factor = torch.empty_like(values["magnitude"])
            values["magnitude"] *= factor.normal_(1, MAGNITUDE_DEVIATION, generator=generator)
        return adapter


class _Model:
    """A tiny decoder in fp32 against transformers with PEFT and against fp64."""

    BACKENDS: Mapping[str, Backend] = MappingProxyType({"Flax": "jax", "torch": "torch"})

    def __init__(self) -> None:
        self._sound: dict[str, Result] = {}

    def __call__(self, backend: Backend | None) -> list[Failure]:
        # transformers and PEFT, which the levels below can do without.
        from parity.model.checks import judge
        from parity.model.execute import framework, systems

        if not self._sound:
            self._sound = self._execute(list(systems(MODEL_RUN)))
        found = dict(self._sound)
        ours = self.BACKENDS
        if backend is not None:
            found |= self._execute([name for name in ours if ours[name] == backend])
        failures = []
        for check in judge(MODEL_RUN, found, {}).checks:
            if not check.passed:
                names = [framework(name) for name in check.systems.split(", ")]
                sides: list[Backend] = [ours[name] for name in names if name in ours]
                failures.append(Failure(check.quantity, _only(sides)))
        return failures

    def _execute(self, names: list[str]) -> dict[str, Result]:
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
            self._sound = {side: quick.train(side) for side in BACKENDS}
        found = dict(self._sound)
        if backend is not None:
            found[backend] = quick.train(backend)
        apart = quick.difference(found["jax"], found["torch"])
        return [] if apart.within(compare.FULL_PRECISION) else [Failure("losses, adapters")]
