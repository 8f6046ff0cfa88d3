"""Expand and compose beside fp64, for all its kernels."""

from collections.abc import Callable
from typing import Any

import torch

from torch_dora.ops.triton import expand_compose


def assert_agrees(
    operands: Callable[..., Any],
    assert_within: Callable[..., None],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    biased: bool,
    *bound: str,
) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Compares y and inner with fp64, for (rows, features, rank).

    Returns the operands, and y.
    """
    rows, out, rank = shape
    base, _, g, _ = operands((rows, out), dtype)
    z = torch.randn(rows, rank, device=device).to(dtype)
    lora_b = torch.randn(out, rank, device=device).to(dtype)
    bias = torch.randn(out, device=device).to(dtype) if biased else None
    unbiased = base.double() if bias is None else base.double() - bias.double()
    scaled = 0.7 * (z.double() @ lora_b.double().T)
    want = base.double() + ((g.double() - 1) * unbiased + g.double() * scaled)
    terms = 0.7 * (z.double().abs() @ lora_b.double().abs().T) + base.double().abs()
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]

    call = (base, z, lora_b, g, bias, 0.7)
    (alone,) = expand_compose.expand_compose(*call, False)
    y, inner = expand_compose.expand_compose(*call, True)
    assert torch.equal(alone, y)
    for got, exact in ((y, want), (inner, unbiased + scaled)):
        assert_within(got, exact, unit * exact.abs() + 8 * 2.0**-24 * terms, *bound)
    return call, y
