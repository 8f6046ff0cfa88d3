"""torchao's quantised weights under adapters, against an fp64 oracle of what they stand for."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import torch_dora
from tests.torch_dora.quantised_layers import (
    Summed,
    adapter,
    assert_compiles,
    assert_norm_agrees,
    assert_projection_agrees,
)
from torch_dora.ops import factored_norm, quantised
from torch_dora.ops.triton import one_pass_norm

SCALE, SHAPE = 0.7, (24, 128)


def linear(kind, dtype=torch.float32):
    torch.manual_seed(0)
    layer = nn.Linear(SHAPE[1], SHAPE[0], dtype=dtype)
    if kind == "nf4":
        weight = to_nf4(layer.weight.detach(), 64, 8)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    else:
        config = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[kind]()
        quantize_(layer, config)
    return layer


def meant(weight):
    """What a quantised weight stands for, in fp64."""
    if hasattr(weight, "qdata"):
        return weight.qdata.double().numpy() * weight.scale.double().numpy()
    scales = (
        weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
        .double()
        .numpy()
    )
    data = weight.quantized_data.numpy()
    codes = np.stack([data >> 4, data & 15], 1).reshape(-1, 64)
    return (weight.nf4.double().numpy()[codes] * scales[:, None]).reshape(SHAPE)


@pytest.mark.parametrize("height", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_norm(kind, height, monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_BYTES", height * 16 * SHAPE[1])
    weight, (a, b) = linear(kind).weight, adapter(*SHAPE)
    exact = meant(weight)
    np.testing.assert_allclose(quantised.dense(weight, torch.float32), exact, rtol=1e-6, atol=1e-8)
    assert_norm_agrees(weight, exact, a, b, SCALE)
    if kind == "nf4":
        launch, calls = one_pass_norm.launch, []
        monkeypatch.setattr(one_pass_norm, "launch", lambda *a: (calls.append(a), launch(*a))[1])
        assert_norm_agrees(weight, exact, a, b, SCALE, "triton")
        norm = factored_norm(weight, a, b / 0, 0, implementation="triton")
        np.testing.assert_allclose(norm, np.linalg.norm(exact, axis=1), rtol=1e-5)
        assert len(calls) == 2


def test_no_dense_copy_is_made_for_the_norm(monkeypatch):
    monkeypatch.setattr(quantised, "BLOCK_BYTES", 4 * 16 * SHAPE[1])
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                sizes.append(result.numel() if type(result) is torch.Tensor else 0)
            return result

    weight, (a, b) = linear("int8").weight.detach(), adapter(*SHAPE)
    with Sizes():
        factored_norm(weight, a, b, SCALE)
    assert 0 < max(sizes) <= 4 * SHAPE[1] + a.numel()


@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_projection_and_gradients(kind):
    layer = linear(kind)
    assert_projection_agrees(
        layer.weight, meant(layer.weight), layer.bias.detach(), *adapter(*SHAPE), SCALE
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compilers are theirs
@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_a_layer_agrees_on_a_gpu(kind):
    layer, (a, b) = linear(kind), adapter(*SHAPE)
    exact = meant(layer.weight)
    layer.to("cuda")
    assert_norm_agrees(layer.weight, exact, a, b, SCALE)
    assert_projection_agrees(layer.weight, exact, layer.bias.detach(), a, b, SCALE)
    model = torch_dora.apply_dora(nn.Sequential(layer), torch_dora.DoRARule(".*", 4, 8))
    model[0].lora_b.data.normal_(0, 0.1)
    assert_compiles(model, torch.randn(3, SHAPE[1], device="cuda"))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compilers are theirs
def test_compiled_layers_are_one_graph():
    layers = Summed(linear(kind) for kind in ("int8", "float8", "nf4"))
    model = torch_dora.apply_dora(layers, torch_dora.DoRARule(".*", 4, 8))
    for layer in model.layers:
        layer.lora_b.data.normal_(0, 0.1)
    assert_compiles(model, torch.randn(3, SHAPE[1]))


@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_torch_func_takes_a_layer(kind):
    model = torch_dora.apply_dora(nn.Sequential(linear(kind)), torch_dora.DoRARule(".*", 4, 8))
    model[0].lora_b.data.normal_(0, 0.1)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    x = torch.randn(3, SHAPE[1])

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(trained, x)
    wanted = torch.autograd.grad(loss(trained, x), list(trained.values()))
    torch.testing.assert_close(list(found.values()), list(wanted), rtol=1e-4, atol=1e-4)
    two = {name: torch.stack([one, 1.1 * one]) for name, one in trained.items()}
    second = {name: one[1] for name, one in two.items()}
    both = torch.func.vmap(lambda parameters: loss(parameters, x))(two)
    torch.testing.assert_close(both[1], loss(second, x))


def test_flops_of_a_norm_of_codes_are_counted():
    lora_a, lora_b = torch.randn(4, SHAPE[1]), torch.randn(SHAPE[0], 4)
    with FlopCounterMode(display=False) as flops:
        factored_norm(linear("nf4").weight, lora_a, lora_b, SCALE, implementation="triton")
    assert flops.get_total_flops() == 2 * 4 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_layer_is_adapted_trained_and_merged(kind):
    base = nn.Sequential(linear(kind, torch.bfloat16))
    x = torch.randn(3, SHAPE[1], dtype=torch.bfloat16)
    plain = x @ quantised.dense(base[0].weight, torch.bfloat16).T + base[0].bias
    model = torch_dora.apply_dora(base, torch_dora.DoRARule("all-linear", 4, 8))
    assert torch.equal(
        model(x),
        torch.nn.functional.linear(
            x, quantised.dense(model[0].weight, torch.bfloat16), model[0].bias
        ),
    )
    torch.testing.assert_close(model(x), plain, rtol=1e-2, atol=1e-2)
    model[0].lora_b.data.normal_(0, 0.1)
    model(x).float().sum().backward()
    assert model[0].lora_b.grad.abs().max() > 0
    merged, report = torch_dora.merge_dora(model, return_report=True)
    assert type(merged[0].weight.data) is torch.Tensor
    assert merged[0].weight.dtype == torch.bfloat16
    assert report.layers[0].change > 0
    torch.testing.assert_close(merged(x), model(x), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_a_model_that_is_cast_computes_in_that_dtype(kind):
    rule = torch_dora.DoRARule("all-linear", 4, 8)
    model = torch_dora.apply_dora(nn.Sequential(linear(kind)), rule)
    x = torch.randn(3, SHAPE[1], dtype=torch.bfloat16)
    wanted = model(x.float()).detach()
    y = model.to(torch.bfloat16)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
    merged = torch_dora.merge_dora(model)(x)
    torch.testing.assert_close(merged.float(), wanted, rtol=2e-2, atol=2e-2)


def test_other_formats_are_refused():
    a, b = adapter(*SHAPE)
    layer = linear("int8")
    other = copy.copy(layer.weight.detach())
    other.__class__ = type("Int3Tensor", (type(other),), {"__module__": "torchao.somewhere"})
    with pytest.raises(TypeError, match=r"torchao.somewhere.Int3Tensor .* expected torchao's"):
        factored_norm(other, a, b, SCALE)
    with pytest.raises(NotImplementedError, match="'triton' accepts no Int8Tensor"):
        factored_norm(layer.weight, a, b, SCALE, implementation="triton")


@pytest.mark.parametrize(
    ("kind", "value"), [("int8", math.inf), ("float8", 0.0), ("nf4", math.nan)]
)
def test_scales_that_make_no_numbers_are_refused(kind, value):
    layer = linear(kind)
    weight = layer.weight
    scales = weight.quantization_factor if kind == "nf4" else weight.scale
    scales.view(-1)[1] = value
    with pytest.raises(ValueError, match=r"'0' cannot .* with scales from .* finite numbers: quan"):
        torch_dora.apply_dora(nn.Sequential(layer), torch_dora.DoRARule("0", 4, 8))


def test_codes_that_are_not_numbers_are_refused():
    layer = linear("float8")
    layer.weight.qdata.view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(ValueError, match=r"'0' cannot .* codes .* NaN; .* quantise it again"):
        torch_dora.apply_dora(nn.Sequential(layer), torch_dora.DoRARule("0", 4, 8))


def test_what_a_quantised_layer_does_to_its_input_is_refused():
    base = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]))
    quantize_(base, Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(TypeError, match=r"'0' cannot .* act_quant_kwargs.*Int8WeightOnlyConfig"):
        torch_dora.apply_dora(base, torch_dora.DoRARule("0", 4, 8))

    weight = linear("int8").weight.detach()
    weight.act_pre_scale = torch.full((SHAPE[1],), 2.0)
    with pytest.raises(TypeError, match=r"act_pre_scale.*Int8WeightOnlyConfig"):
        factored_norm(weight, *adapter(*SHAPE), SCALE)
