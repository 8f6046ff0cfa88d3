"""`python -m parity sharded`: a layer on several devices, in every layout, compared with fp64.

y and all gradients of one projection are compared with the dense fp64 computation, within the
bounds of `parity.tolerances`, which do not depend on devices. JAX runs on a mesh of four devices
with automatic axes; torch runs in four processes, with DDP, FSDP2 and DTensor. Some cases have
batches and ranks that are not divisible by the number of devices.

Then a fresh adapter, whose magnitude is the norm computed in the layout, is trained with Adam to
reproduce a trained adapter. The losses in every layout must equal those on one device. Everything
is fp32, so that only the order of sums differs.
"""

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
    """The output of a trained adapter, which a fresh adapter learns.

    Attributes:
      inputs: x, the base, and the initial lora_a.
      target: f32[rows, out].
      unit: the loss of the base without an adapter; losses are in this unit.
      scale: the adapter's.
    """

    inputs: LayerInputs
    target: torch.Tensor
    unit: float
    scale: float


def layers(quick: bool) -> list[Case]:
    """Returns layers whose rows and rank are divisible by four devices, and layers where they are
    not."""
    regimes = ("trained", "near_unity", "zero_rows")[: 1 if quick else None]
    sizes = [(32, 96, 64, 16), (33, 96, 64, 7)]
    return [cases.layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(
    report: Report, side: Backend, case: Case, names: Sequence[str], device: str, **options: int
) -> None:
    """Adds a line for every quantity of a case in each layout of `names`.

    `options` may set the number of `processes` of torch, which is otherwise 4.
    """
    inputs = cases.layer_inputs(case, device if side == "jax" else "cpu")
    expected = expected_layer(case, inputs)
    level = SIDES[side].sharded
    results = level.in_each(level.layer, names, device, (inputs, case.scale), **options)
    for name, found in zip(names, results, strict=True):
        judge(report, f"{name}: {case.name}", side, found, expected)


def train(report: Report, side: Backend, names: Sequence[str], device: str) -> None:
    """Adds a line for the training in each layout of `names`."""
    level = SIDES[side].sharded
    losses = np.array(level.in_each(level.losses, ("one", *names), device, (problem(),)))
    one_device = losses[0]
    limit = tolerances.caps.TRAINING_FP32_WORST_LOSS_DIFFERENCE
    for name, error in zip(names, np.abs(losses[1:] - one_device), strict=True):
        report.add(
            f"{name}: {STEPS} steps",
            ("first |Δloss|", "worst |Δloss|"),
            side=side,
            error=(float(error[0]), float(error.max())),
            bound=(limit, limit),
            # Two runs that learn nothing would agree too.
            ok=[bool(error[0] <= limit), bool(error.max() <= limit and one_device[-1] < 0.1)],
        )


def problem() -> Problem:
    """Returns the problem of reproducing a trained adapter."""
    # The rows and the rank are not divisible by four devices.
    case = cases.layer("float32", 33, 96, 64, 7, bias=False)
    inputs, s = cases.layer_inputs(case, "cpu"), case.scale
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    target = oracle.dora_linear(inputs.x, *adapter, inputs.magnitude, s)
    unit = (target - inputs.x.double() @ inputs.weight.double().T).square().mean()
    return Problem(inputs, target.float(), float(unit), s)


def main(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        jax.config.update("jax_num_cpu_devices", 4)
    if jax.device_count() < 4:
        sys.exit(f"python -m parity sharded needs 4 devices, but there are {jax.device_count()}")
    report = command.report(options, "sharded")
    for side in SIDES:
        for case in layers(options.quick):
            run(report, side, case, LAYOUTS, options.device)
        if not options.quick:
            train(report, side, LAYOUTS, options.device)
    return report.finish()
