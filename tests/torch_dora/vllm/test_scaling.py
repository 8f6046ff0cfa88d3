"""The multiplication by g, on a layer that is like vLLM's."""

import copy

import torch
from torch import nn

from torch_dora.vllm import scaling


class Method:
    """Like a linear method of vLLM: layers may share it."""

    def __init__(self):
        self.scale = 2.0

    def apply(self, layer, x, bias=None):
        y = (x @ layer.weight.T) * self.scale
        return y if bias is None else y + bias


class Layer(nn.Module):
    row_scales: scaling.RowScales

    def __init__(self, method):
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(6), requires_grad=False)


def scaled(slots=3, tokens=16, dtype=torch.float32):
    method = Method()
    layer, other = Layer(method).to(dtype), Layer(method)
    rows = torch.full((tokens,), -1)
    plain = copy.deepcopy(layer)
    scaling.attach(layer, slots, 6, rows)
    assert other.quant_method is method
    assert type(layer.quant_method).__name__ == "Method"
    assert isinstance(layer.quant_method, Method)
    return layer, plain, rows


def apply(layer, x, bias=None):
    return layer.quant_method.apply(layer, x, bias)


def test_each_row_has_the_g_of_its_slot_and_the_bias_is_not_scaled():
    layer, plain, rows = scaled()
    layer.row_scales.g[:3] = torch.rand(3, 6) + 0.5
    rows[:5] = torch.tensor([2, -1, 0, 1, 2])
    x = torch.randn(5, 4)
    g = torch.cat([layer.row_scales.g[:3], torch.ones(1, 6)])[rows[:5]]
    expected = g * apply(plain, x)
    torch.testing.assert_close(apply(layer, x), expected)
    torch.testing.assert_close(apply(layer, x, layer.bias), expected + layer.bias)
    torch.testing.assert_close(apply(layer, x[None])[0], expected)
    torch.testing.assert_close(scaling.product(layer, x), apply(plain, x))


def test_rows_of_other_adapters_keep_their_bits():
    for dtype in (torch.float32, torch.bfloat16):
        layer, plain, rows = scaled(dtype=dtype)
        layer.row_scales.g[1] = torch.rand(6)
        rows[:4] = torch.tensor([0, -1, 2, 1])
        x = torch.randn(4, 4).to(dtype)
        for bias in (None, layer.bias):
            found, expected = apply(layer, x, bias), apply(plain, x, bias)
            assert found.dtype == dtype
            assert torch.equal(found[:3], expected[:3])
            assert not torch.equal(found[3], expected[3])


def test_the_buffers_are_no_part_of_the_checkpoint():
    layer, plain, _ = scaled()
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert {"row_scales.g", "row_scales.slots"} <= dict(layer.named_buffers()).keys()


def test_it_is_traced_whole_and_reads_g_and_the_slots_at_every_call():
    """vLLM compiles the model in one graph."""
    layer, _, rows = scaled()
    layer.row_scales.g[:3] = torch.rand(3, 6) + 0.5
    rows[:7] = torch.tensor([2, -1, 0, 1, 2, 2, 0])
    compiled = torch.compile(apply, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 7):
        x = torch.randn(tokens, 4)
        torch.testing.assert_close(compiled(layer, x, layer.bias), apply(layer, x, layer.bias))
    layer.row_scales.g[0] = 7
    rows[1] = 0
    torch.testing.assert_close(compiled(layer, x), apply(layer, x))
