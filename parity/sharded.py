"""`python -m parity sharded`: a layer on several devices, in every layout, against fp64.

y and all gradients of one projection are held to the materialised fp64 computation by the bounds of
`parity.tolerances`, which know no device: JAX's on a mesh of four devices with automatic axes,
torch's in four processes, by DDP, FSDP2 and DTensor. Among the cases are batches and ranks that do
not divide over the devices.

Then a fresh adapter, whose magnitude is the norm that is taken in the layout itself, learns by Adam
what a trained one computes, in every layout as on one device; fp32 throughout, so that only the
order of sums differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import torch

from parity import cases, command, oracle, tolerances
from parity.cases import Case, LayerInputs
from parity.compare import expected_layer, judge
from parity.report import Report
from parity.sides import SIDES, Backend

LAYOUTS = ("dp", "fsdp", "tp column", "tp row", "fsdp×tp column", "fsdp×tp row")
STEPS, LEARNING_RATE = 200, 3e-3


class Problem(NamedTuple):
    """A result that a fresh adapter learns.

    Attributes:
      inputs: x, the base, and lora_a as it starts.
      target: f32[rows, out].
      unit: the loss of the base alone, in which losses are told.
      scale: the adapter's.
    """

    inputs: LayerInputs
    target: torch.Tensor
    unit: float
    scale: float


def layers(quick: bool) -> list[Case]:
    """Returns layers whose rows and rank divide over four devices, and layers where they do not."""
    regimes = ("trained", "near_unity", "zero_rows")[: 1 if quick else None]
    sizes = [(32, 96, 64, 16), (33, 96, 64, 7)]
    return [cases.layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(
    report: Report, side: Backend, case: Case, names: Sequence[str], device: str, **options: int
) -> None:
    """Adds a line for every quantity of a case in every layout that is named; of torch, in 4
    `processes`, or as many as the options say."""
    inputs = cases.layer_inputs(case, device if side == "jax" else "cpu")
    expected = expected_layer(case, inputs)
    level = SIDES[side].sharded
    results = level.in_each(level.layer, names, device, (inputs, case.scale), **options)
    for name, found in zip(names, results, strict=True):
        judge(report, f"{name}: {case.name}", side, found, expected)


def train(report: Report, side: Backend, names: Sequence[str], device: str) -> None:
    """Adds a line for training in each layout that is named."""
    level = SIDES[side].sharded
    losses = np.array(level.in_each(level.losses, ("one", *names), device, (problem(),)))
    alone = losses[0]
    limit = tolerances.caps.TRAINING_FP32_WORST_LOSS_DIFFERENCE
    for name, apart in zip(names, np.abs(losses[1:] - alone), strict=True):
        report.add(
            f"{name}: {STEPS} steps",
            ("first |Δloss|", "worst |Δloss|"),
            side=side,
            error=(float(apart[0]), float(apart.max())),
            bound=(limit, limit),
            # A loss that does not fall would agree with any other.
            ok=[bool(apart[0] <= limit), bool(apart.max() <= limit and alone[-1] < 0.1)],
        )


def problem() -> Problem:
    """Returns what a trained adapter computes, to be learned."""
    # Rows and a rank that do not divide over four devices.
    case = cases.layer("float32", 33, 96, 64, 7, bias=False)
    inputs, s = cases.layer_inputs(case, "cpu"), case.scale
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    wanted = oracle.dora_linear(inputs.x, *adapter, inputs.magnitude, s)
    unit = (wanted - inputs.x.double() @ inputs.weight.double().T).square().mean()
    return Problem(inputs, wanted.float(), float(unit), s)


def main(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        jax.config.update("jax_num_cpu_devices", 4)
    if jax.device_count() < 4:
        sys.exit(f"python -m parity sharded takes 4 devices, and there are {jax.device_count()}")
    report = command.report(options, "sharded")
    for side in SIDES:
        for case in layers(options.quick):
            run(report, side, case, LAYOUTS, options.device)
        if not options.quick:
            train(report, side, LAYOUTS, options.device)
    return report.finish()
