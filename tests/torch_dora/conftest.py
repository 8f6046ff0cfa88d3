"""Operands, devices and comparisons for the torch tests."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from parity import tolerances

HALVES = (torch.float16, torch.bfloat16)


class Operands(NamedTuple):
    """What the compose operators take, and a cotangent of their result."""

    base: Tensor
    lora: Tensor
    g: Tensor
    dy: Tensor


class Adapted(NamedTuple):
    """What `dora_linear` takes, and a cotangent of its result."""

    x: Tensor
    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor
    bias: Tensor
    dy: Tensor


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A CPU, with Triton's kernels in their interpreter; a GPU under `-m gpu`."""
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """A process whose user allows TensorFloat-32 in matrix products."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def operands(device: str) -> Callable[..., Operands]:
    """Random operands with g within `spread` of 1."""

    def make(
        shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 0.1
    ) -> Operands:
        base, lora, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        wide = torch.promote_types(dtype, torch.float32)
        g = 1 + spread * torch.randn(shape[-1], device=device, dtype=wide)
        return Operands(base, lora, g, dy)

    return make


@pytest.fixture
def adapted(device: str) -> Callable[..., Adapted]:
    """A random layer with non-zero lora_b and a magnitude within a few percent of the norm."""

    def make(
        rows: tuple[int, ...] = (3, 11),
        sizes: tuple[int, int, int] = (40, 56, 8),
        dtype: torch.dtype = torch.float32,
        adapter_dtype: torch.dtype | None = None,
        scale: float = 0.7,
    ) -> Adapted:
        in_features, out_features, rank = sizes
        adapter_dtype = adapter_dtype or dtype

        def normal(*shape: int, to: torch.dtype, size: float = 1.0) -> Tensor:
            return (size * torch.randn(shape, device=device, dtype=torch.float64)).to(to)

        weight = normal(out_features, in_features, to=dtype, size=in_features**-0.5)
        lora_a = normal(rank, in_features, to=adapter_dtype, size=in_features**-0.5)
        lora_b = normal(out_features, rank, to=adapter_dtype, size=0.3)
        direction = weight.double() + scale * (lora_b.double() @ lora_a.double())
        wide = torch.promote_types(adapter_dtype, torch.float32)
        spread = 1 + 0.03 * normal(out_features, to=torch.float64)
        return Adapted(
            x=normal(*rows, in_features, to=dtype),
            weight=weight,
            lora_a=lora_a,
            lora_b=lora_b,
            magnitude=(direction.norm(dim=1) * spread).to(wide),
            bias=normal(out_features, to=dtype),
            dy=normal(*rows, out_features, to=dtype),
        )

    return make


@pytest.fixture
def assert_within(device: str) -> Callable[..., None]:
    """`assert_within(got, want, bound)`: no element of `got` is further off than its bound."""
    # Imported late: this file is read before the tests' configuration tells Triton to interpret.
    from torch_dora.ops import choose

    def check(got: Tensor, want: Tensor, bound: Tensor, implementation: str = "eager") -> None:
        slack = 1.0
        interpreted = implementation == "triton" and choose.TRITON_MODE == "interpreted"
        if interpreted and got.dtype == torch.bfloat16:
            slack = tolerances.TRITON_INTERPRETER_BF16
        assert got.shape == want.shape
        error = (got.detach().double() - want).abs()
        assert bool((error <= slack * bound).all()), f"{(error / bound).max()} of the bound"

    return check


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, so that what a kernel leaves unwritten shows."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_nan(*args, **kwargs) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate_nan

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))
