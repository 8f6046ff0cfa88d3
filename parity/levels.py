"""A small case set of every level of parity, for `parity.controls` to run with and without faults.

Each is a function that adds what it judges to a report: all of it passes, in sound packages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from parity import cases, encoder, minilm
from parity.compare import run_case
from parity.faults import Level
from parity.minilm import Adapter, Evaluation
from parity.model.sizes import TINY, Run
from parity.report import Report
from parity.sides import SIDES, Backend
from parity.sides.torch.encoder import evaluate

# With zero rows beside ordinary ones, and g near 1: where each fault shows.
OPERATOR_CASES = ("norm 192x128 r16 float32 zero rows", "compose 7x72 bfloat16 near unity")
LAYER_CASES = ("layer 33x96x64 r16 float32 zero rows",)
MODEL_RUN = Run(TINY, "float32", layers=2, tokens=24, last=16)
# Of the encoder's adapter, whose lora_b starts at zero and whose magnitudes at their norms.
LORA_B_DEVIATION = 0.02
MAGNITUDE_DEVIATION = 0.05


# Given the package in which a fault is planted, or None: the other one's results may be old ones.
CaseSet = Callable[[Report, Backend | None], None]


def levels() -> dict[Level, CaseSet]:
    """Returns the case sets, cheapest first."""
    return {
        "operator": functools.partial(_cases, OPERATOR_CASES),
        "layer": functools.partial(_cases, LAYER_CASES),
        "encoder": _encoder,
        "model": _model,
        "training": _training,
    }


def _cases(names: Iterable[str], report: Report, backend: Backend | None) -> None:
    known = {case.name: case for case in cases.cpu_cases()}
    for name in names:
        run_case(report, known[name], "cpu")


@functools.cache
def _sound(run: Callable[[Any], Any], side: Backend | None) -> Any:
    return run(side)


def _both(run: Callable[[Backend], Any], backend: Backend | None) -> dict[Backend, Any]:
    """Returns what `run` gives for each side: anew where a fault is planted."""
    return {side: run(side) if side == backend else _sound(run, side) for side in SIDES}


def _encoder(report: Report, backend: Backend | None) -> None:
    """Compares pretrained weights, embeddings and the adapter's gradients in fp32."""
    exact, plain = _references()
    encoder.compare(report, "float32", encoder.PLAIN, exact, _both(_evaluate, backend), plain)


@functools.cache
def _references() -> tuple[Evaluation, dict[Backend, Evaluation]]:
    exact = evaluate(encoder.dense(_adapter(), "cpu"), _batch(), True)
    return exact, {side: _evaluate(side, "plain") for side in SIDES}


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


def _model(report: Report, backend: Backend | None) -> None:
    """Compares a tiny decoder in fp32 with transformers with PEFT and with fp64."""
    from parity.model.checks import judge

    others = _sound(_execute, None)
    found = {side: result[side] for side, result in _both(_execute, backend).items()}
    judge(report, MODEL_RUN, others | found)


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


def _training(report: Report, backend: Backend | None) -> None:
    """Compares short training runs in fp32."""
    from parity.training import compare, quick

    found = _both(quick.train, backend)
    apart = quick.difference(found["jax"], found["torch"])
    within = apart.within(compare.FULL_PRECISION)
    report.add("training", "losses, adapters", side="jax, torch", ok=within)
