import pytest
import torch

from dora_common.triton import ring_expand
from dora_common.triton.expand_compose import Config
from tests.torch_dora.ops.triton.expansion import assert_agrees
from torch_dora.ops import compose, dora_linear
from torch_dora.ops.triton import expand_compose
from torch_dora.ops.triton.jit import SameLaunch

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("poisoned", "fresh_launches")
@pytest.mark.parametrize(
    ("dtype", "biased"), [(torch.bfloat16, True), (torch.float16, False)], ids=str
)
@pytest.mark.parametrize(
    "shape", [(5, 7, 3), (33, 40, 24), (1, 1, 1), (64, 96, 16), (150, 70, 40), (3, 130, 64)]
)
def test_equals_the_product_and_the_compose_in_fp64(
    operands, assert_within, monkeypatch, dtype, biased, shape, device
):
    small = Config(rows=16, columns=32, depth=16, warps=4, stages=1)
    monkeypatch.setattr(expand_compose, "config", lambda *call: small)
    monkeypatch.setattr(expand_compose, "STRIPS_FROM", 0)  # at ranks above 32
    assert_agrees(operands, assert_within, shape, dtype, device, biased, "triton")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_projection_uses_it_and_loses_less_than_two_kernels(adapted, monkeypatch, dtype):
    layer = adapted((64,), (40, 96, 16), dtype)
    kernels, call = [], SameLaunch.__call__

    def noted(launch, *tensors):
        kernels.append(launch.launch.kernel)
        call(launch, *tensors)

    monkeypatch.setattr(SameLaunch, "__call__", noted)
    x, weight, lora_a, lora_b, magnitude = layer[:5]
    norm = torch.full_like(magnitude, 1.0)
    y = dora_linear(x, weight, lora_a, lora_b, magnitude, 0.7, norm=norm, implementation="triton")
    assert kernels == [expand_compose.kernel]
    base, z = x @ weight.T, x @ lora_a.T
    two = compose(base, z @ lora_b.T, magnitude.float(), 0.7, implementation="eager")
    exact = magnitude.double() * (base.double() + 0.7 * (z.double() @ lora_b.double().T))
    floor = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype] * exact.abs().max()
    assert (y.double() - exact).abs().max() <= (two.double() - exact).abs().max() + floor


@pytest.mark.usefixtures("fresh_launches")
@pytest.mark.parametrize(
    ("rank", "rows", "features", "has_rings"),
    [
        (384, 4096, 1024, True),
        (384, 2**16, 64, False),
        (136, 4096, 1024, False),
        (136, 4096, 4096, True),
    ],
)
def test_rings_are_chosen_where_they_were_measured(monkeypatch, rank, rows, features, has_rings):
    monkeypatch.setattr(expand_compose, "has_rings", lambda *_: True)
    launch = expand_compose.prepared(90, rank, rows, features, 0.7, False, False)
    assert (launch.kernel is ring_expand.kernel) == has_rings


def test_fp32_is_refused():
    assert "tensor cores" in (expand_compose.refuses(torch.float32) or "")


@pytest.mark.parametrize(("want_inner", "biased"), [(False, True), (True, False)])
def test_the_operator_keeps_its_contract_with_torch(operands, device, want_inner, biased):
    base, bias, g, _ = operands((3, 8), torch.bfloat16)
    z, lora_b = (torch.randn(n, 4, device=device).bfloat16() for n in (3, 8))
    arguments = (base, z, lora_b, g, bias[0] if biased else None, 0.7, want_inner)
    torch.library.opcheck(expand_compose.expand_compose.op, arguments)
