"""In evaluation torch.nn.TransformerEncoderLayer reads its linear layers' weights and calls none of
them; adapted ones are called."""

import copy

import pytest
import torch
from torch import nn

from tests.torch_dora.adapters import trained
from torch_dora import (
    AdapterBank,
    DoRALinear,
    DoRARule,
    apply_dora,
    freeze,
    merge_dora,
    remove_dora,
    with_bank,
)

# Of nested tensors, which torch.nn.TransformerEncoder makes too.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

RULE = DoRARule(r".*linear\d", 2, 4)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.fixture(params=["whole", "padded"])
def arguments(request):
    """What the encoder is called with, and which positions of its result count."""
    padded = torch.zeros(2, 5, dtype=torch.bool)
    if request.param == "whole":
        return {"src": torch.randn(2, 5, 16)}, ~padded
    padded[1, 3:] = True
    return {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padded}, ~padded


def called(model, arguments, gradient=False):
    inputs, counts = arguments
    with torch.set_grad_enabled(gradient):
        return model(**inputs)[counts]


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def test_adapters_act_in_evaluation_as_in_training(arguments):
    model = encoder()
    base = called(model, arguments)
    trained(apply_dora(model, RULE))
    expected = called(model.train(), arguments)
    assert (expected - base).abs().max() > 1e-2
    for one in (model.eval(), copy.deepcopy(model), merge_dora(model), freeze(model)):
        for gradient in (False, True):
            found = called(one, arguments, gradient)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(called(remove_dora(model), arguments), base)


def test_only_adapted_layers_leave_the_fast_path():
    model = apply_dora(encoder(), DoRARule("layers.1.linear1", 2, 4))
    assert [len(hooks(layer)) for layer in model.layers] == [0, 1]
    assert not model.use_nested_tensor
    for one in (merge_dora(model), remove_dora(model)):
        assert not hooks(one)
        assert one.use_nested_tensor


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_rows_are_those_of_each_alone(layout):
    layer = trained(DoRALinear(16, 16, rank=2, alpha=4))
    rows = [torch.randn(n, 16, requires_grad=True) for n in (5, 3)]
    x = torch.nested.as_nested_tensor(rows, layout=layout)
    for one, y in zip(rows, (x + layer(x)).unbind(), strict=True):
        torch.testing.assert_close(y, one + layer(one), rtol=1e-4, atol=1e-5)


def test_a_bank_acts_in_evaluation(arguments):
    model = encoder()
    base = called(model, arguments)
    adapted = trained(apply_dora(copy.deepcopy(model), RULE))
    bank = AdapterBank(model, 2, 2, path=RULE.path).load(1, adapted)
    expected = called(adapted, arguments)
    found = called(with_bank(model, bank, [1, 1]), arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(called(model, arguments), base)
    assert not hooks(model)
