"""A layer computes with the parameters that it has, whichever way they came into it."""

import copy
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.torch_dora.adapters import Experts
from torch_dora import DoRARule, apply_dora, merge_dora, remove_dora
from torch_dora.layers import dora_layers

LAYERS = {
    "Linear": (lambda: nn.Linear(6, 8), (5, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"), (2, 6, 9)),
    "Conv2d": (lambda: nn.Conv2d(6, 8, 3, groups=2), (2, 6, 5, 4)),
    "Conv3d": (lambda: nn.Conv3d(6, 8, 2), (2, 6, 3, 4, 3)),
    "Embedding": (lambda: nn.Embedding(11, 8, padding_idx=3), None),
    "Conv1D": (lambda: Conv1D(8, 6), (5, 6)),
}


def model(make):
    """A model of one adapted layer, every parameter random."""
    adapted = apply_dora(nn.Sequential(make()), DoRARule("0", 4, 6.0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name == "0.magnitude":
                parameter.mul_(1 + torch.rand_like(parameter))
            else:
                parameter.normal_(std=0.4)
    return adapted


def assigned(make, state):
    adapted = model(make)
    adapted.load_state_dict(state, assign=True)
    return adapted


def materialised(make, state):
    adapted = model(make).to("meta").to_empty(device="cpu")
    adapted.load_state_dict(state)
    return adapted


def built_on_meta(make, state):
    with torch.device("meta"):
        adapted = apply_dora(nn.Sequential(make()), DoRARule("0", 4, 6.0))
    adapted.load_state_dict(state, assign=True)
    return adapted


def set_one_by_one(make, state):
    adapted = model(make)
    for name, value in state.items():
        setattr(adapted[0], name.removeprefix("0."), nn.Parameter(value, requires_grad=False))
    return adapted


def overwritten(make, state):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        adapted = model(make).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    adapted.load_state_dict(state)
    return adapted.float()


@pytest.fixture(params=LAYERS)
def layer(request):
    """(what makes the base layer, an input of it)."""
    make, shape = LAYERS[request.param]
    return make, torch.arange(11) if shape is None else torch.randn(shape)


@pytest.mark.parametrize(
    "replace", [assigned, materialised, built_on_meta, set_one_by_one, overwritten]
)
def test_forward_merge_and_remove_go_by_the_new_ones(layer, replace):
    make, x = layer
    source = model(make)
    adapted = replace(make, copy.deepcopy(source.state_dict()))
    torch.testing.assert_close(adapted(x), source(x))
    merged = adapted[0].merge()
    assert type(merged) is type(source[0].base)
    torch.testing.assert_close(merged(x), source[0].merge()(x))
    torch.testing.assert_close(merge_dora(adapted)(x), source(x), rtol=1e-4, atol=1e-4)
    weight = adapted[0].weight
    torch.testing.assert_close(remove_dora(adapted)(x), remove_dora(source)(x))
    assert adapted[0].weight is weight


def test_functional_call(layer):
    make, x = layer
    source, other = model(make), model(make)
    found = torch.func.functional_call(other, dict(source.named_parameters()), (x,))
    torch.testing.assert_close(found, source(x))
    assert not torch.equal(other(x), found)


def _exported(adapted, x):
    torch.export.export(adapted, (x,))


def _differentiated(adapted, x):
    values = {name: one.detach() for name, one in adapted.named_parameters()}

    def call(values):
        return torch.func.functional_call(adapted, values, (x,)).square().sum()

    torch.func.grad(call)(values)


@pytest.mark.parametrize("lend", [_exported, _differentiated])
def test_what_stands_in_for_one_call_is_not_kept(layer, lend):
    """A layer that kept such tensors could be neither copied nor stored."""
    make, x = layer
    adapted = model(make)
    expected = adapted(x)
    lend(adapted, x)
    assert adapted[0].settings.weight is adapted[0].weight
    assert torch.equal(copy.deepcopy(adapted)(x), expected)


def test_an_offloaded_weight_is_not_kept(tmp_path):
    hooks = pytest.importorskip("accelerate")
    adapted, x = model(lambda: nn.Linear(6, 8)).requires_grad_(False), torch.randn(5, 6)
    expected = adapted(x)
    weight = weakref.ref(adapted[0].weight)
    hooks.disk_offload(adapted, str(tmp_path), execution_device="cpu")
    for _ in range(2):
        torch.testing.assert_close(adapted(x), expected)
        assert weight() is None
        assert adapted[0].settings.weight is None
    hooks.hooks.remove_hook_from_submodules(adapted)
    torch.testing.assert_close(merge_dora(adapted)(x), expected)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_unfrozen_embedding_keeps_its_options(options):
    """The weight's gradient is that of the base, times g."""
    plain = nn.Embedding(11, 8, padding_idx=3, **options)
    adapted = model(lambda: copy.deepcopy(plain))
    layer, ids = adapted[0], torch.tensor([1, 1, 3, 5])
    layer.weight.requires_grad_(True)
    adapted(ids).sum().backward()
    plain(ids).sum().backward()
    assert layer.weight.grad.is_sparse == plain.weight.grad.is_sparse
    found, expected = (one.weight.grad.to_dense() for one in (layer, plain))
    torch.testing.assert_close(found, expected * layer.g(torch.float32).detach())


@pytest.mark.parametrize("name", ["lora_a", "lora_b"])
@pytest.mark.parametrize("make", [*(make for make, _ in LAYERS.values()), Experts])
def test_arrays_of_another_rank_are_refused(make, name):
    """They would be multiplied by the scale of the layer's own rank."""
    rules = [DoRARule(".*", rank, 6.0) for rank in (4, 8)]
    of_4, of_8 = (apply_dora(nn.Sequential(make()), rule) for rule in rules)
    layer, other = (dict(dora_layers(model)).popitem()[1] for model in (of_4, of_8))
    kept = getattr(layer, name)
    with pytest.raises(ValueError, match=rf"{name} is set .*rank 4, .*load_adapter"):
        setattr(layer, name, getattr(other, name))
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=rf"size mismatch for .*{name}"):
            of_4.load_state_dict(of_8.state_dict(), assign=assign)
    assert getattr(layer, name) is kept


@pytest.mark.parametrize("make", [*(make for make, _ in LAYERS.values()), Experts])
def test_data_of_another_rank_is_refused_in_a_call(make):
    rules = [DoRARule(".*", rank, 6.0) for rank in (4, 8)]
    of_4, of_8 = (apply_dora(nn.Sequential(make()), rule) for rule in rules)
    layer, other = (dict(dora_layers(model)).popitem()[1] for model in (of_4, of_8))
    layer.lora_a.data, layer.lora_b.data = other.lora_a.data, other.lora_b.data
    for call in (lambda: layer.g(torch.float32), lambda: merge_dora(of_4)):
        with pytest.raises(ValueError, match=r"lora_a is set .*rank 4, .*load_adapter"):
            call()
