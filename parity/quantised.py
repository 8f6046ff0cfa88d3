"""`python -m parity quantised`: the same quantised weights through both packages, against fp64.

torchao quantises each weight; jax_dora is given its codes and scales, and no floats. The oracle
materialises in fp64 what they stand for. PEFT's DoRA over the same values is beside both: over
torchao's tensors, and for NF4 over bitsandbytes'. The norm is held to
`NORM`, y and all gradients to the bounds of `parity.tolerances`, which are those of a float weight.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from parity import cases, command, oracle
from parity.cases import Case
from parity.compare import Expected, expected_layer, judge
from parity.report import Report
from parity.sides import SIDES
from parity.sides.torch import peft_layer
from parity.torchao_weights import FORMATS, meant, parts, quantised

NORM = 1e-5  # of a norm, which sums thousands of squares in fp32


def layers(quick: bool) -> list[Case]:
    """Returns layers whose input features whole tiles of 64 divide."""
    regimes = ("trained", "near_unity")[: 1 if quick else None]
    sizes = [(33, 128, 24, 7), (40, 192, 72, 16)][: 1 if quick else None]
    return [cases.layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(report: Report, case: Case, qtype: str, device: str) -> None:
    """Adds a line for every quantity of a case in a format, on both sides and by PEFT."""
    inputs, s = cases.layer_inputs(case, device), case.scale
    weight = quantised(inputs.weight, qtype)
    dense = torch.as_tensor(meant(parts(weight)), device=inputs.x.device)
    norm = oracle.norm(dense, inputs.lora_a, inputs.lora_b, s)
    # Magnitudes as far from the quantised weight's norms as they were from the float one's.
    apart = inputs.magnitude / oracle.norm(inputs.weight, inputs.lora_a, inputs.lora_b, s)
    magnitude = (norm * apart).float()
    meant_inputs = dataclasses.replace(inputs, weight=dense, magnitude=magnitude)
    inputs = dataclasses.replace(inputs, weight=weight, magnitude=magnitude)

    expected = {"norm": Expected(norm, NORM * norm, case.dtype)}
    expected |= expected_layer(case, meant_inputs)
    found = {"peft": peft_layer.layer(inputs, s)}
    for name, side in SIDES.items():
        layer = side.operators.layer(inputs, s, side.plain, frozen=False)()
        found[name] = layer | {"norm": side.operators.norm(inputs, s, side.plain)()}
    for name, results in found.items():
        judge(report, f"{qtype}: {case.name}", name, results, expected)


def main(options: argparse.Namespace) -> int:
    report = command.report(options, "quantised")
    for case in layers(options.quick):
        for qtype in FORMATS:
            run(report, case, qtype, options.device)
    return report.finish()
