"""`python -m parity quantised`: the same quantised weights in both packages, compared with fp64.

torchao quantises each weight; jax_dora gets torchao's codes and scales, not floats. The oracle
dequantises them in fp64. PEFT's DoRA runs over the same values, as torchao's tensors or, for NF4,
as bitsandbytes'. The tolerance of the norm is `NORM`; y and all gradients have the bounds of
`parity.tolerances` for a float weight.
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
from parity.torchao_weights import FORMATS, dequantised, parts, quantised

NORM = 1e-5  # relative: a norm sums thousands of squares in fp32


def layers(quick: bool) -> list[Case]:
    """Returns layers whose number of input features is a multiple of the tile size, 64."""
    regimes = ("trained", "near_unity")[: 1 if quick else None]
    sizes = [(33, 128, 24, 7), (40, 192, 72, 16)][: 1 if quick else None]
    return [cases.layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def run(report: Report, case: Case, qtype: str, device: str) -> None:
    """Adds a line for every quantity of a case in one format, for both sides and PEFT."""
    inputs, s = cases.layer_inputs(case, device), case.scale
    weight = quantised(inputs.weight, qtype)
    dense = torch.as_tensor(dequantised(parts(weight)), device=inputs.x.device)
    norm = oracle.norm(dense, inputs.lora_a, inputs.lora_b, s)
    # The magnitudes keep their ratio to the norms when the weight is quantised.
    ratio = inputs.magnitude / oracle.norm(inputs.weight, inputs.lora_a, inputs.lora_b, s)
    magnitude = (norm * ratio).float()
    dense_inputs = dataclasses.replace(inputs, weight=dense, magnitude=magnitude)
    inputs = dataclasses.replace(inputs, weight=weight, magnitude=magnitude)

    expected = {"norm": Expected(norm, NORM * norm, case.dtype)}
    expected |= expected_layer(case, dense_inputs)
    results = {"peft": peft_layer.layer(inputs, s)}
    for name, side in SIDES.items():
        layer = side.operators.layer(inputs, s, side.plain, frozen=False)()
        results[name] = layer | {"norm": side.operators.norm(inputs, s, side.plain)()}
    for name, found in results.items():
        judge(report, f"{qtype}: {case.name}", name, found, expected)


def main(options: argparse.Namespace) -> int:
    report = command.report(options, "quantised")
    for case in layers(options.quick):
        for qtype in FORMATS:
            run(report, case, qtype, options.device)
    return report.finish()
