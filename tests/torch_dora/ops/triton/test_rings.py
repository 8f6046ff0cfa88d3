"""The norm and expand and compose by rings of tiles, which a Hopper has for high ranks. Triton's
interpreter does not run them."""

import pytest
import torch

from dora_common.triton import ring_expand, ring_norm
from parity import oracle, tolerances
from tests.torch_dora.ops.triton.expansion import assert_agrees
from torch_dora.ops import dora_linear, plan
from torch_dora.ops.triton import expand_compose, one_pass_norm
from torch_dora.ops.triton.jit import DescribingLaunch

NATIVE = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_ones(monkeypatch, fresh_launches):
    """Rings also take small operands."""
    for module in (one_pass_norm, expand_compose):
        monkeypatch.setattr(module, "STRIPS_FROM", 0)


@NATIVE
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "sizes", [(200, 136, 136), (8, 24, 384), (136, 328, 264), (4104, 4097, 136), (4096, 2056, 384)]
)
def test_the_norm_agrees_with_the_oracle(adapted, assert_within, dtype, sizes):
    layer = adapted(sizes=sizes, dtype=dtype)
    operands = layer.weight, layer.lora_a, layer.lora_b
    norm = one_pass_norm.launch(*operands, 0.7)
    assert_within(norm, oracle.norm(*operands, 0.7), tolerances.norm(*operands, 0.7))
    assert torch.equal(norm, one_pass_norm.launch(*operands, 0.7))


@NATIVE
def test_a_row_of_nan_stays_one_and_operands_may_begin_anywhere(adapted, assert_within):
    layer = adapted(sizes=(136, 130, 136), dtype=torch.bfloat16)
    weight = layer.weight.new_empty(layer.weight.numel() + 1)[1:].view(layer.weight.shape)
    weight.copy_(layer.weight)
    operands = layer.weight, layer.lora_a, layer.lora_b
    norm = one_pass_norm.launch(weight, *operands[1:], 0.7)
    assert_within(norm, oracle.norm(*operands, 0.7), tolerances.norm(*operands, 0.7))
    weight[3, 130] = torch.nan
    norm = one_pass_norm.launch(weight, *operands[1:], 0.7)
    assert norm.isnan().nonzero().flatten().tolist() == [3]


@NATIVE
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(150, 72, 136), (3, 200, 384), (4104, 4104, 136)])
def test_expand_and_compose_agree_with_fp64(operands, assert_within, device, dtype, shape, biased):
    call, y = assert_agrees(operands, assert_within, shape, dtype, device, biased)
    base = call[0]
    expand_compose.launch(*call, False, base)
    assert torch.equal(base, y)


@NATIVE
def test_a_projection_and_its_gradients_are_those_of_the_other_kernels(adapted, monkeypatch):
    layer = adapted((300,), (200, 264, 136), torch.bfloat16)
    x, weight, *trained, bias, dy = layer
    leaves = [x.requires_grad_(), *(one.requires_grad_() for one in trained)]

    def compute():
        y = dora_linear(x, weight, *trained, 0.7, bias=bias)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    twice = [compute() for _ in range(2)]
    for module in (one_pass_norm, expand_compose):
        monkeypatch.setattr(module, "has_rings", lambda *_: False)
        module.prepared.cache_clear()
    plan._PLANS.clear()
    for found, again, want in zip(*twice, compute(), strict=True):
        assert torch.equal(found, again)
        assert (found.double() - want.double()).norm() <= 2.0**-7 * want.double().norm()


@pytest.mark.parametrize(
    ("rank", "row", "expected"),
    [
        (384, 4096, True),
        (136, 4096, True),
        (392, 4096, False),
        (128, 4096, False),
        (140, 4096, False),
    ],
)
def test_high_ranks_of_whole_tiles_have_rings(monkeypatch, rank, row, expected):
    monkeypatch.setattr(one_pass_norm, "TRITON_MODE", "compiled")
    *_, norm = one_pass_norm.prepared(90, rank, 4096, row, 0.7, 0, False)
    assert (norm.kernel is ring_norm.kernel, type(norm) is DescribingLaunch) == (expected, expected)
    expand = expand_compose.prepared(90, rank, 4096, row, 0.7, False, False)
    assert (expand.kernel is ring_expand.kernel, type(expand) is DescribingLaunch) == (
        expected,
        expected,
    )
    for call in ((80, rank, 4096, row, 0.7, 0, False), (90, rank, 4096, row, 0.7, 0, True)):
        assert one_pass_norm.prepared(*call)[2].kernel is one_pass_norm.kernel
    expand = expand_compose.prepared(80, rank, 4096, row, 0.7, False, False)
    assert expand.kernel is expand_compose.kernel
