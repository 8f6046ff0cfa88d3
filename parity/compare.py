"""Runs a case through both packages, the plain computations and the oracle, and judges it."""

from __future__ import annotations

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

# Mosaic's kernels copy rows of whole 16 bytes, and refuse other widths when named.
MOSAIC_WIDTH = 8

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Score:
    """One side's result on one quantity. Errors are peaks of `|result - fp64|`.

    `plain` is the error of the same computation in the framework's own plain operations, and
    `of_bound` the largest error of an element in units of that element's bound.
    """

    implementation: str
    error: float
    plain: float
    bound: float
    of_bound: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.bound and (self.of_bound is None or self.of_bound <= 1.0)


def add_both(
    report: Report,
    case: str,
    quantity: str,
    scores: Mapping[Backend, Score],
    *,
    apart: float,
    allowed: float,
    **values: Any,
) -> None:
    """Adds a line to the report: each side, and then how far they are `apart`, and may be."""
    each = list(scores.values())
    sides = [f"{name} {score.implementation}" for name, score in scores.items()]
    values["side"] = [*sides, ", ".join(sides)]
    values["error"] = [*(s.error for s in each), apart]
    values["bound"] = [*(s.bound for s in each), allowed]
    values["ok"] = [*(s.passed for s in each), apart <= allowed]
    values["plain"] = [*(s.plain for s in each), None]
    if any(s.of_bound is not None for s in each):
        values["of_bound"] = [*(s.of_bound for s in each), None]
    report.add(case, quantity, **values)


@dataclass(frozen=True)
class Expected:
    """The fp64 value of a quantity, and what may be missed.

    Attributes:
      want: the fp64 value.
      bound: per element, from `parity.tolerances`.
      dtype: in which the quantity is stored.
      floor: added to flash-attention's rule, for what the plain computation does not do.
      cap: the paper's, or infinity.
    """

    want: Any
    bound: Any
    dtype: str
    floor: float = 0.0
    cap: float = math.inf


def run_case(report: Report, case: Case, device: str) -> None:
    """Adds every quantity of the case, first by plain framework operations, then by kernels."""
    expected, run = _PREPARE[case.kind](case, device)
    plain = {name: run(side.operators, "plain") for name, side in SIDES.items()}
    mosaic_refuses = bool(case.n_out % MOSAIC_WIDTH or case.n_in % MOSAIC_WIDTH)
    for kernels in (False, True):
        names: dict[Backend, str] = {}
        results: dict[Backend, Tensors] = {}
        failures = []
        for name, side in SIDES.items():
            takes = kernels and not (side.kernels == "mosaic" and mosaic_refuses)
            names[name] = side.kernels if takes else side.plain
            try:
                results[name] = run(side.operators, names[name])
            except Exception as error:
                failures.append(f"{name} {names[name]}: {type(error).__name__}: {error}")
        note = {"note": "; ".join(failures)} if failures else {}
        for quantity, exact in expected.items():
            found = {side: of[quantity] for side, of in results.items() if quantity in of}
            scores = {
                side: _score(case, name, exact, plain[side][quantity], found.get(side))
                for side, name in names.items()
            }
            apart = math.inf
            if len(found) == len(SIDES):
                apart = peak_of(difference(found["jax"], oracle.fp64(found["torch"])))
            # Both lie within their own tolerance of the same value.
            allowed = min(sum(score.bound for score in scores.values()), exact.cap)
            facts = {"dtype": case.dtype, "peak": peak_of(exact.want), **note}
            add_both(report, case.name, quantity, scores, apart=apart, allowed=allowed, **facts)


def _score(
    case: Case, implementation: str, exact: Expected, plain: Tensor, found: Tensor | None
) -> Score:
    """Returns how far a result, infinitely far where there is none, and the plain computation's lie
    from fp64's."""
    plain_error = peak_of(difference(plain, exact.want))
    bound = tolerances.flash_rule(plain_error, peak_of(exact.want), exact.dtype, exact.floor)
    # An interpreter may miss the arithmetic of the GPU that it stands for.
    truncates = implementation == "triton" and case.dtype == "bfloat16"
    slack = 1.0
    if truncates and exact.want.device.type == "cpu":
        slack = tolerances.TRITON_INTERPRETER_BF16
    error = of_bound = math.inf
    if found is not None:
        missed = difference(found, exact.want)
        error, of_bound = peak_of(missed), peak_of(missed / exact.bound) / slack
    return Score(implementation, error, plain_error, min(slack * bound, exact.cap), of_bound)


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Returns `|got - want|` in fp64; a result that is not finite is infinitely wrong."""
    if got.shape != want.shape:
        raise ValueError(f"a result has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    missed = (oracle.fp64(got) - want).abs()
    return torch.where(missed.isfinite(), missed, math.inf)


def peak_of(values: Tensor) -> float:
    return float(values.abs().max())


def judge(
    report: Report,
    case: str,
    side: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Expected],
) -> None:
    """Adds a line to the report for every quantity that is expected of a side, of which it found
    arrays: how far they lie from fp64's, and by which bound of each element."""
    for quantity, exact in expected.items():
        want, bound = torch.as_tensor(exact.want), torch.as_tensor(exact.bound)
        missed = difference(torch.as_tensor(found[quantity]), want)
        of_bound = peak_of(missed / bound)
        values = {"error": peak_of(missed), "bound": peak_of(bound), "of_bound": of_bound}
        report.add(case, quantity, side=side, **values, ok=of_bound <= 1)


_Prepared = tuple[dict[str, Expected], Callable[[Any, str], Tensors]]


def _prepare_norm(case: Case, device: str) -> _Prepared:
    inputs = layer_inputs(case, device)
    s = case.scale
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b, s)
    want = oracle.norm(*adapter)
    norm_bound = tolerances.norm(*adapter)
    # g is given the exact norm, in fp32: its own error, not the norm's.
    given = want.float()
    want_g = oracle.magnitude_scale(inputs.magnitude, given, case.dtype)
    g_bound = tolerances.magnitude_scale(inputs.magnitude, given, case.dtype)
    capped = case.dtype == "float32" and case.regime != "cancellation"
    cap = tolerances.caps.OPERATOR_FP32_MAX_ABS if capped else math.inf
    expected = {
        "norm": Expected(want, norm_bound, "float32", floor=peak_of(norm_bound), cap=cap),
        "g": Expected(want_g, g_bound, "float32", cap=cap),
    }

    def run(side: Any, implementation: str) -> Tensors:
        g = side.magnitude_scale(inputs.magnitude, given, case.dtype, implementation)
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
            naive = peak_of(difference(naive_delta(inputs, s), want))
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
    """Returns the expected results of a layer, by quantity, and the function that runs one."""
    inputs = layer_inputs(case, device)
    frozen = case.frozen_magnitude
    return expected_layer(case, inputs), lambda side, name: side.layer(
        inputs, case.scale, name, frozen=frozen
    )()


def expected_layer(case: Case, inputs: LayerInputs) -> dict[str, Expected]:
    """Returns the expected results of a layer over these inputs, by quantity."""
    s, frozen = case.scale, case.frozen_magnitude
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    operands = (inputs.x, *adapter, inputs.magnitude, s)
    want = oracle.dora_linear(*operands, bias=inputs.bias, dtype=case.dtype)
    grads = oracle.dora_linear_grads(inputs.dy, *operands, dtype=case.dtype)
    bounds = tolerances.dora_linear(inputs.dy, *operands, case.dtype, bias=inputs.bias)
    # The plain computation's norm is materialised; the factored one may lose more where W and sBA
    # cancel, and everything that g multiplies inherits that, relative to its own size.
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
