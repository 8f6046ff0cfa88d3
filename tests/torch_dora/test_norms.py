"""Norms as values: taken, used, and frozen."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from bitsandbytes.nn import modules as bnb
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import torch_dora
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.torch_dora.adapters import Experts, trained
from torch_dora import DoRAConv, DoRAConv1D, DoRAEmbedding, DoRALinear, freeze, with_norms
from torch_dora.ops import norm as norm_module

IDS = torch.arange(8).reshape(2, 4)


@pytest.fixture
def model(device):
    layers = [DoRALinear(24, 40, rank=4, alpha=8), nn.ReLU(), DoRALinear(40, 16, rank=4, alpha=8)]
    return trained(nn.Sequential(*layers).to(device))


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


def test_norms_are_those_of_the_layers_detached_and_in_fp32(model):
    values = torch_dora.norms(model.to(torch.bfloat16))
    assert list(values) == ["0", "2"]
    for name, value in values.items():
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert torch.equal(value, model[int(name)].norm())


def test_given_norms_are_not_computed_and_change_no_bit(model, device, computed):
    x = torch.randn(5, 24, device=device)
    want = gradients(model, x)
    values = torch_dora.norms(model)
    computed.clear()
    with with_norms(model, values):
        for _ in range(3):
            for got, exact in zip(gradients(model, x), want, strict=True):
                assert torch.equal(got, exact)
    assert computed == []
    model(x)
    assert computed == [1, 1]


def test_the_values_are_what_is_used(model, device):
    x = torch.randn(5, 24, device=device)
    values = torch_dora.norms(model)
    model[2].bias.data.zero_()
    want = model(x) / 2
    with with_norms(model, {"0": values["0"], "2": 2 * values["2"]}):
        torch.testing.assert_close(model(x), want)


def test_what_was_before_comes_back_after_errors_and_inside_of_another(model):
    values = torch_dora.norms(model)
    other = {name: 2 * value for name, value in values.items()}
    with with_norms(model, values):
        with pytest.raises(RuntimeError, match="stop"), with_norms(model, other):  # noqa: PT012
            assert model[0].constant_norm is not None
            raise RuntimeError("stop")
        assert torch.equal(model[0].constant_norm, values["0"])
    assert model[0].constant_norm is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_accumulation_and_checkpointing_compute_each_norm_once_a_step(
    model, device, computed, reentrant
):
    x = torch.randn(2, 4, 5, 24, device=device, requires_grad=True)
    plain = copy.deepcopy(model)

    def step(model, batches):
        model.zero_grad()
        for batch in batches:
            checkpoint(model, batch, use_reentrant=reentrant).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad

    for batches in x:
        step(plain, batches)
        computed.clear()
        with with_norms(model, torch_dora.norms(model)):
            step(model, batches)
        assert len(computed) == 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_step_ends_the_use_of_norms(kind, model, device):
    x, other = torch.randn(5, 24, device=device), trained(copy.deepcopy(model))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(trainable, lr=0.1)
    foreign = kind([p for p in other.parameters() if p.requires_grad], lr=0.1)
    values = torch_dora.norms(model)
    with with_norms(model, values):
        with with_norms(model, values):
            for one in (other, model):
                one(x).square().sum().backward()
            foreign.step()
            assert model[0].constant_norm is not None
            optimizer.step()
            inside = model(x)
        assert torch.equal(inside, model(x))
    assert model[0].constant_norm is None
    assert torch.equal(inside, model(x))
    with with_norms(model, values):
        assert not torch.equal(inside, model(x))
    optimizer.step()  # outside, no layer is touched
    assert not _global_optimizer_pre_hooks


def test_a_closure_computes_its_norms_of_what_the_optimizer_has_changed(model, device):
    x, losses = torch.randn(5, 24, device=device), []
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(trainable, lr=1e-3, max_iter=3)

    def closure():
        loss = model(x).square().sum()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        return loss

    start = [p.detach().clone() for p in trainable]
    optimizer.step(closure)
    expected = losses.copy()
    assert len(losses) > 1
    optimizer = torch.optim.LBFGS(trainable, lr=1e-3, max_iter=3)
    with torch.no_grad():
        for p, value in zip(trainable, start, strict=True):
            p.copy_(value)
    losses.clear()
    with with_norms(model, torch_dora.norms(model)):
        optimizer.step(closure)
    assert losses == expected


# What torch's compilers call is theirs: 2.11's use several things that 2.11 deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_torch_compile_other_values_compile_nothing(model, device):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 24, device=device)

    def close():
        # Where torch compiles, compose is its own; twice the norms halve a result.
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=OPERATOR_FP32_MAX_ABS)

    close()
    values = torch_dora.norms(model)
    with with_norms(model, values):
        close()
    other = {name: 2 * value for name, value in values.items()}
    with with_norms(model, other), torch.compiler.set_stance("fail_on_recompile"):
        close()
    with torch.compiler.set_stance("fail_on_recompile"):
        close()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x):
        with with_norms(model, values):
            return model(x)

    torch.testing.assert_close(inside(x), model(x), rtol=0, atol=OPERATOR_FP32_MAX_ABS)
    # The names of a wrapper's layers are its own.
    with with_norms(compiled, torch_dora.norms(compiled)):
        close()


OTHERS = {
    "conv": (lambda: DoRAConv(nn.Conv1d(6, 8, 3), rank=2, alpha=4), torch.randn(2, 6, 9)),
    "grouped": (
        lambda: DoRAConv(nn.Conv2d(4, 6, 3, groups=2), rank=2, alpha=4),
        torch.randn(2, 4, 5, 5),
    ),
    "conv1d": (lambda: DoRAConv1D(Conv1D(8, 6), rank=2, alpha=4), torch.randn(5, 6)),
    "embedding": (lambda: DoRAEmbedding(nn.Embedding(9, 8), rank=2, alpha=4), IDS),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("way", ["given", "frozen"])
def test_every_layer_uses_them(kind, way, monkeypatch):
    make, x = OTHERS[kind]
    layer = trained(make())
    want = layer(x)
    values = torch_dora.norms(layer)
    if way == "frozen":
        freeze(layer)
    monkeypatch.setattr(layer, "norm", lambda: pytest.fail("computed"))
    if way == "frozen":
        # A convolution whose weights require no gradient adds up in another order.
        torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    else:
        with with_norms(layer, values):
            assert torch.equal(layer(x), want)


def test_frozen_is_constant_and_untrained(device, computed):
    model = nn.Sequential(DoRALinear(24, 40, rank=4, alpha=8, dropout=0.5, dtype=torch.bfloat16))
    model = trained(model.to(device)).eval()
    x = torch.randn(5, 24, device=device, dtype=torch.bfloat16)
    want, names = model(x), set(model.state_dict())
    assert freeze(model.train()) is model
    computed.clear()
    assert torch.equal(model(x), want)
    assert computed == []
    assert not any(p.requires_grad for p in model.parameters())
    assert set(model.state_dict()) == names
    assert torch.equal(copy.deepcopy(model)(x), want)
    assert not model.training
    assert model.to("meta")[0].constant_norm.is_meta


@pytest.mark.parametrize("assign", [False, True])
def test_a_frozen_layer_has_the_norm_of_what_is_loaded_into_it(model, device, assign):
    x, other = torch.randn(5, 24, device=device), copy.deepcopy(model)
    with torch.no_grad():
        other[0].lora_b.mul_(3)
        other[2].weight.mul_(2)
    want = other(x)
    freeze(model).load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(model(x), want)
    norm = model[2].constant_norm
    model.load_state_dict({"0.bias": other[0].bias.detach()}, strict=False)
    assert model[2].constant_norm is norm


@pytest.mark.parametrize("adapted", ["0", "1"])
def test_a_frozen_layer_has_the_norm_of_a_weight_that_is_loaded_by_its_other_name(adapted):
    """As checkpoints name the weight that an output head shares with its embedding."""
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    model = trained(torch_dora.apply_dora(tied, torch_dora.DoRARule(adapted, rank=2, alpha=4)))
    state = {f"{1 - int(adapted)}.weight": torch.randn(6, 6)}
    frozen = freeze(copy.deepcopy(model))
    for one in (model, frozen):
        one.load_state_dict(state, strict=False)
    x = torch.randn(5, 6)
    assert torch.equal(frozen(x), model(x))


PLAIN = {
    "linear": (lambda: nn.Linear(6, 8), torch.randn(5, 6)),
    "conv": (lambda: nn.Conv1d(6, 8, 3), torch.randn(2, 6, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5)),
    "conv1d": (lambda: Conv1D(8, 6), torch.randn(5, 6)),
    "embedding": (lambda: nn.Embedding(9, 8), IDS),
    "experts": (Experts, torch.randn(3, 5, 6)),
    "4 bits": (
        lambda: bnb.Linear4bit(64, 8, compute_dtype=torch.float32).to("cpu"),
        torch.randn(5, 64),
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_fresh_adapter_of_weights_that_came_later_changes_nothing(kind, frozen):
    make, x = PLAIN[kind]
    rule = torch_dora.DoRARule(".*", rank=2, alpha=4)
    model = torch_dora.apply_dora(nn.Sequential(make()), rule)
    if frozen:
        freeze(model)
    pretrained = nn.Sequential(make())
    model.load_state_dict(pretrained.state_dict(), strict=False)
    want = pretrained(x)
    assert not torch.allclose(model(x), want, rtol=0.01)
    assert torch_dora.reset_magnitudes(model) is None
    torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_magnitudes_are_reset_to_the_norms_of_the_adapter_as_it_is(model, device):
    weight = torch.randn(40, 24, dtype=torch.float64)
    model[0].weight = nn.Parameter(weight.to(device, torch.float32), requires_grad=False)
    torch_dora.reset_magnitudes(model)
    lora_a, lora_b = (one.double().cpu() for one in (model[0].lora_a, model[0].lora_b))
    want = np.linalg.norm((weight + 2 * lora_b @ lora_a).numpy(), axis=1)
    np.testing.assert_allclose(model[0].magnitude.cpu().numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_weights_that_are_loaded_without_magnitudes_are_told_once(model, strict, caplog):
    """With strict, load_state_dict raises after it has loaded them."""
    base = {name: value for name, value in model.state_dict().items() if "lora" not in name}
    adapter = {name: base.pop(name) for name in list(base) if "magnitude" in name}
    model.load_state_dict(adapter, strict=False)
    model.load_state_dict(base | adapter, strict=False)
    assert not caplog.records
    with pytest.raises(RuntimeError) if strict else contextlib.nullcontext():
        model.load_state_dict(base, strict=strict)
    [record] = caplog.records
    assert "0.weight was loaded without 0.magnitude" in record.message
    assert "torch_dora.reset_magnitudes(model)" in record.message
    # The first layer's magnitude is missing too, but its weight has not changed.
    caplog.clear()
    model.load_state_dict({"2.weight": base["2.weight"]}, strict=False)
    assert [record.args for record in caplog.records] == [("2.", "2.")]


@pytest.mark.parametrize(
    "function",
    [
        torch_dora.norms,
        torch_dora.reset_magnitudes,
        freeze,
        lambda model: with_norms(model, {}).__enter__(),
    ],
)
def test_a_model_without_a_dora_layer_is_refused(function):
    with pytest.raises(ValueError, match="Linear has no DoRA layer"):
        function(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"2": None},
            ValueError,
            r"expected the result of torch_dora\.norms.*\n  no norm for layer 2$",
        ),
        ({"1": torch.ones(4)}, ValueError, r"\n  no layer for norm 1$"),
        ({"2": torch.ones(1, 16)}, ValueError, r"values\['2'\] has shape \(1, 16\); expected \(16"),
        ({"2": torch.ones(16, dtype=torch.int32)}, TypeError, r"values\['2'\] has dtype torch.int"),
        (
            {"2": torch.ones(16).bfloat16()},
            TypeError,
            r"values\['2'\] has dtype torch.bfloat16; exp",
        ),
        ({"2": [1.0] * 16}, TypeError, r"values\['2'\] must be a torch.Tensor"),
    ],
)
def test_values_of_another_model_are_refused(model, change, error, match):
    values = torch_dora.norms(model) | change
    values = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(error, match=match), with_norms(model, values):
        pass
    assert model[0].constant_norm is None


@pytest.mark.parametrize("function", [torch_dora.norms, freeze, lambda model: inside_of(model, {})])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(TypeError, match=r"model is a dict; expected a torch\.nn\.Module"):
        function({})


def inside_of(model, values):
    with with_norms(model, values):
        pass


def test_values_that_are_no_norms_are_refused(model):
    with pytest.raises(
        TypeError, match=r"values is a list; expected the dict that torch_dora\.norms"
    ):
        inside_of(model, [])
    values = {name: norm.to("meta") for name, norm in torch_dora.norms(model).items()}
    with pytest.raises(ValueError, match=r"values\['0'\] is on the meta device"):
        inside_of(model, values)


@pytest.mark.parametrize(
    "function",
    [torch_dora.norms, torch_dora.reset_magnitudes, freeze, torch_dora.merge_dora],
)
def test_the_meta_device_computes_shapes_of_whole_layers_only(function):
    """The weights alone are off the meta device if the base model's state is assigned."""
    with torch.device("meta"):
        model = torch_dora.apply_dora(
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch_dora.DoRARule(".*", 2, 4)
        )
    found = function(copy.deepcopy(model)) or {}
    tensors = found.values() if isinstance(found, dict) else found.parameters()
    assert all(tensor.is_meta for tensor in tensors)
    model.load_state_dict({"1.weight": torch.ones(2, 4)}, strict=False, assign=True)
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*:\n  1\.lora_a\n  1\.lora_b"):
        function(model)


def test_the_meta_device_has_no_merge_report(model):
    with pytest.raises(NotImplementedError, match=r"meta device(.|\n)*:\n  0\.weight\n  2\.weight"):
        torch_dora.merge_dora(model.to("meta"), return_report=True)
