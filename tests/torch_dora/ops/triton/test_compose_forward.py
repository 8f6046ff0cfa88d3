import pytest
import torch

from dora_common.triton.compose_forward import Config
from torch_dora.ops.compose import forward
from torch_dora.ops.triton import compose_forward


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (9, 40), (1, 1), (17, 33)])
def test_every_variant_equals_the_plain_evaluation(operands, monkeypatch, delta, biased, shape):
    base, lora, g, _ = operands(shape)
    bias = torch.randn_like(g) if biased else None
    want, want_inner = forward(
        base, lora, g, bias, 0.7, delta=delta, want_inner=True, implementation="eager"
    )
    monkeypatch.setattr(compose_forward, "CONFIG", Config(rows=4, columns=16, warps=1))
    (alone,) = compose_forward.compose(base, lora, g, bias, 0.7, delta, False)
    result, inner = compose_forward.compose(base, lora, g, bias, 0.7, delta, True)
    assert torch.equal(alone, result)
    torch.testing.assert_close(result, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inner, want_inner, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("want_inner", "biased"), [(False, False), (True, True)])
def test_the_operator_keeps_its_contract_with_torch(operands, want_inner, biased):
    base, lora, g, _ = operands((3, 8), torch.bfloat16)
    bias = torch.randn(8, device=base.device) if biased else None
    for strided, delta in ((base, False), (base.mT.mT, True)):
        arguments = (strided, lora, g, bias, 0.7, delta, want_inner)
        torch.library.opcheck(compose_forward.compose.op, arguments)
