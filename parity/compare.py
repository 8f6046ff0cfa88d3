"""Runs a case through both packages, the plain computations and the oracle, and judges it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from parity import jax_side, oracle, tolerances, torch_side
from parity.cases import Case, compose_inputs, layer_inputs

# Mosaic's kernels copy rows of whole 16 bytes, and refuse other widths when named.
MOSAIC_WIDTH = 8

SIDES = (jax_side, torch_side)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """How one framework did on one quantity. Errors are peaks of `|result - fp64|`.

    `plain_error` is that of the same computation in the framework's own plain operations, and
    `of_bound` the largest error of an element in units of that element's bound.
    """

    implementation: str
    error: float
    plain_error: float
    tolerance: float
    of_bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance and self.of_bound <= 1.0


@dataclass(frozen=True)
class Row:
    """One quantity of one case, in both frameworks. `difference` is the peak of |JAX - torch|."""

    case: str
    level: str
    dtype: str
    quantity: str
    jax: Side
    torch: Side
    difference: float
    difference_tolerance: float
    peak: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        agree = self.difference <= self.difference_tolerance
        return not self.failure and self.jax.passed and self.torch.passed and agree

    @property
    def worst(self) -> float:
        """The largest of all errors in units of what is allowed; above 1 means failed."""
        if self.failure:
            return math.inf
        pairs = [
            (self.jax.error, self.jax.tolerance),
            (self.torch.error, self.torch.tolerance),
            (self.difference, self.difference_tolerance),
        ]
        ratios = [error / allowed if allowed else math.inf * error for error, allowed in pairs]
        # 0 · inf: exact where nothing but exactness is allowed
        ratios = [0.0 if math.isnan(ratio) else ratio for ratio in ratios]
        return max(*ratios, self.jax.of_bound, self.torch.of_bound)

    def as_dict(self) -> dict:
        return dataclasses.asdict(self) | {"passed": self.passed, "worst": self.worst}


@dataclass(frozen=True)
class Expected:
    """What fp64 says of a quantity, and what may be missed.

    Attributes:
      want: the fp64 value.
      bound: per element, from `parity.tolerances`.
      dtype: in which the quantity is stored.
      floor: added to flash-attention's rule, for what the plain computation does not do.
      cap: the paper's, or infinity.
    """

    want: torch.Tensor
    bound: torch.Tensor
    dtype: str
    floor: float = 0.0
    cap: float = math.inf


def run_case(case: Case, device: str) -> Iterator[Row]:
    """Every quantity of the case, first by plain framework operations, then by the kernels."""
    expected, run, plain = _PREPARE[case.kind](case, device)
    plain_results = {side.NAME: plain(side) for side in SIDES}
    for kernels in (False, True):
        results: dict[str, Tensors] = {}
        names = {side.NAME: side.implementation(kernels) for side in SIDES}
        failures = []
        for side in SIDES:
            name = names[side.NAME]
            if name == "mosaic" and (case.n_out % MOSAIC_WIDTH or case.n_in % MOSAIC_WIDTH):
                name = names[side.NAME] = side.implementation(False)
            try:
                results[side.NAME] = run(side, name)
            except Exception as error:
                failures.append(f"{side.NAME} {name}: {type(error).__name__}: {error}")
        for quantity, exact in expected.items():
            yield _row(case, quantity, exact, results, plain_results, names, "; ".join(failures))


def _slack(implementation: str, case: Case, device: torch.device) -> float:
    """By how much an interpreter misses the arithmetic of the GPU that it stands for."""
    truncates = implementation == "triton" and case.dtype == "bfloat16" and device.type == "cpu"
    return tolerances.TRITON_INTERPRETER_BF16 if truncates else 1.0


def _row(
    case: Case,
    quantity: str,
    exact: Expected,
    results: dict[str, Tensors],
    plain_results: dict[str, Tensors],
    implementations: dict[str, str],
    failure: str,
) -> Row:
    peak = peak_of(exact.want)
    sides = []
    for side in SIDES:
        plain_error = peak_of(difference(plain_results[side.NAME][quantity], exact.want))
        allowed = tolerances.flash_rule(plain_error, peak, exact.dtype, exact.floor)
        implementation = implementations[side.NAME]
        slack = _slack(implementation, case, exact.want.device)
        error = of_bound = math.inf
        if quantity in results.get(side.NAME, {}):
            missed = difference(results[side.NAME][quantity], exact.want)
            error, of_bound = peak_of(missed), peak_of(missed / exact.bound) / slack
        sides.append(
            Side(
                implementation=implementation,
                error=error,
                plain_error=plain_error,
                tolerance=min(slack * allowed, exact.cap),
                of_bound=of_bound,
            )
        )
    both = [
        results[side.NAME][quantity] for side in SIDES if quantity in results.get(side.NAME, {})
    ]
    apart = peak_of(difference(both[0], oracle.fp64(both[1]))) if len(both) == 2 else math.inf
    return Row(
        case=case.name,
        level=case.level,
        dtype=case.dtype,
        quantity=quantity,
        jax=sides[0],
        torch=sides[1],
        difference=apart,
        # Both lie within their own tolerance of the same value.
        difference_tolerance=min(sides[0].tolerance + sides[1].tolerance, exact.cap),
        peak=peak,
        failure=failure,
    )


def difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """`|got - want|` in fp64; a result that is not finite is infinitely wrong."""
    if got.shape != want.shape:
        raise ValueError(f"a result has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    missed = (oracle.fp64(got) - want).abs()
    return torch.where(missed.isfinite(), missed, math.inf)


def peak_of(values: torch.Tensor) -> float:
    return float(values.abs().max())


_Prepared = tuple[
    dict[str, Expected],
    Callable[[ModuleType, str], Tensors],
    Callable[[ModuleType], Tensors],
]


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
    cap = tolerances.OPERATOR_FP32_MAX_ABS if capped else math.inf
    expected = {
        "norm": Expected(want, norm_bound, "float32", floor=peak_of(norm_bound), cap=cap),
        "g": Expected(want_g, g_bound, "float32", cap=cap),
    }

    def run(side: ModuleType, implementation: str) -> Tensors:
        g = side.magnitude_scale(inputs.magnitude, given, case.dtype)
        return {"norm": side.norm(inputs, s, implementation), "g": g}

    def plain(side: ModuleType) -> Tensors:
        g = side.plain_magnitude_scale(inputs.magnitude, given, case.dtype)
        return {"norm": side.plain_norm(inputs, s), "g": g}

    return expected, run, plain


def _prepare_compose(case: Case, device: str) -> _Prepared:
    inputs = compose_inputs(case, device)
    s, frozen = case.scale, case.frozen_magnitude
    operands = (inputs.base, inputs.lora, inputs.g, s)
    expected: dict[str, Expected] = {}
    naive = math.inf
    for delta, op in ((False, "compose"), (True, "compose_delta")):
        forward, backward, forward_bound = (
            (oracle.compose_delta, oracle.compose_delta_grads, tolerances.compose_delta)
            if delta
            else (oracle.compose, oracle.compose_grads, tolerances.compose)
        )
        fp32 = case.dtype == "float32"
        cap = tolerances.OPERATOR_FP32_MAX_ABS if fp32 else math.inf
        y_cap = cap
        want = forward(*operands)
        if delta and case.regime == "near_unity" and not fp32:
            naive = peak_of(difference(torch_side.naive_delta(inputs, s), want))
            y_cap = naive / tolerances.STABLE_OVER_NAIVE
        bound = forward_bound(*operands, case.dtype)
        expected[f"{op} y"] = Expected(want, bound, case.dtype, cap=y_cap)
        grads = backward(inputs.dy, *operands)
        bounds = tolerances.compose_grads(inputs.dy, *operands, case.dtype, delta=delta)
        for name in ("d_base", "d_lora"):
            expected[f"{op} {name}"] = Expected(
                getattr(grads, name), getattr(bounds, name), case.dtype, cap=cap
            )
        if not frozen:
            d_g_cap = tolerances.D_MAGNITUDE_FP32_MAX_ABS if fp32 else math.inf
            inner = oracle.compose(inputs.base, inputs.lora, torch.ones_like(inputs.g), s)
            floor = peak_of(tolerances.stored_inner(inputs.dy, inner, case.dtype))
            expected[f"{op} d_g"] = Expected(grads.d_g, bounds.d_g, "float32", floor, d_g_cap)

    def run(side: ModuleType, implementation: str) -> Tensors:
        return side.compose(inputs, s, implementation, frozen=frozen)

    def plain(side: ModuleType) -> Tensors:
        return side.plain_compose(inputs, s, frozen=frozen)

    return expected, run, plain


def _prepare_layer(case: Case, device: str) -> _Prepared:
    inputs = layer_inputs(case, device)
    s, frozen = case.scale, case.frozen_magnitude
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    operands = (inputs.x, *adapter, inputs.magnitude, s)
    want = oracle.dora_linear(*operands, bias=inputs.bias, dtype=case.dtype)
    grads = oracle.dora_linear_grads(inputs.dy, *operands, dtype=case.dtype)
    bounds = tolerances.dora_linear(inputs.dy, *operands, case.dtype, bias=inputs.bias)
    # The plain computation's norm is materialised; the factored one may lose more where W and sBA
    # cancel, and everything that g multiplies inherits that, relative to its own size.
    relative_g = peak_of(bounds.relative_g)
    wanted = {"y": (want, bounds.y)} | {
        name: (getattr(grads, name), getattr(bounds, name))
        for name in ("d_x", "d_lora_a", "d_lora_b", "d_magnitude", "d_bias")
        if not (name == "d_magnitude" and frozen) and not (name == "d_bias" and not case.bias)
    }
    floors = {name: peak_of(value) * relative_g for name, (value, _) in wanted.items()}
    floors["d_bias"] = 0.0
    if not frozen:
        row_norm = oracle.norm(*adapter, s)
        inner = inputs.x.double() @ oracle.direction(*adapter, s).T
        stored = tolerances.stored_inner(inputs.dy, inner, case.dtype)
        floors["d_magnitude"] += peak_of(stored / row_norm.clip(oracle.EPS[case.dtype]))
    expected = {
        name: Expected(
            value,
            bound,
            "float32" if name == "d_magnitude" else case.dtype,
            floor=floors[name],
        )
        for name, (value, bound) in wanted.items()
    }

    def run(side: ModuleType, implementation: str) -> Tensors:
        return side.layer(inputs, s, implementation, frozen=frozen)

    def plain(side: ModuleType) -> Tensors:
        return side.plain_layer(inputs, s, frozen=frozen)

    return expected, run, plain


_PREPARE: dict[str, Callable[[Case, str], _Prepared]] = {
    "norm": _prepare_norm,
    "compose": _prepare_compose,
    "layer": _prepare_layer,
}
