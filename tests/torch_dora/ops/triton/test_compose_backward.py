import pytest
import torch

from dora_common.triton.compose_backward import Config, strip_height
from torch_dora.ops.compose import backward
from torch_dora.ops.triton import column_sums, compose_backward


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        *(((67, 40), wanted) for wanted in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0, 1)]),
        ((5, 7), (1, 1, 1)),
        ((1, 1), (1, 1, 1)),
    ],
    ids=str,
)
def test_every_variant_equals_the_plain_evaluation(operands, monkeypatch, delta, wanted, shape):
    _, inner, g, dy = operands(shape)
    want_base, want_lora, want_g = map(bool, wanted)
    inner = inner if want_g else None
    want = backward(dy, inner, g, 0.7, delta, want_base, want_lora, "eager")
    small = Config(rows=4, columns=16, warps=1, programs=12)
    monkeypatch.setattr(compose_backward, "CONFIG", small)
    monkeypatch.setattr(column_sums, "ELEMENTS", 64)
    call = (dy, inner, g, 0.7, delta, want_base, want_lora)
    found = compose_backward.compose_backward(*call)
    for got, expected in zip(found, (one for one in want if one is not None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 100, 4096, 5000, 32768, 10**7])
@pytest.mark.parametrize("features", [1, 64, 4096, 28672, 10**6])
def test_strips_are_few_enough_to_add_up_and_enough_to_fill_a_gpu(rows, features):
    config = Config()
    height = strip_height(config, rows, features)
    strips = -(-rows // height)
    assert height % config.rows == 0
    assert strips <= config.most_strips
    across = -(-features // config.columns)
    possible = min(-(-rows // config.rows), config.most_strips)
    assert strips * across >= min(config.programs, possible * across) / 2


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 1), (0, 0, 1), (1, 0, 0)], ids=str)
def test_the_operator_keeps_its_contract_with_torch(operands, wanted):
    _, inner, g, dy = operands((3, 8), torch.bfloat16)
    want_base, want_lora, want_g = map(bool, wanted)
    arguments = (dy, inner if want_g else None, g, 0.7, False, want_base, want_lora)
    torch.library.opcheck(compose_backward.compose_backward.op, arguments)
