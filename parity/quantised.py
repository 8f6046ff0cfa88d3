"""`python -m parity quantised`: the same quantised weights through both packages, against fp64.

torchao quantises each weight; jax_dora is given its codes and scales, and no floats. The oracle
materialises in fp64 what they stand for. PEFT's DoRA over the same values is beside both: over
torchao's tensors, and for NF4 over bitsandbytes'. The norm is held to
`NORM`, y and all gradients to the bounds of `parity.tolerances`, which are those of a float weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parity import command
from parity.environment import choose_device

if TYPE_CHECKING:
    import numpy as np
    import torch

    from parity.cases import Case, LayerInputs
    from parity.report import Report

NORM = 1e-5  # of a norm, which sums thousands of squares in fp32
FORMATS = ("nf4", "int8", "float8_e4m3fn")
QUANTITIES = ("d_x", "d_lora_a", "d_lora_b", "d_magnitude", "d_bias")


class Parts(NamedTuple):
    """What a quantised weight is made of: codes [out, in], a float's as bytes, and fp32 scales,
    each of a tile."""

    qtype: str
    codes: np.ndarray
    scale: np.ndarray


def cases(quick: bool) -> list[Case]:
    """Returns layers whose input features whole tiles of 64 divide."""
    from parity.cases import layer

    regimes = ("trained", "near_unity")[: 1 if quick else None]
    sizes = [(33, 128, 24, 7), (40, 192, 72, 16)][: 1 if quick else None]
    return [layer("float32", *size, regime=regime) for size in sizes for regime in regimes]


def quantised(weight: torch.Tensor, qtype: str) -> Any:
    """Returns a float weight [out, in] as torchao quantises it."""
    import torch
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    from jax_dora.ops.quantised import NF4

    if qtype == "nf4":
        found = to_nf4(weight, 64, weight.numel() // 64)
        # torchao's codebook has four digits.
        found.nf4 = torch.tensor(NF4, device=weight.device)
        return found
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device)
    layer.weight = torch.nn.Parameter(weight.clone())
    quantize_(layer, Int8WeightOnlyConfig() if qtype == "int8" else Float8WeightOnlyConfig())
    return layer.weight.detach()


def is_quantised(weight: Any) -> bool:
    """Returns whether `weight` is one of torchao's."""
    return type(weight).__module__.startswith("torchao.")


def parts(weight: Any) -> Parts:
    """Returns what a weight of torchao's is made of."""
    import numpy as np
    import torch

    if not hasattr(weight, "qdata"):
        scales = weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
        packed = weight.quantized_data.cpu().numpy()
        codes = np.stack([packed >> 4, packed & 15], 1).reshape(tuple(weight.shape))
        return Parts("nf4", codes, scales.float().cpu().numpy().reshape(weight.shape[0], -1))
    scale = weight.scale.float().cpu().numpy()
    if weight.qdata.dtype == torch.int8:
        return Parts("int8", weight.qdata.cpu().numpy(), scale)
    return Parts("float8_e4m3fn", weight.qdata.view(torch.uint8).cpu().numpy(), scale)


def meant(found: Parts) -> np.ndarray:
    """Returns in fp64 what the parts stand for."""
    import ml_dtypes
    import numpy as np

    from jax_dora.ops.quantised import NF4

    values: Any = found.codes
    if found.qtype == "float8_e4m3fn":
        values = values.view(ml_dtypes.float8_e4m3fn)
    elif found.qtype == "nf4":
        values = np.array(NF4, np.float32)[values]
    width = values.shape[1] // found.scale.shape[1]
    return values.astype(np.float64) * np.repeat(found.scale.astype(np.float64), width, 1)


def run(report: Report, case: Case, qtype: str, device: str) -> None:
    """Adds a line for every quantity of a case in a format, on both sides and by PEFT."""
    from parity.cases import layer_inputs
    from parity.compare import judge
    from parity.sides import SIDES
    from parity.sides.torch import peft_layer

    inputs = layer_inputs(case, device)
    weight = quantised(inputs.weight, qtype)
    exact, inputs = _exact(case, inputs, weight)
    told = f"{qtype}: {case.name}"
    found = {"peft": peft_layer.layer(inputs, case.scale)}
    for name, side in SIDES.items():
        norm = side.operators.norm(inputs, case.scale, side.plain)()
        layer = side.operators.layer(inputs, case.scale, side.plain, frozen=False)()
        found[name] = {"norm": norm} | layer
    for name, results in found.items():
        for quantity, (want, allowed) in exact.items():
            judge(report, told, quantity, name, results[quantity], want, allowed)


def _exact(case: Case, inputs: LayerInputs, weight: Any) -> tuple[dict[str, Any], LayerInputs]:
    """Returns the fp64 value and the bound of every quantity; and the inputs over the quantised
    weight, with magnitudes as far from its norms as they were from the float one's."""
    import dataclasses

    import torch

    from parity import oracle, tolerances

    a, b = inputs.lora_a, inputs.lora_b
    dense = torch.as_tensor(meant(parts(weight)), device=inputs.x.device)
    norm = oracle.norm(dense, a, b, case.scale)
    apart = inputs.magnitude / oracle.norm(inputs.weight, a, b, case.scale)
    magnitude = (norm * apart).float()
    changed = dataclasses.replace(inputs, weight=weight, magnitude=magnitude)
    x, dy, s, dtype = inputs.x, inputs.dy, case.scale, case.dtype
    of_bias: Any = {} if inputs.bias is None else {"bias": inputs.bias}
    bound = tolerances.dora_linear(dy, x, dense, a, b, magnitude, s, dtype, **of_bias)
    grads = oracle.dora_linear_grads(dy, x, dense, a, b, magnitude, s, dtype=dtype)
    y = oracle.dora_linear(x, dense, a, b, magnitude, s, dtype=dtype, **of_bias)
    exact = {"norm": (norm, NORM * norm), "y": (y, bound.y)}
    exact |= {name: (getattr(grads, name), getattr(bound, name)) for name in QUANTITIES}
    return exact, changed


def main(arguments: Sequence[str]) -> int:
    told = "Holds layers over the same quantised weights to fp64, in both packages and PEFT."
    options = command.parser("quantised", told).parse_args(list(arguments))
    device = choose_device(options.device)
    report = command.report(options, device, "quantised")
    for case in cases(options.quick):
        for qtype in FORMATS:
            run(report, case, qtype, device)
    return report.finish()
