"""Runs a case on both sides, with plain operations and with kernels, and judges the results.

Three criteria, all against the fp64 oracle:

1. The error of every element is within its bound (`Expected.bound`).
2. The largest error is within flash-attention's rule (`tolerances.flash_rule`): about twice the
   error of the same computation in the framework's plain operations.
3. The two sides differ by at most the sum of their bounds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity import oracle, tolerances
from parity.cases import Case, LayerInputs, compose_inputs, layer_inputs
from parity.report import Report
from parity.sides import SIDES, Backend
from parity.sides.torch.operators import naive_delta

# Mosaic's kernels copy rows in units of 16 bytes. They refuse other widths when they are named.
MOSAIC_WIDTH = 8

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Score:
    """One side's result for one quantity. Errors are peaks of `|result - fp64|`.

    Attributes:
      implementation: its name.
      error: the error of the result.
      plain: the error of the same computation in the framework's plain operations.
      bound: the limit for `error`.
      of_bound: the largest ratio of an element's error to that element's bound.
    """

    implementation: str
    error: float
    plain: float
    bound: float
    of_bound: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.bound and (self.of_bound is None or self.of_bound <= 1.0)


def add_sides(
    report: Report,
    case: str,
    quantity: str,
    scores: Mapping[Backend, Score],
    *,
    difference: float,
    limit: float,
    **values: Any,
) -> None:
    """Adds a line to the report: each side's score, then the difference of the sides and its
    limit."""
    sides = [f"{name} {score.implementation}" for name, score in scores.items()]
    values["side"] = [*sides, ", ".join(sides)]
    values["error"] = [*(s.error for s in scores.values()), difference]
    values["bound"] = [*(s.bound for s in scores.values()), limit]
    values["ok"] = [*(s.passed for s in scores.values()), difference <= limit]
    values["plain"] = [*(s.plain for s in scores.values()), None]
    if any(s.of_bound is not None for s in scores.values()):
        values["of_bound"] = [*(s.of_bound for s in scores.values()), None]
    report.add(case, quantity, **values)


@dataclass(frozen=True)
class Expected:
    """The fp64 value of a quantity, and the errors that are allowed.

    Attributes:
      want: the fp64 value.
      bound: per element, from `parity.tolerances`.
      dtype: the dtype in which the quantity is stored.
      floor: added to flash-attention's rule for errors that the plain computation does not have.
      cap: the paper's limit, or infinity.
    """

    want: Any
    bound: Any
    dtype: str
    floor: float = 0.0
    cap: float = math.inf


def run_case(report: Report, case: Case, device: str) -> None:
    """Adds every quantity of the case, first computed without kernels, then with kernels."""
    expected, run = _PREPARE[case.kind](case, device)
    plain = {name: run(side.operators, "plain") for name, side in SIDES.items()}
    mosaic_refuses = bool(case.n_out % MOSAIC_WIDTH or case.n_in % MOSAIC_WIDTH)
    for kernels in (False, True):
        names: dict[Backend, str] = {}
        results: dict[Backend, Tensors] = {}
        failures = []
        for name, side in SIDES.items():
            has_kernels = kernels and not (side.kernels == "mosaic" and mosaic_refuses)
            names[name] = side.kernels if has_kernels else side.plain
            try:
                results[name] = run(side.operators, names[name])
            except Exception as error:
                failures.append(f"{name} {names[name]}: {type(error).__name__}: {error}")
        note = {"note": "; ".join(failures)} if failures else {}
        for quantity, exact in expected.items():
            found = {side: r[quantity] for side, r in results.items() if quantity in r}
            scores = {
                side: _score(case, name, exact, plain[side][quantity], found.get(side))
                for side, name in names.items()
            }
            difference = math.inf
            if len(found) == len(SIDES):
                difference = peak_of(abs_difference(found["jax"], oracle.fp64(found["torch"])))
            # Both are within their own bound of the same value.
            limit = min(sum(score.bound for score in scores.values()), exact.cap)
            facts = {"dtype": case.dtype, "peak": peak_of(exact.want), **note}
            add_sides(
                report, case.name, quantity, scores, difference=difference, limit=limit, **facts
            )


def _score(
    case: Case, implementation: str, exact: Expected, plain: Tensor, found: Tensor | None
) -> Score:
    """Returns the score of a result `found`; a missing result has an infinite error."""
    plain_error = peak_of(abs_difference(plain, exact.want))
    bound = tolerances.flash_rule(plain_error, peak_of(exact.want), exact.dtype, exact.floor)
    # Triton's interpreter does not round to bf16 exactly as the GPU does.
    truncates = implementation == "triton" and case.dtype == "bfloat16"
    slack = 1.0
    if truncates and exact.want.device.type == "cpu":
        slack = tolerances.TRITON_INTERPRETER_BF16
    error = of_bound = math.inf
    if found is not None:
        errors = abs_difference(found, exact.want)
        error, of_bound = peak_of(errors), peak_of(errors / exact.bound) / slack
    return Score(implementation, error, plain_error, min(slack * bound, exact.cap), of_bound)


def abs_difference(got: Tensor, want: Tensor) -> Tensor:
    """Returns `|got - want|` in fp64; infinity where the result is not finite."""
    if got.shape != want.shape:
        raise ValueError(f"a result has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    errors = (oracle.fp64(got) - want).abs()
    return torch.where(errors.isfinite(), errors, math.inf)


def peak_of(values: Tensor) -> float:
    return float(values.abs().max())


def judge(
    report: Report,
    case: str,
    side: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Expected],
) -> None:
    """Adds a line to the report for every expected quantity of one side, judged by the bound of
    each element.

    Args:
      found: the side's results, by quantity.
      expected: the fp64 values and bounds, by quantity.
    """
    for quantity, exact in expected.items():
        want, bound = torch.as_tensor(exact.want), torch.as_tensor(exact.bound)
        errors = abs_difference(torch.as_tensor(found[quantity]), want)
        of_bound = peak_of(errors / bound)
        values = {"error": peak_of(errors), "bound": peak_of(bound), "of_bound": of_bound}
        report.add(case, quantity, side=side, **values, ok=of_bound <= 1)


_Prepared = tuple[dict[str, Expected], Callable[[Any, str], Tensors]]


def _prepare_norm(case: Case, device: str) -> _Prepared:
    inputs = layer_inputs(case, device)
    s = case.scale
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b, s)
    want = oracle.norm(*adapter)
    norm_bound = tolerances.norm(*adapter)
    # g is computed from the exact norm rounded to fp32, so that only g's own error is tested.
    norm_fp32 = want.float()
    want_g = oracle.magnitude_scale(inputs.magnitude, norm_fp32, case.dtype)
    g_bound = tolerances.magnitude_scale(inputs.magnitude, norm_fp32, case.dtype)
    capped = case.dtype == "float32" and case.regime != "cancellation"
    cap = tolerances.caps.OPERATOR_FP32_MAX_ABS if capped else math.inf
    expected = {
        "norm": Expected(want, norm_bound, "float32", floor=peak_of(norm_bound), cap=cap),
        "g": Expected(want_g, g_bound, "float32", cap=cap),
    }

    def run(side: Any, implementation: str) -> Tensors:
        g = side.magnitude_scale(inputs.magnitude, norm_fp32, case.dtype, implementation)
        return {"norm": side.norm(inputs, s, implementation)(), "g": g}

    return expected, run


def _prepare_compose(case: Case, device: str) -> _Prepared:
    inputs = compose_inputs(case, device)
    s, frozen = case.scale, case.frozen_magnitude
    operands = (inputs.base, inputs.lora, inputs.g, s)
    fp32 = case.dtype == "float32"
    cap = tolerances.caps.OPERATOR_FP32_MAX_ABS if fp32 else math.inf
    expected: dict[str, Expected] = {}
    for delta, op in ((False, "compose"), (True, "compose_delta")):
        y_cap = cap
        want = getattr(oracle, op)(*operands)
        if delta and case.regime == "near_unity" and not fp32:
            naive = peak_of(abs_difference(naive_delta(inputs, s), want))
            y_cap = naive / tolerances.caps.STABLE_OVER_NAIVE
        bound = getattr(tolerances, op)(*operands, case.dtype)
        expected[f"{op} y"] = Expected(want, bound, case.dtype, cap=y_cap)
        grads = getattr(oracle, f"{op}_grads")(inputs.dy, *operands)
        bounds = tolerances.compose_grads(inputs.dy, *operands, case.dtype, delta=delta)
        for name in ("d_base", "d_lora"):
            want, bound = getattr(grads, name), getattr(bounds, name)
            expected[f"{op} {name}"] = Expected(want, bound, case.dtype, cap=cap)
        if not frozen:
            d_g_cap = tolerances.caps.D_MAGNITUDE_FP32_MAX_ABS if fp32 else math.inf
            inner = oracle.compose(inputs.base, inputs.lora, torch.ones_like(inputs.g), s)
            floor = peak_of(tolerances.stored_inner(inputs.dy, inner, case.dtype))
            expected[f"{op} d_g"] = Expected(grads.d_g, bounds.d_g, "float32", floor, d_g_cap)

    return expected, lambda side, name: side.compose(inputs, s, name, frozen=frozen)()


def prepare_layer(case: Case, device: str) -> _Prepared:
    """Returns a layer's expected results, by quantity, and a function that runs the layer on a
    side."""
    inputs = layer_inputs(case, device)
    frozen = case.frozen_magnitude
    return expected_layer(case, inputs), lambda side, name: side.layer(
        inputs, case.scale, name, frozen=frozen
    )()


def expected_layer(
    case: Case, inputs: LayerInputs, weight_roundings: int = 0
) -> dict[str, Expected]:
    """Returns the expected results of a layer for these inputs, by quantity.

    `weight_roundings`: see `tolerances.dora_linear`.
    """
    s, frozen = case.scale, case.frozen_magnitude
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    operands = (inputs.x, *adapter, inputs.magnitude, s)
    want = oracle.dora_linear(*operands, bias=inputs.bias, dtype=case.dtype)
    grads = oracle.dora_linear_grads(inputs.dy, *operands, dtype=case.dtype)
    bounds = tolerances.dora_linear(
        inputs.dy, *operands, case.dtype, bias=inputs.bias, weight_roundings=weight_roundings
    )
    # The plain computation forms W + sBA for its norm. The factored norm may lose more where W and
    # sBA cancel, and every product with g inherits this error, relative to its own size.
    relative_g = peak_of(bounds.relative_g)
    expected = {"y": Expected(want, bounds.y, case.dtype, peak_of(want) * relative_g)}
    for name in ("d_x", "d_lora_a", "d_lora_b", *["d_magnitude"] * (not frozen)):
        want, dtype = getattr(grads, name), case.dtype
        floor = peak_of(want) * relative_g
        if name == "d_magnitude":
            dtype = "float32"
            inner = inputs.x.double() @ oracle.direction(*adapter, s).T
            stored = tolerances.stored_inner(inputs.dy, inner, case.dtype)
            row_norm = oracle.norm(*adapter, s)
            floor += peak_of(stored / row_norm.clip(oracle.EPS[case.dtype]))
        expected[name] = Expected(want, getattr(bounds, name), dtype, floor)
    if case.bias:
        expected["d_bias"] = Expected(grads.d_bias, bounds.d_bias, case.dtype)
    return expected


_PREPARE: dict[str, Callable[[Case, str], _Prepared]] = {
    "norm": _prepare_norm,
    "compose": _prepare_compose,
    "layer": prepare_layer,
}
