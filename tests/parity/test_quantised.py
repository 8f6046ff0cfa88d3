"""The level `quantised`: sound in every format, and able to fail."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity import quantised, torchao_weights
from parity.faults import Fault
from parity.sides.jax import operators
from parity.sides.torch import peft_layer
from tests.tables import thinned

LAYERS = list(quantised.layers("cpu", quick=True))
BF16 = [
    layer
    for layer in LAYERS
    if layer.case.dtype == "bfloat16" and layer.trained and not layer.bwd_qtype
]
NF4, WITHOUT_GRADIENTS = LAYERS[0], next(layer for layer in LAYERS if not layer.trained)


def test_only_a_code_in_the_middle_of_two_is_undecided():
    rows = torch.tensor([[448.0, 17.0, -17.0, 18.0, 17.5], [44.8, 1.7, 1.8, 0.0, 1.75]])
    apart = quantised.undecided(rows.double(), quantised.FP8)
    expected = [[0, 2, 2, 0, 0], [0, 0.2, 0, 0, 0]]
    np.testing.assert_allclose(apart, expected, rtol=1e-5)


def of_another_tile(weight):
    """Returns the parts of a weight with the scales of other tiles."""
    found = torchao_weights.parts(weight)
    return found._replace(scale=np.roll(found.scale, (1, 1), (0, 1)))


def exchanged(blocks):
    """Returns blocks of rows in which every two neighbours are exchanged."""

    def faulty(*arguments):
        for start, rows in blocks(*arguments):
            yield start, rows.unflatten(1, (-1, 2)).flip(2).flatten(1)

    return faulty


def failed(report):
    return {(row["side"], row["quantity"]) for row in report.rows if row["ok"] is False}


def index(layers):
    return [LAYERS.index(layer) for layer in layers]


@pytest.mark.parametrize(
    "number", thinned(range(len(LAYERS)), index(BF16)), ids=lambda i: LAYERS[i].name
)
@pytest.mark.ci
def test_a_layer_agrees_with_fp64(report, number):
    layer = LAYERS[number]
    quantised.run(report, layer, "cpu")
    sides = [row["side"] for row in report.rows]
    of_peft = 7 if layer.case.dtype == "float32" else 5
    counts = {"jax": 7, "torch": 7, "peft": of_peft} if layer.trained else dict.fromkeys(sides, 1)
    counts = {"jax": 7, "torch": 7} if layer.bwd_qtype else counts
    assert {side: sides.count(side) for side in sides} == counts
    assert report.passed, [row for row in report.rows if not row["ok"]]


@pytest.mark.parametrize(
    "number",
    thinned(range(len(LAYERS)), index([*BF16[1::2], WITHOUT_GRADIENTS])),
    ids=lambda i: LAYERS[i].name,
)
@pytest.mark.ci
def test_a_scale_of_another_tile_is_caught(report, monkeypatch, number):
    layer = LAYERS[number]
    monkeypatch.setattr(operators, "parts", of_another_tile)
    quantised.run(report, layer, "cpu")
    assert {("jax", "y"), *[("jax", "norm")] * layer.trained} <= failed(report)
    assert {side for side, _ in failed(report)} == {"jax"}


@pytest.mark.parametrize(
    "number",
    thinned(
        [i for i, layer in enumerate(LAYERS) if not layer.bwd_qtype],
        index([*BF16[::2], WITHOUT_GRADIENTS]),
    ),
    ids=lambda i: LAYERS[i].name,
)
@pytest.mark.ci
def test_exchanged_codes_are_caught(report, number):
    layer = LAYERS[number]
    with Fault("exchanged", "", (), {"torch_dora.ops.quantised._blocks": exchanged}).plant("torch"):
        quantised.run(report, layer, "cpu")
    assert {("torch", "y"), *[("torch", "norm")] * layer.trained} <= failed(report)
    assert {side for side, _ in failed(report)} == {"torch"}


def wrong_features(coded_gradient):
    """The scales of W multiply other features of the gradient."""

    def faulty(settings, d, kernel, *rest):
        turned = dataclasses.replace(kernel, scale=jnp.roll(kernel.scale, 1, axis=1))
        return coded_gradient(settings, d, turned, *rest)

    return faulty


def wrong_axis_in_torch(transposed_product):
    """The scales of W multiply the result's features, in turn, and not the gradient's."""

    def faulty(d, weight, bwd_qtype):
        one = weight.detach().clone()
        one.scale = torch.ones_like(weight.scale)
        columns = weight.scale.flatten()[torch.arange(weight.shape[1]) % weight.shape[0]]
        return transposed_product(d, one, bwd_qtype) * columns

    return faulty


def one_for_all(coded_by):
    """All rows have one scale."""
    return lambda largest, *rest: coded_by(jnp.full_like(largest, jnp.max(largest)), *rest)


def one_for_all_in_torch(coded):
    """All rows have one scale."""

    def faulty(x, qtype):
        most = x.abs().max() / torch.finfo(getattr(torch, qtype)).max
        codes, _ = coded(torch.eye(1, device=x.device), qtype)
        return (x / most).to(codes.dtype), most.float().expand(len(x), 1).contiguous()

    return faulty


@pytest.mark.parametrize(
    ("point", "fault", "caught"),
    [
        ("jax_dora.ops.row_scaled.coded_gradient", wrong_features, {"d_x"}),
        ("jax_dora.ops.row_scaled.coded_by", one_for_all, {"y", "d_x"}),
        ("torch_dora.ops.row_scaled.transposed_product", wrong_axis_in_torch, {"d_x"}),
        ("torch_dora.ops.row_scaled.coded", one_for_all_in_torch, {"y", "d_x"}),
    ],
)
@pytest.mark.ci
def test_scales_of_gradients_are_caught(report, point, fault, caught):
    # In fp32, with e4m3. The range of e5m2 is so large that one scale serves rows of similar size.
    layer, side = next(layer for layer in LAYERS if layer.bwd_qtype), point.partition("_")[0]
    with Fault("scales", "", (), {point: fault}).plant(side):
        quantised.run(report, layer, "cpu")
    wrong = {one for one in failed(report) if one[1] in ("y", "d_x")}
    assert wrong == {(side, quantity) for quantity in caught}


def test_another_scale_in_peft_is_caught(report, monkeypatch):
    adapt = peft_layer.adapt_linear
    monkeypatch.setattr(
        peft_layer,
        "adapt_linear",
        lambda base, rank, alpha, **options: adapt(base, rank, 1.01 * alpha, **options),
    )
    quantised.run(report, NF4, "cpu")
    assert ("peft", "y") in failed(report)
    assert {side for side, _ in failed(report)} == {"peft"}


def test_without_bitsandbytes_peft_has_no_nf4(report, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(quantised, "SIDES", {})
    quantised.run(report, NF4, "cpu")
    assert [(row["side"], row["ok"], row["note"]) for row in report.rows] == [
        ("peft", None, "ModuleNotFoundError: No module named 'bitsandbytes'")
    ]


def test_a_crash_is_a_failure(report, monkeypatch):
    def crash(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(peft_layer, "layer", crash)
    quantised.run(report, WITHOUT_GRADIENTS, "cpu")
    assert failed(report) == {("peft", "y")}


@pytest.mark.parametrize(
    ("names", "ok"), [(["decode_project"], True), (["project"], False), ([], False)]
)
def test_a_layer_whose_codes_no_kernel_reads_is_caught(report, names, ok):
    quantised.judge_kernels(report, WITHOUT_GRADIENTS, names)
    assert report.passed is ok


def test_kernels_are_found_by_name():
    layer = next(
        one for one in quantised.layers("cuda", False) if not one.trained and one.case.rows == 8
    )
    inputs, _ = quantised.draw(layer, "cpu")
    program = jax.jit(operators.projection(layer.case.scale, "mosaic"))
    lowered = program.trace(operators.linear_operands(inputs)).lower(lowering_platforms=("cuda",))
    assert operators.kernel_names(lowered) == ["decode_project"]


def test_a_gpu_runs_every_format_where_kernels_run():
    layers = list(quantised.layers("cuda", quick=False))
    assert {layer.form for layer in layers} == set(torchao_weights.FORMATS)
    for form in torchao_weights.FORMATS:
        of_form = [layer for layer in layers if layer.form == form]
        assert {one.case.rows for one in of_form if not one.trained} == {1, 8, 32, 128}
        assert {one.case.rows for one in of_form if one.trained} == {128, 2048}
        assert min(min(one.case.n_in, one.case.n_out) for one in of_form) >= 1024
