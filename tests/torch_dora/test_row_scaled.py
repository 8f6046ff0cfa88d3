"""Layers that quantise activations and gradients to FP8 by rows. The values of their products are
compared with fp64 in parity (tests/parity/test_quantised.py)."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, PerRow, PerTensor, quantize_
from torchao.quantization.quantize_.workflows import Float8Tensor, QuantizeTensorToFloat8Kwargs

import torch_dora
from tests.torch_dora.quantised_layers import adapter, assert_compiles
from torch_dora.ops import dora_linear, row_scaled

QTYPE, E5M2 = row_scaled.BWD_QTYPES
OUT, WIDTH, SCALE = 32, 64, 0.7


def linear(granularity=None, dtype=torch.float32):
    """Returns a layer in FP8 by rows; with a granularity it quantises its input, too, as from
    Float8DynamicActivationFloat8WeightConfig, which requires a GPU."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, OUT, dtype=dtype)
    settings = granularity and QuantizeTensorToFloat8Kwargs(granularity=granularity)
    weight = Float8Tensor.from_hp(
        layer.weight.detach(), granularity=PerRow(), act_quant_kwargs=settings
    )
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def adapted(base, **options):
    model = torch_dora.apply_dora(nn.Sequential(base), torch_dora.DoRARule("0", 4, 8, **options))
    torch.manual_seed(1)
    model[0].lora_b.data.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("bwd_qtype", [None, E5M2])
def test_a_layer_computes_as_its_base_and_its_operator(bwd_qtype):
    model = adapted(linear(PerRow()), bwd_qtype=bwd_qtype)
    layer, x = model[0], torch.randn(5, WIDTH, requires_grad=True)
    y = model(x)
    options = {"bias": layer.bias, "act_qtype": QTYPE, "bwd_qtype": bwd_qtype}
    operands = layer.weight, layer.lora_a, layer.lora_b, layer.magnitude, layer.scale
    wanted = dora_linear(x, *operands, **options)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    leaves = [x, layer.lora_a, layer.lora_b, layer.magnitude]
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, dy), rtol=0, atol=0)
    exact = dora_linear(x, *operands, bias=layer.bias)
    assert 0 < (y - exact).abs().max() < 0.1 * exact.abs().max()
    dx = torch.autograd.grad(exact, leaves, dy)[0]
    assert (0 < (found[0] - dx).abs().max() < 0.2 * dx.abs().max()) == (bwd_qtype is not None)
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(x), y, rtol=0, atol=0)


def test_zeros_nan_and_small_rows():
    weight = linear().weight
    x = torch.ones(4, WIDTH)
    x[0], x[1, 3], x[2] = 0, torch.nan, 1e-30
    y = row_scaled.product(x, weight, None)
    d = torch.ones(4, OUT)
    d[0], d[1, 3], d[2] = 0, torch.nan, 1e-30
    for result in (y, row_scaled.transposed_product(d, weight, E5M2)):
        assert not result[0].any()
        assert result[1].isnan().all()
        # 1e-30 is not a power of two, so some codes may differ.
        torch.testing.assert_close(result[2] * 1e30, result[3], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_sums_do_not_overflow(dtype):
    weight = linear(dtype=dtype).weight
    y = row_scaled.product(torch.full((2, WIDTH), 3.0, dtype=dtype), weight, None)
    assert y.dtype == dtype
    wanted = 3 * weight.dequantize().float().sum(1).expand(2, -1)
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compilers are theirs
@pytest.mark.ci
def test_a_compiled_layer_is_one_graph():
    assert_compiles(adapted(linear(PerRow()), bwd_qtype=E5M2), torch.randn(3, WIDTH))


def test_wrong_formats_are_refused():
    (a, b), x = adapter(OUT, WIDTH), torch.ones(2, WIDTH)
    weight, plain = linear().weight, torch.ones(OUT, WIDTH)
    for one, act_qtype, bwd_qtype, message in (
        (weight, "int8", None, "act_qtype is 'int8'; expected None, .* or 'float8_e4m3fn'"),
        (weight, QTYPE, "int8", "bwd_qtype is 'int8'; expected None, .* or one of 'float8_e4m3fn'"),
        (weight, None, E5M2, "bwd_qtype is 'float8_e5m2' and act_qtype None; expected act_qtype="),
        (plain, QTYPE, None, r"weight is a Tensor of shape \(32, 64\); expected torchao's Float8T"),
    ):
        options = {"act_qtype": act_qtype, "bwd_qtype": bwd_qtype}
        with pytest.raises(ValueError, match=message):
            dora_linear(x, one, a, b, torch.ones(OUT), SCALE, **options)
    with pytest.raises(TypeError, match=r"act_quant_kwargs.* expected rows in FP8"):
        adapted(linear(PerTensor()))
    base = nn.Linear(WIDTH, OUT)
    quantize_(base, Float8WeightOnlyConfig())
    with pytest.raises(ValueError, match="or a weight whose layer quantises its input, as from"):
        adapted(base, bwd_qtype=E5M2)


def test_what_cannot_be_computed_is_refused():
    model = adapted(linear(PerRow()), dropout=0.5, dropout_mode="input")
    x = torch.ones(2, WIDTH)
    with pytest.raises(NotImplementedError, match="expected dropout_mode='adapter'"):
        model.train()(x)
    model = adapted(linear(PerRow()))
    with pytest.raises(NotImplementedError, match=r"inside a transform of torch.func"):
        torch.func.vmap(model)(x[None])


@pytest.mark.gpu
@pytest.mark.parametrize("bwd_qtype", row_scaled.BWD_QTYPES)
def test_tensor_cores_agree_with_sums_in_fp32(bwd_qtype, monkeypatch):
    weight = linear(dtype=torch.bfloat16).weight.cuda()
    x, d = (torch.randn(70, size, device="cuda").bfloat16() for size in (WIDTH, OUT))
    bias = torch.randn(OUT, device="cuda").bfloat16()

    def both():
        return row_scaled.product(x, weight, bias), row_scaled.transposed_product(
            d, weight, bwd_qtype
        )

    found = both()
    monkeypatch.setattr(row_scaled, "_has_tensor_cores", lambda _: False)
    torch.testing.assert_close(found, both(), rtol=2e-2, atol=2e-2)
