"""The level `quantised`: the same quantised weights in both packages, compared with fp64.

torchao quantises each weight; jax_dora gets torchao's codes and scales, not floats. The oracle
dequantises them in fp64. Each package chooses its implementation itself, so that on a GPU its
kernels run. The bounds are those of `parity.tolerances` for a weight whose elements are rounded
when they are dequantised.

Some layers are trained: the norm, y and all gradients are compared. Of the others only y is, in a
program without gradients, which on a GPU must have a kernel that reads the codes.

PEFT's DoRA runs over the same values, as torchao's tensors or, for NF4, as bitsandbytes'.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parity import cases, oracle, tolerances
from parity.cases import Case, LayerInputs
from parity.compare import Expected, expected_layer, judge
from parity.report import Report
from parity.sides import SIDES
from parity.sides.torch import peft_layer
from parity.torchao_weights import FORMATS, Format, dequantised, parts, quantised

DTYPES = ("float32", "bfloat16")
# The Mosaic kernels that read the codes of W: for decoding, and for prompts.
READ_CODES = {"decode_project", "decode_quantised"}
# What PEFT computes less exactly in 16 bits than the bounds allow: the norm of a weight that is
# rounded first, and the bias's gradient as a sum of two that are rounded.
PEFT_ROUNDS = ("norm", "d_bias")


class Layer(NamedTuple):
    """A layer over a quantised weight; `trained` is whether its gradients are compared too."""

    form: Format
    case: Case
    trained: bool

    @property
    def name(self) -> str:
        return f"{self.form}: {self.case.name}{'' if self.trained else ' without gradients'}"


def layers(device: str, quick: bool) -> Iterator[Layer]:
    """Yields the layers; the tile sizes divide their features.

    On a GPU the sizes are those at which kernels run: rows as in decoding, of a prompt, and of a
    training batch. The kernels that read codes take no fp32.
    """
    is_cpu = device == "cpu"
    # In, out and rank.
    first, second = (
        ((256, 128, 7), (384, 192, 16)) if is_cpu else ((2048, 1024, 16), (1024, 2048, 16))
    )
    for form in FORMATS:
        for dtype in DTYPES:
            rows = 33 if is_cpu else 128 if quick or dtype == "float32" else 2048
            yield Layer(form, cases.layer(dtype, rows, *first), trained=True)
        for rows in (1,) if is_cpu else (8, 128) if quick else (1, 8, 32, 128):
            yield Layer(form, cases.layer("bfloat16", rows, *first), trained=False)
        if not quick:
            dtype, rows = ("float32", 40) if is_cpu else ("bfloat16", 128)
            near_unity = cases.layer(dtype, rows, *second, regime="near_unity")
            yield Layer(form, near_unity, trained=True)


def run(report: Report, layer: Layer, device: str) -> None:
    """Adds a line for every quantity of a layer, for both sides and PEFT."""
    case, s, form = layer.case, layer.case.scale, layer.form
    inputs, dense_inputs = draw(layer, device)
    expected = expected_layer(case, dense_inputs, form.roundings)
    if layer.trained:
        adapter = (dense_inputs.weight, inputs.lora_a, inputs.lora_b, s)
        bound = tolerances.norm(*adapter, weight_roundings=form.roundings)
        expected = {"norm": Expected(oracle.norm(*adapter), bound, "float32")} | expected
    else:
        expected = {"y": expected["y"]}
    for name in (*SIDES, "peft"):
        try:
            found = _results(name, layer, inputs)
        except Exception as error:
            # Without bitsandbytes there is no NF4 in PEFT.
            ok = None if isinstance(error, ModuleNotFoundError) else False
            note = f"{type(error).__name__}: {error}"
            report.add(layer.name, "y", side=name, ok=ok, note=note)
            continue
        skipped = PEFT_ROUNDS if name == "peft" and case.dtype != "float32" else ()
        wanted = {key: one for key, one in expected.items() if key not in skipped}
        judge(report, layer.name, name, found, wanted)
    if device != "cpu" and not layer.trained:
        judge_kernels(report, layer, SIDES["jax"].operators.kernels(inputs, s, None))


def judge_kernels(report: Report, layer: Layer, names: Sequence[str]) -> None:
    """Adds the names of JAX's kernels; it is an error if none of them reads the codes."""
    ok = bool(READ_CODES.intersection(names))
    report.add(layer.name, "kernels that ran", side="jax", value=", ".join(names), ok=ok)


def draw(layer: Layer, device: str) -> tuple[LayerInputs, LayerInputs]:
    """Returns the inputs, and the same with the weight dequantised in fp64."""
    case, s = layer.case, layer.case.scale
    inputs = cases.layer_inputs(case, device)
    weight = quantised(inputs.weight, layer.form)
    dense = torch.as_tensor(dequantised(parts(weight)), device=inputs.x.device)
    norm = oracle.norm(dense, inputs.lora_a, inputs.lora_b, s)
    # The magnitudes keep their ratio to the norms when the weight is quantised.
    ratio = inputs.magnitude / oracle.norm(inputs.weight, inputs.lora_a, inputs.lora_b, s)
    magnitude = (norm * ratio).float()
    return (
        dataclasses.replace(inputs, weight=weight, magnitude=magnitude),
        dataclasses.replace(inputs, weight=dense, magnitude=magnitude),
    )


def _results(name: str, layer: Layer, inputs: LayerInputs) -> Mapping[str, Any]:
    """Returns the results of a side or PEFT by quantity."""
    s = layer.case.scale
    if name == "peft":
        return peft_layer.layer(inputs, s)
    side = SIDES[name].operators
    if not layer.trained:
        return {"y": side.apply(inputs, s, None)()}
    found = side.layer(inputs, s, None, frozen=False)()
    return found | {"norm": side.norm(inputs, s, None)()}
