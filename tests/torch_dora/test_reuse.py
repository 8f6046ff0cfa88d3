import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_dora import DoRAConv, DoRALinear, drop_norms, keep_norms, refresh_norms
from torch_dora.ops import norm as norm_module


@pytest.fixture
def model(device):
    layers = [DoRALinear(24, 40, rank=4, alpha=8), nn.ReLU(), DoRALinear(40, 16, rank=4, alpha=8)]
    for layer in layers[::2]:
        nn.init.normal_(layer.lora_b, std=0.1)
        layer.reset_magnitude()
    return nn.Sequential(*layers).to(device)


@pytest.fixture
def computed(monkeypatch):
    """Counts how many norms are computed."""
    calls = []
    compute = norm_module._factored_norm
    monkeypatch.setattr(norm_module, "_factored_norm", lambda *a: (calls.append(1), compute(*a))[1])
    return calls


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.requires_grad)]


def step(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.01 * p.grad


def test_kept_norms_are_not_computed_again_and_change_no_bit(model, device, computed):
    x = torch.randn(5, 24, device=device)
    want = gradients(model, x)
    keep_norms(model)
    computed.clear()
    for _ in range(3):
        for got, exact in zip(gradients(model, x), want, strict=True):
            assert torch.equal(got, exact)
    assert computed == []


def test_refresh_computes_only_what_an_update_has_changed(model, device, computed):
    keep_norms(model)
    computed.clear()
    refresh_norms(model)
    assert computed == []
    with torch.no_grad():
        model[2].lora_a.add_(0.1)
    refresh_norms(model)
    assert computed == [1]
    fresh = copy.deepcopy(model)
    drop_norms(fresh)
    x = torch.randn(5, 24, device=device)
    assert torch.equal(model(x), fresh(x))


@pytest.mark.parametrize("name", ["lora_a", "lora_b", "weight"])
@pytest.mark.parametrize("through_data", [False, True])
def test_a_stale_norm_is_nan(model, device, name, through_data):
    keep_norms(model)
    parameter = getattr(model[0], name)
    with torch.no_grad():
        (parameter.data if through_data else parameter)[0, 0] += 1e-3
    x = torch.randn(5, 24, device=device)
    assert bool(model(x).isnan().all())
    refresh_norms(model)
    assert bool(model(x).isfinite().all())


REARRANGED = {
    "rows reversed": lambda matrix: matrix.flip(0),
    "columns reversed": lambda matrix: matrix.flip(1),
    "rows rolled": lambda matrix: matrix.roll(1, 0),
    "turned": lambda matrix: matrix.flip(0, 1),
    "other signs": lambda matrix: -matrix,
    "the signs of two columns": lambda matrix: torch.cat([-matrix[:, :2], matrix[:, 2:]], 1),
    "the signs of a square": lambda matrix: torch.cat(
        [torch.cat([-matrix[:2, :2], matrix[:2, 2:]], 1), matrix[2:]]
    ),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_same_bits_elsewhere_are_another_adapter(device, dtype, compiles):
    layer = DoRALinear(24, 40, rank=4, alpha=8, adapter_dtype=dtype, device=device)
    x = torch.randn(5, 24, device=device)
    called = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    # As many of each sign in every row and column: sums without weights do not see them change.
    signs = 1 - 2 * ((torch.arange(40)[:, None] + torch.arange(4)) % 2)
    start = (signs * (torch.rand(40, 4) + 0.5)).to(device, dtype)
    with torch.no_grad():
        for name, rearrange in REARRANGED.items():
            layer.lora_b.copy_(start)
            keep_norms(layer)
            assert called(x).isfinite().all(), name
            layer.lora_b.copy_(rearrange(start))
            assert called(x).isnan().all(), name
            refresh_norms(layer)
            fresh = copy.deepcopy(layer)
            drop_norms(fresh)
            assert torch.equal(layer(x), fresh(x)), name


def test_magnitude_and_bias_may_move(model, device):
    keep_norms(model)
    with torch.no_grad():
        model[0].magnitude.mul_(1.1)
        model[0].bias.add_(0.1)
    assert bool(model(torch.randn(5, 24, device=device)).isfinite().all())


def test_accumulation_computes_each_norm_once_a_step(model, device, computed):
    x = torch.randn(2, 4, 5, 24, device=device)
    plain = copy.deepcopy(model)
    keep_norms(model)
    for batches in x:
        for other, refresh in ((model, True), (plain, False)):
            computed.clear()
            if refresh:
                refresh_norms(other)
            other.zero_grad()
            for batch in batches:
                checkpoint(other, batch, use_reentrant=False).square().sum().backward()
            assert len(computed) <= 2 if refresh else len(computed) == 16
            step(other)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


# What torch's compilers call is theirs: 2.11's use several things that 2.11 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_torch_compile(model, device):
    keep_norms(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 24, device=device)
    assert torch.equal(compiled(x), model(x))
    with torch.no_grad():
        model[0].lora_b[0, 0] += 1e-3
    assert bool(compiled(x).isnan().any())
    refresh_norms(model)
    assert torch.equal(compiled(x), model(x))


def test_kept_norms_are_not_saved(model):
    names = set(model.state_dict())
    keep_norms(model)
    assert set(model.state_dict()) == names


def test_other_dora_layers_keep_theirs(device, monkeypatch):
    layer = DoRAConv(nn.Conv2d(4, 6, 3, device=device), rank=2, alpha=4)
    keep_norms(layer)
    x = torch.randn(2, 4, 5, 5, device=device)
    want = layer(x)
    monkeypatch.setattr(layer, "norm", lambda: pytest.fail("computed"))
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("function", [keep_norms, refresh_norms, drop_norms])
def test_a_model_without_a_dora_layer_is_refused(function):
    with pytest.raises(ValueError, match="Linear has no DoRA layer"):
        function(nn.Linear(3, 3))


def test_refresh_before_keep_is_refused(model):
    with pytest.raises(ValueError, match=r"keeps no norm; call torch_dora\.keep_norms"):
        refresh_norms(model)
