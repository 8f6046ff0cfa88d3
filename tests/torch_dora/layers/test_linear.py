import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from tests.torch_dora.adapters import trained
from torch_dora import DoRAConv, DoRALinear, DoRARule, apply_dora, freeze, merge_dora
from torch_dora.ops import factored_norm, magnitude_scale

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_is_exactly_the_identity(device, dtype, bias, adapter_dtype):
    linear = nn.Linear(40, 56, bias=bias, device=device, dtype=dtype)
    layer = DoRALinear.from_linear(linear, rank=4, alpha=8, adapter_dtype=adapter_dtype)
    x = torch.randn(3, 40, device=device, dtype=dtype)
    assert torch.equal(layer(x), linear(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_g_is_exactly_one_for_any_lora_b_after_reset(device, dtype):
    layer = DoRALinear(40, 56, rank=4, alpha=8, device=device, dtype=dtype)
    nn.init.normal_(layer.lora_b)
    layer.reset_magnitude()
    g = magnitude_scale(layer.magnitude, layer.norm(), dtype)
    assert torch.equal(g, torch.ones_like(g))


def test_computes_the_dense_definition():
    layer = trained(DoRALinear(40, 56, rank=4, alpha=8, use_rslora=True, dtype=torch.float64))
    direction = layer.weight + 8 / math.sqrt(4) * layer.lora_b.double() @ layer.lora_a.double()
    weight = layer.magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True)
    x = torch.randn(2, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


def test_numbers_of_numpy_become_pythons():
    layer = DoRALinear(
        8, 8, rank=np.int64(4), alpha=np.float32(6), dropout=np.float64(0.1), use_rslora=True
    )
    assert (layer.rank, layer.alpha, layer.dropout, layer.scale) == (4, 6.0, 0.1, 3.0)
    found = (layer.rank, layer.alpha, layer.dropout, layer.scale)
    assert [type(value) for value in found] == [int, float, float, float]
    layer(torch.randn(3, 8)).sum().backward()


def test_from_linear_shares_and_freezes_the_base():
    linear = nn.Linear(40, 56).eval()
    layer = DoRALinear.from_linear(linear, rank=4, alpha=8)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    names = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert names == {"lora_a", "lora_b", "magnitude"}


def test_on_the_meta_device_and_materialised_later():
    layer = DoRALinear(16, 8, rank=4, alpha=8, device="meta").to_empty(device="cpu")
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.reset_adapter()
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 1), lambda: nn.Conv1d(6, 1, 1)])
def test_a_gradient_s_own_gradient_is_an_error_and_not_nothing(make):
    critic = apply_dora(nn.Sequential(nn.Tanh(), make()), DoRARule("1", 2, 4))
    trained(critic[1])
    x = torch.randn(6, 1 if isinstance(critic[1], DoRAConv) else 6, requires_grad=True)
    score = critic(x).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (score + gradient.square().sum()).backward()
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.functional.hvp(lambda x: critic(x).square().sum(), x, torch.ones_like(x))


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 3), lambda: nn.Conv1d(6, 3, 1)])
def test_batched_gradients_are_an_error_that_names_another_way(make):
    layer = trained(apply_dora(nn.Sequential(make()), DoRARule("0", 2, 4))[0])
    x = torch.randn(6, 1 if isinstance(layer, DoRAConv) else 6, requires_grad=True)
    dys = torch.randn(2, *layer(x).shape)
    with pytest.raises(NotImplementedError, match=r"is_grads_batched.*torch\.func\.vjp in torch"):
        torch.autograd.grad(layer(x), x, dys, is_grads_batched=True)
    pull = torch.func.vjp(layer, x)[1]
    (found,) = torch.func.vmap(pull)(dys)
    for dx, dy in zip(found, dys, strict=True):
        torch.testing.assert_close(dx, torch.autograd.grad(layer(x), x, dy)[0])


def test_batched_gradients_of_a_vector_are_those_of_a_loop():
    layer = trained(apply_dora(nn.Sequential(nn.Linear(6, 3)), DoRARule("0", 2, 4))[0])
    y = layer(x := torch.randn(6, requires_grad=True))
    found = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)[0]
    for dx, dy in zip(found, torch.eye(3), strict=True):
        torch.testing.assert_close(dx, torch.autograd.grad(y, x, dy, retain_graph=True)[0])


# torch says that there is nothing to draw.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("width", "features"), [(0, 3), (3, 0)])
def test_a_layer_without_features(width, features):
    layer = DoRALinear(width, features, rank=2, alpha=4)
    y = layer(torch.ones(2, width))
    assert torch.equal(y, layer.bias.expand(2, features))
    y.sum().backward()
    assert layer.lora_b.grad.shape == (features, 2)


def test_falcon_s_linear_layer_is_adapted_as_torch_s():
    base = FalconLinear(6, 5, bias=True)
    x = torch.randn(3, 6)
    plain = base(x)
    layer = apply_dora(base, DoRARule("all-linear", 2, 4))
    torch.testing.assert_close(layer(x), plain)
    merged = merge_dora(trained(layer))
    assert type(merged) is FalconLinear
    torch.testing.assert_close(layer(x), merged(x))


@pytest.mark.parametrize("mode", ["adapter", "input"])
def test_a_call_on_the_meta_device_has_the_result_s_shape(mode):
    """As those that count floating-point operations or estimate memory make it."""
    layer = DoRALinear(
        16, 8, rank=4, alpha=8, dropout=0.5, dropout_mode=mode, device="meta", dtype=torch.bfloat16
    )
    y = layer(torch.empty(3, 16, device="meta", dtype=torch.bfloat16))
    assert y.is_meta
    assert y.shape == (3, 8)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.lora_a.grad.shape == (4, 16)


@pytest.mark.parametrize("mode", ["adapter", "input"])
@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_dropout_follows_its_convention(device, monkeypatch, mode, implementation):
    layer = trained(
        DoRALinear(
            40,
            56,
            rank=4,
            alpha=8,
            dropout=0.5,
            dropout_mode=mode,
            implementation=implementation,
            device=device,
        )
    )
    x = torch.randn(3, 5, 40, device=device)
    mask = (torch.rand_like(x) < 0.5) * 2.0
    monkeypatch.setattr(F, "dropout", lambda x, p, training=True: x * mask)
    base, dropped = F.linear(x, layer.weight), F.linear(x * mask, layer.weight)
    lora = F.linear(F.linear(x * mask, layer.lora_a), layer.lora_b)
    g = layer.magnitude / factored_norm(layer.weight, layer.lora_a, layer.lora_b, 2.0)
    corrected = base if mode == "adapter" else dropped
    want = base + layer.bias + (g - 1) * corrected + g * 2.0 * lora
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    want.sum().backward()
    grads = [
        p.grad.clone() for p in (layer.lora_a, layer.lora_b, layer.magnitude) if p.grad is not None
    ]
    layer.zero_grad()
    layer(x).sum().backward()
    for p, grad in zip((layer.lora_a, layer.lora_b, layer.magnitude), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)


def test_a_cast_does_not_round_the_magnitude():
    layer = trained(DoRALinear(16, 8, rank=4, alpha=8))
    layer(torch.randn(3, 16)).sum().backward()
    gradient, magnitude = layer.magnitude.grad.clone(), layer.magnitude.detach().clone()
    norm = freeze(layer).constant_norm
    for dtype in (torch.bfloat16, torch.float16):
        layer.to(dtype)
        assert layer.lora_a.dtype == layer.lora_a.grad.dtype == dtype
        assert torch.equal(layer.magnitude, magnitude)
        assert torch.equal(layer.magnitude.grad, gradient)
        assert torch.equal(layer.constant_norm, norm)
    wide = layer.to(torch.float64)
    assert wide.magnitude.dtype == wide.constant_norm.dtype == torch.float64
    assert layer.to(torch.bfloat16).magnitude.dtype == torch.float32


@pytest.mark.parametrize("mode", ["adapter", "input"])
def test_dropout_is_off_in_evaluation(mode):
    layer = trained(DoRALinear(40, 56, rank=4, alpha=8, dropout=0.5, dropout_mode=mode))
    x = torch.randn(3, 40)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.dropout = 0.0
    assert torch.equal(layer(x), layer.train()(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_computes_the_same(device, dtype):
    layer = trained(DoRALinear(40, 56, rank=4, alpha=8, device=device, dtype=dtype)).eval()
    merged = layer.merge()
    assert type(merged) is nn.Linear
    assert not merged.training
    assert merged.weight.dtype == dtype
    assert merged.weight.data_ptr() != layer.weight.data_ptr()
    assert merged.bias.data_ptr() == layer.bias.data_ptr()
    x = torch.randn(3, 40, device=device, dtype=dtype)
    atol = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-5)
    torch.testing.assert_close(merged(x), layer(x), rtol=0, atol=atol)


def test_merging_a_fresh_adapter_changes_no_bit():
    linear = nn.Linear(40, 56, dtype=torch.bfloat16)
    merged = DoRALinear.from_linear(linear, rank=4, alpha=8).merge()
    assert torch.equal(merged.weight, linear.weight)
    assert torch.equal(merged.bias, linear.bias)


def test_repr_gives_the_hyperparameters():
    layer = DoRALinear(16, 8, rank=4, alpha=8, dropout=0.1, dropout_mode="input")
    assert repr(layer) == (
        "DoRALinear(in_features=16, out_features=8, bias=True, rank=4, alpha=8, "
        "use_rslora=False, dropout=0.1, dropout_mode='input')"
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank is 0; expected at least 1"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1"),
        ({"adapter_dtype": torch.int8}, TypeError, "adapter_dtype is torch.int8"),
        ({"implementation": "xla"}, ValueError, "'xla' is not a torch implementation"),
        ({"dtype": torch.complex64}, TypeError, "weight has dtype torch.complex64"),
    ],
)
def test_bad_hyperparameters_are_named(change, error, message):
    with pytest.raises(error, match=message):
        DoRALinear(16, 8, **{"rank": 4, "alpha": 8} | change)


class Squared(nn.Linear):
    def forward(self, input):
        return super().forward(input) ** 2


class Doubled(nn.Linear):
    def __call__(self, input):
        return 2 * super().__call__(input)


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 4, 1), Squared(3, 4), Doubled(3, 4), nn.ReLU])
def test_from_linear_takes_a_linear_layer_only(layer):
    with pytest.raises(TypeError, match=r"base is a .*; DoRALinear adapts torch\.nn\.Linear, and"):
        DoRALinear.from_linear(layer, rank=4, alpha=8)
