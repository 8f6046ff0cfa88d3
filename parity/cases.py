"""Named cases, and their inputs, which are drawn once and given to both frameworks.

All arrays are torch tensors in PyTorch's layout on the device under test. Weights are scaled as in
trained networks: rows of W have a norm of about 1, and `sBA` is a fraction of that.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

from parity import oracle

Level = Literal["operator", "layer"]
Regime = Literal["trained", "near_unity", "cancellation", "zero_rows"]

NEAR_UNITY = 0.0015  # the distance of g from 1 in trained adapters (arXiv 2603.22276)

# rows × out: the paper's twenty activation shapes.
_PAPER = """
    1x512 1x4096 1x8192 1x28672 16x2048 64x4096 128x8192 512x2048 512x8192 1024x1024 1024x4096
    2048x2048 2048x6144 4096x4096 4096x8192 4096x28672 8192x4096 8192x8192 8192x28672 32768x8192
"""
PAPER_ACTIVATIONS = tuple(tuple(map(int, shape.split("x"))) for shape in _PAPER.split())
# On a CPU kernels are interpreted, so the same shapes are divided by these numbers.
CPU_ROWS_DIVISOR = 512
CPU_FEATURES_DIVISOR = 64

DTYPES = ("bfloat16", "float16", "float32")
RANKS = (8, 64, 384, 768)
SPECIAL: tuple[Regime, ...] = ("near_unity", "cancellation", "zero_rows")


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    A case of level `operator` with a rank checks norm and g of a weight `[out, in]`; one without a
    rank checks compose and compose_delta of `[rows, out]`. A case of level `layer` checks a whole
    projection.

    `dtype` is the dtype of weight, bias and activations, `adapter_dtype` that of lora_a and lora_b.
    The magnitude is fp32.
    """

    level: Level
    dtype: str
    n_out: int
    rows: int = 0
    n_in: int = 0
    rank: int = 0
    regime: Regime = "trained"
    adapter_dtype: str = "float32"
    rslora: bool = False
    bias: bool = True
    frozen_magnitude: bool = False

    @property
    def name(self) -> str:
        shape = {
            "norm": f"{self.n_in}x{self.n_out} r{self.rank}",
            "compose": f"{self.rows}x{self.n_out}",
            "layer": f"{self.rows}x{self.n_in}x{self.n_out} r{self.rank}",
        }[self.kind]
        words = [self.kind, shape, self.dtype]
        if self.kind != "compose" and self.adapter_dtype != self.dtype:
            words.append(f"{self.adapter_dtype} adapters")
        if self.regime != "trained":
            words.append(self.regime.replace("_", " "))
        words += ["rslora"] * self.rslora + ["frozen magnitude"] * self.frozen_magnitude
        words += ["no bias"] * (self.kind == "layer" and not self.bias)
        return " ".join(words)

    @property
    def kind(self) -> Literal["norm", "compose", "layer"]:
        if self.level == "layer":
            return "layer"
        return "norm" if self.rank else "compose"

    @property
    def scale(self) -> float:
        """Returns alpha/r, or alpha/sqrt(r), with the paper's alpha = r/2; without a rank, 0.7."""
        if not self.rank:
            return 0.7
        alpha = self.rank / 2
        return alpha / self.rank**0.5 if self.rslora else alpha / self.rank


@dataclass(frozen=True)
class ComposeInputs:
    base: torch.Tensor  # [rows, out]
    lora: torch.Tensor  # [rows, out]
    g: torch.Tensor  # fp32 [out]
    dy: torch.Tensor  # [rows, out], the cotangent


@dataclass(frozen=True)
class LayerInputs:
    weight: torch.Tensor  # [out, in]
    lora_a: torch.Tensor  # [r, in]
    lora_b: torch.Tensor  # [out, r]
    magnitude: torch.Tensor  # fp32 [out]
    x: torch.Tensor  # [rows, in]
    dy: torch.Tensor  # [rows, out], the cotangent
    bias: torch.Tensor | None  # [out]


def compose_inputs(case: Case, device: str) -> ComposeInputs:
    """Draws unit-normal base, lora and cotangent, and g = 1 + 0.05 · normal.

    In the regime near_unity, g is within 0.0015 of 1 and lora a tenth as large, as in a trained
    adapter: ΔY is small compared with base.
    """
    draw = _Draw(case, device)
    dtype = getattr(torch, case.dtype)
    spread, size = draw.normal(case.n_out) * 0.05, 1.0
    if case.regime == "near_unity":
        spread, size = draw.uniform(case.n_out) * NEAR_UNITY, 0.1
    return ComposeInputs(
        base=draw.normal(case.rows, case.n_out).to(dtype),
        lora=(draw.normal(case.rows, case.n_out) * size).to(dtype),
        g=1 + spread,
        dy=draw.normal(case.rows, case.n_out).to(dtype),
    )


def layer_inputs(case: Case, device: str) -> LayerInputs:
    """Draws W, A, B with `s‖BA‖` about 0.3 ‖W‖, and a magnitude near the norm.

    Regimes:

    - near_unity: the magnitude is within 0.0015 of the norm, relatively.
    - cancellation: W = -(1-t)·sBA, rounded, with t from 1/2 to 1/256 over the rows.
    - zero_rows: every fifth row of W and B is 0, and its magnitude is about eps.
    """
    draw = _Draw(case, device)
    dtype, adapter_dtype = getattr(torch, case.dtype), getattr(torch, case.adapter_dtype)
    weight = draw.normal(case.n_out, case.n_in) / case.n_in**0.5
    lora_a = (draw.normal(case.rank, case.n_in) / case.n_in**0.5).to(adapter_dtype)
    size = 0.3 / (case.scale * case.rank**0.5)
    lora_b = (draw.normal(case.n_out, case.rank) * size).to(adapter_dtype)
    if case.regime == "cancellation":
        t = 2.0 ** -torch.linspace(1, 8, case.n_out, device=device)
        weight = -(1 - t)[:, None] * case.scale * (lora_b.float() @ lora_a.float())
    if case.regime == "zero_rows":
        weight[::5] = 0
        lora_b[::5] = 0
    weight = weight.to(dtype)

    norm = oracle.norm(weight, lora_a, lora_b, case.scale)
    is_near = case.regime == "near_unity"
    offset = NEAR_UNITY * draw.uniform(case.n_out) if is_near else 0.05 * draw.normal(case.n_out)
    magnitude = (norm * (1 + offset)).float()
    if case.regime == "zero_rows":
        magnitude[::5] = 10 * oracle.EPS[case.dtype]

    rows = max(case.rows, 1)
    return LayerInputs(
        weight=weight,
        lora_a=lora_a,
        lora_b=lora_b,
        magnitude=magnitude,
        x=draw.normal(rows, case.n_in).to(dtype),
        dy=draw.normal(rows, case.n_out).to(dtype),
        bias=draw.normal(case.n_out).to(dtype) if case.bias else None,
    )


class _Draw:
    """A random source that is seeded with the case's name."""

    def __init__(self, case: Case, device: str) -> None:
        generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
        self._options: Any = {"generator": generator, "device": device}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, **self._options)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Draws from [-1, 1)."""
        return 2 * torch.rand(shape, **self._options) - 1


def cpu_cases() -> list[Case]:
    """Returns the paper's shapes scaled down, and all other cases at sizes that are fast to
    interpret."""
    small = dict.fromkeys(
        (-(-rows // CPU_ROWS_DIVISOR), -(-out // CPU_FEATURES_DIVISOR // 8) * 8)
        for rows, out in PAPER_ACTIVATIONS
    )
    return _distinct(
        *(compose("bfloat16", *shape) for shape in small),
        *(compose(dtype, 64, 128) for dtype in DTYPES),
        *(compose(dtype, 7, 72, regime="near_unity") for dtype in DTYPES),
        *(compose(dtype, 7, 72, frozen_magnitude=True) for dtype in DTYPES),
        *(compose(dtype, 5, 43) for dtype in DTYPES),
        *(norm("bfloat16", 96, 64, rank, adapter_dtype="bfloat16") for rank in RANKS),
        *(norm(dtype, 96, 64, 64, rslora=True) for dtype in DTYPES),
        *(norm(dtype, 192, 128, 16, regime=regime) for dtype in DTYPES for regime in SPECIAL),
        *(layer(dtype, 33, 96, 64, 16) for dtype in DTYPES),
        *(layer(dtype, 33, 96, 64, 16, adapter_dtype=dtype, rslora=True) for dtype in DTYPES),
        *(layer(dtype, 33, 96, 64, 16, regime="near_unity", bias=False) for dtype in DTYPES),
        *(layer(dtype, 33, 96, 64, 16, regime="zero_rows") for dtype in DTYPES),
        *(layer(dtype, 5, 27, 43, 3) for dtype in DTYPES),
        layer("float32", 33, 96, 64, 16, regime="cancellation"),
        layer("bfloat16", 33, 96, 64, 16, regime="cancellation"),
        layer("bfloat16", 33, 96, 64, 16, frozen_magnitude=True),
        layer("bfloat16", 8, 64, 96, 384),
        layer("bfloat16", 70, 128, 64, 8),
    )


def gpu_cases() -> list[Case]:
    """Returns the paper's full shapes, ranks up to 768, and the same special cases at realistic
    widths.

    A case takes about as long as its programs take to compile, so dtypes other than bf16 have fewer
    shapes.
    """
    return _distinct(
        *(compose("bfloat16", *shape) for shape in PAPER_ACTIVATIONS),
        *(compose("float16", *shape) for shape in ((1, 512), (8192, 28672))),
        *(compose("float32", *shape) for shape in ((1, 512), (8192, 28672), (32768, 8192))),
        *(compose(dtype, 4096, 8192, regime="near_unity") for dtype in DTYPES),
        compose("bfloat16", 4096, 8192, frozen_magnitude=True),
        compose("bfloat16", 777, 4104),
        compose("bfloat16", 77, 1003),
        *(norm("bfloat16", 8192, 8192, rank, adapter_dtype="bfloat16") for rank in RANKS),
        *(
            norm("bfloat16", *shape, 384, adapter_dtype="bfloat16")
            for shape in ((4096, 4096), (8192, 28672), (28672, 8192))
        ),
        *(norm(dtype, 8192, 8192, 384, rslora=True) for dtype in DTYPES),
        *(norm(dtype, 4096, 1024, 64, regime=regime) for dtype in DTYPES for regime in SPECIAL),
        *(layer(dtype, 4096, 8192, 8192, 384) for dtype in DTYPES),
        layer("bfloat16", 32768, 8192, 8192, 384),
        layer("bfloat16", 2048, 8192, 28672, 768),
        layer("bfloat16", 2048, 4096, 4096, 64, adapter_dtype="bfloat16", rslora=True),
        layer("bfloat16", 2048, 4096, 4096, 64, frozen_magnitude=True),
        layer("bfloat16", 777, 1000, 1112, 24),
        layer("bfloat16", 777, 1003, 1111, 24),
        *(
            layer(dtype, 2048, 4096, 4096, 64, regime="near_unity", bias=False)
            for dtype in ("bfloat16", "float32")
        ),
        *(layer(dtype, 2048, 4096, 4096, 64, regime="zero_rows") for dtype in DTYPES),
        *(
            layer(dtype, 2048, 4096, 4096, 64, regime="cancellation")
            for dtype in ("bfloat16", "float32")
        ),
    )


def _distinct(*cases: Case) -> list[Case]:
    return list(dict.fromkeys(cases))


def compose(dtype: str, rows: int, out: int, **other: Any) -> Case:
    return Case("operator", dtype, rows=rows, n_out=out, **other)


def norm(dtype: str, n_in: int, n_out: int, rank: int, **other: Any) -> Case:
    return Case("operator", dtype, n_in=n_in, n_out=n_out, rank=rank, **other)


def layer(dtype: str, rows: int, n_in: int, n_out: int, rank: int, **other: Any) -> Case:
    return Case("layer", dtype, rows=rows, n_in=n_in, n_out=n_out, rank=rank, **other)


def quick(cases: list[Case]) -> list[Case]:
    """Returns the smallest case of every kind, dtype and regime."""
    smallest: dict[tuple, Case] = {}
    for case in sorted(cases, key=lambda c: c.n_out * max(c.rows, c.n_in)):
        smallest.setdefault((case.kind, case.dtype, case.regime), case)
    return list(smallest.values())
