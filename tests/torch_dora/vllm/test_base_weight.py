"""Norms from a layer's own product, for layers that round their inputs as vLLM's do."""

import pytest
import torch

from torch_dora.ops import choose
from torch_dora.vllm import base_weight
from torch_dora.vllm.base_weight import BaseWeight
from torch_dora.vllm.folder import FolderError

IN, OUT = 600, 40  # more inputs than unit vectors in one product
LARGEST = 448.0  # of float8_e4m3fn


def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def as_float8(x, scale):
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x) * scale


def exact(x):
    return x


def dynamic_float8(x):
    return as_float8(x, x.abs().amax(-1, keepdim=True) / LARGEST)


def static_float8(x):
    return as_float8(x, 0.013)


def dynamic_int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def four_bits(x):
    """Three numbers of each sign and zero, in blocks of 16 inputs."""
    blocks = x.unflatten(-1, (-1, 8))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-9).to(torch.float8_e4m3fn).to(x) / 3
    return ((blocks / scale).round().clamp(-3, 3) * scale).flatten(-2)


def measured(rounded, dtype=torch.float32, unit=1.0, readable=False):
    w = weight().to(dtype)
    product = lambda x: (rounded(x.float()) @ w.float().T).to(dtype)  # noqa: E731
    options = {"features": IN, "dtype": dtype, "device": torch.device("cpu"), "unit": unit}
    return w.double(), BaseWeight("qkv_proj", w if readable else None, product, **options)


def adapter(rows, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, IN, generator=generator).bfloat16()
    b = torch.randn(rows, rank, generator=generator).bfloat16() / 3
    return a, b


@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize(
    ("rounded", "unit"),
    [(exact, 1.0), (dynamic_float8, 1.0), (dynamic_int8, 1.0), (static_float8, 0.013)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_weight(rounded, unit, readable, dtype):
    w, base = measured(rounded, dtype, unit, readable)
    parts = [(slice(0, 30), *adapter(30, 3, 1)), (slice(30, 40), *adapter(10, 5, 2))]
    for _ in range(2):  # measured, and remembered
        for (rows, a, b), found in zip(parts, base.squares(parts), strict=True):
            expected = (w[rows] + b.double() @ a.double()).square().sum(1)
            # Rounding of the product to bf16, relative to its part of the sum.
            bound = 3e-6 if dtype == torch.float32 or readable else 3e-3
            assert float((found / expected - 1).abs().max()) < bound


def test_the_kernel_of_the_norm_is_launched_where_the_operator_would(monkeypatch):
    _, base = measured(exact, torch.bfloat16, readable=True)
    parts = [(slice(0, 30), *adapter(30, 16, 1)), (slice(30, 40), *adapter(10, 16, 2))]
    base_weight._is_one_kernel.cache_clear()
    expected = base.squares(parts)
    launched = []
    monkeypatch.setattr(choose, "triton_wins", lambda call: True)
    monkeypatch.setattr(
        base_weight.one_pass_norm,
        "launch",
        lambda *given, run=base_weight.one_pass_norm.launch: launched.append(given) or run(*given),
    )
    base_weight._is_one_kernel.cache_clear()
    found = base.squares(parts)
    base_weight._is_one_kernel.cache_clear()
    assert len(launched) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=0)
    mixed = [(rows, a.float(), b) for rows, a, b in parts]
    base.squares(mixed)
    base_weight._is_one_kernel.cache_clear()
    assert len(launched) == 2  # It multiplies A and B of one dtype.


@pytest.mark.parametrize(("rounded", "unit"), [(static_float8, 1.0), (four_bits, 1.0)])
def test_a_layer_whose_weight_its_product_does_not_give_is_refused(rounded, unit):
    """The unit vectors are rounded, or beyond the largest number, so the norms would be wrong."""
    _, base = measured(rounded, unit=unit)
    with pytest.raises(FolderError, match="qkv_proj: its product of unit vectors is not"):
        base.squares([(slice(0, OUT), *adapter(OUT, 3, 1))])
