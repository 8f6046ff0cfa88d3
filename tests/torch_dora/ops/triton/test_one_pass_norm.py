import itertools

import pytest
import torch

from dora_common.triton.expand_compose import Config
from parity import oracle, tolerances
from torch_dora.ops import factored_norm
from torch_dora.ops.choose import Call
from torch_dora.ops.quantised import Codes
from torch_dora.ops.triton import column_sums, one_pass_norm

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, fresh_launches):
    small = Config(rows=16, columns=32, depth=16, warps=4, stages=1)
    monkeypatch.setattr(one_pass_norm, "config", lambda rank, **call: small)
    monkeypatch.setattr(column_sums, "ELEMENTS", 32)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("sizes", "dtype", "adapter_dtype"),
    [
        *itertools.product([(40, 56, 8), (129, 37, 3)], HALVES, [None, torch.float32]),
        ((1, 5, 1), torch.float16, torch.float32),
        ((64, 1, 40), torch.bfloat16, None),
    ],
)
def test_agrees_with_the_oracle(adapted, assert_within, dtype, adapter_dtype, sizes):
    layer = adapted(sizes=sizes, dtype=dtype, adapter_dtype=adapter_dtype or dtype)
    operands = layer.weight, layer.lora_a, layer.lora_b
    norm = one_pass_norm.launch(*operands, 0.7)
    assert_within(norm, oracle.norm(*operands, 0.7), tolerances.norm(*operands, 0.7))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", [(150, 141, 40), (7, 300, 33), (264, 5, 64)])
def test_strips_agree_with_the_oracle(adapted, assert_within, monkeypatch, dtype, sizes):
    monkeypatch.setattr(one_pass_norm, "STRIPS_FROM", 0)
    layer = adapted(sizes=sizes, dtype=dtype)
    operands = layer.weight, layer.lora_a, layer.lora_b
    norm = one_pass_norm.launch(*operands, 0.7)
    assert_within(norm, oracle.norm(*operands, 0.7), tolerances.norm(*operands, 0.7))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 40, 8), (38, 129, 3), (6, 1, 1), (66, 64, 40)])
def test_codes_stand_for_their_levels(adapted, assert_within, device, dtype, sizes):
    in_features, out_features, _ = sizes
    layer, count = adapted(sizes=sizes, dtype=dtype), in_features * out_features
    packed = torch.randint(256, (count // 2,), dtype=torch.uint8, device=device)
    levels = torch.randn(16, device=device)
    scales = torch.rand(-(-count // 32), device=device)
    values = levels.double()[torch.stack([packed >> 4, packed & 15], 1).long()]
    values = values.flatten() * scales.double().repeat_interleave(32)[:count]
    operands = values.reshape(out_features, in_features), layer.lora_a, layer.lora_b
    codes = Codes(packed, levels, scales, 32)
    norm = one_pass_norm.launch(codes, layer.lora_a, layer.lora_b, 0.7)
    bound = tolerances.norm(*operands, 0.7, weight_roundings=1)
    assert_within(norm, oracle.norm(*operands, 0.7), bound)


def test_cancellation_costs_nothing(adapted):
    layer = adapted(sizes=(64, 32, 16), dtype=torch.bfloat16)
    weight = (-0.7 * layer.lora_b.double() @ layer.lora_a.double()).bfloat16()
    operands = weight, layer.lora_a, layer.lora_b
    exact = oracle.norm(*operands, 0.7)
    one_pass = one_pass_norm.launch(*operands, 0.7)
    factored = factored_norm(*operands, 0.7, implementation="eager")
    error = ((one_pass - exact).abs() / exact).max()
    # An element of s·BA carries a few roundings of the terms that cancel, 2⁸ times what is left.
    assert error < 2.0**-14
    assert error < 0.2 * ((factored - exact).abs() / exact).max()


def test_a_row_that_is_nan_and_one_that_is_zero(adapted):
    layer = adapted(dtype=torch.bfloat16)
    layer.weight[2, 1] = torch.nan
    layer.weight[3], layer.lora_b[3] = 0, 0
    norm = one_pass_norm.launch(layer.weight, layer.lora_a, layer.lora_b, 0.7)
    assert norm.isnan().nonzero().flatten().tolist() == [2]
    assert norm[3] == 0


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), None),
        ((torch.float16, torch.bfloat16, torch.bfloat16), None),
        ((torch.bfloat16, torch.float32, torch.float32), None),
        ((torch.float32, torch.float32, torch.float32), "got torch.float32"),
        ((torch.bfloat16, torch.bfloat16, torch.float16), "share a dtype"),
    ],
)
def test_refuses_what_the_factored_form_does_better(dtypes, reason):
    refusal = one_pass_norm.refuses(Call(8, 8, dtypes, "cuda"))
    assert refusal is None if reason is None else reason in (refusal or "")


def test_factored_norm_uses_it(adapted, monkeypatch):
    layer = adapted(dtype=torch.bfloat16)
    operands = layer.weight, layer.lora_a, layer.lora_b
    calls = []
    norm = one_pass_norm.launch
    monkeypatch.setattr(one_pass_norm, "launch", lambda *a: (calls.append(1), norm(*a))[1])
    factored_norm(*operands, 0.7, implementation="triton")
    assert calls == [1]
