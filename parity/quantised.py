"""The level `quantised`: the same quantised weights in both packages, compared with fp64.

torchao quantises each weight; jax_dora gets torchao's codes and scales, not floats. The oracle
dequantises them in fp64. Each package chooses its implementation itself, so that on a GPU its
kernels run. The bounds are those of `parity.tolerances` for a weight whose elements are rounded
when they are dequantised.

Some layers are trained: the norm, y and all gradients are compared. Of the others only y is, in a
program without gradients, which on a GPU must have a kernel that reads the codes.

PEFT's DoRA runs over the same values, as torchao's tensors or, for NF4, as bitsandbytes'.

FP8 with a scale per row is also computed by products of FP8 on both sides, forward and backward, in
both packages. The oracle then has the coded rows of x and of the gradient, rounded by torch.
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
FP8 = "float8_e4m3fn"
GROWN = 1 + 2.0**-4  # How much larger than x its rounded rows may be, and with them the bounds.


class Layer(NamedTuple):
    """A layer over a quantised weight; `trained` is whether its gradients are compared too.
    `bwd_qtype` is the format of gradients for products in FP8, or None."""

    form: Format
    case: Case
    trained: bool
    bwd_qtype: str | None = None

    @property
    def name(self) -> str:
        rows = f" by rows, {self.bwd_qtype} backward" if self.bwd_qtype else ""
        return f"{self.form}{rows}: {self.case.name}{'' if self.trained else ' without gradients'}"


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
            layer = Layer(form, cases.layer(dtype, rows, *first), trained=True)
            yield layer
            # Tensor cores do not sum products of FP8 as exactly as fp32 results would need.
            if form == Format(FP8) and (is_cpu or dtype != "float32"):
                yield layer._replace(bwd_qtype=FP8 if dtype == "float32" else "float8_e5m2")
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
    if layer.bwd_qtype:
        expected |= coded(layer, inputs, dense_inputs, expected)
    for name in SIDES if layer.bwd_qtype else (*SIDES, "peft"):
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


def coded(
    layer: Layer, inputs: LayerInputs, dense: LayerInputs, expected: Mapping[str, Expected]
) -> dict[str, Expected]:
    """Returns the quantities that rounding x and the gradient changes, by the coded values."""
    case, bwd_qtype = layer.case, layer.bwd_qtype
    assert bwd_qtype is not None
    norm = oracle.norm(dense.weight, dense.lora_a, dense.lora_b, case.scale)
    g = oracle.magnitude_scale(oracle.fp64(dense.magnitude), norm, case.dtype)
    scales = torch.as_tensor(parts(inputs.weight).scale, device=g.device).double().flatten()
    x = rounded_rows(dense.x.double(), FP8)
    moved = (x - dense.x.double()) @ dense.weight.T
    d, codes = g * dense.dy.double() * scales, dense.weight / scales[:, None]
    rounded = rounded_rows(d, bwd_qtype)
    d_moved = (rounded - d) @ codes
    # In 16 bits g∘dy is rounded first, so that other codes may be the nearest.
    others: Any = 0.0
    if case.dtype != "float32":
        others = tolerances.quantised_rows(d.cpu().numpy(), codes.T.cpu().numpy(), bwd_qtype)
        others = torch.as_tensor(others, device=d.device)
    sums = undecided(dense.x.double(), FP8) @ abs(dense.weight).T
    d_sums = undecided(d, bwd_qtype) @ abs(codes)
    if d.is_cuda:
        sums = sums + tolerances.fp8_product(x, dense.weight.T)
        d_sums = d_sums + tolerances.fp8_product(rounded, codes)
    changes = {
        "y": (g * moved, abs(g) * sums),
        "d_magnitude": (
            (dense.dy.double() * moved).sum(0) / norm,
            (abs(dense.dy.double()) * sums).sum(0) / norm,
        ),
        "d_x": (d_moved, others + d_sums),
    }
    return {
        name: dataclasses.replace(
            expected[name],
            want=expected[name].want + change,
            bound=GROWN * expected[name].bound + more,
        )
        for name, (change, more) in changes.items()
    }


def rounded_rows(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns x fp64[rows, features] with each row rounded to an FP8 dtype in units of its largest
    magnitude / the largest number of the dtype."""
    fp8 = getattr(torch, dtype)
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(fp8).max
    return (x / scale).float().to(fp8).double() * scale


def undecided(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns the distance of the two neighbours of each element in `rounded_rows` if it lies in
    their middle, so that rounding its quotient in fp32 decides, else 0. Rows of 16-bit numbers have
    such elements: the quotient of two is often a number of few bits."""
    fp8: torch.dtype = getattr(torch, dtype)
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(fp8).max
    below, above = (
        (x / scale * (1 + sign * tolerances.FP8_QUOTIENT)).float().to(fp8).double()
        for sign in (-1, 1)
    )
    return (above - below).abs() * scale


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
    rows = {"act_qtype": FP8, "bwd_qtype": layer.bwd_qtype} if layer.bwd_qtype else {}
    found = side.layer(inputs, s, None, frozen=False, **rows)()
    return found | {"norm": side.norm(inputs, s, None)()}
