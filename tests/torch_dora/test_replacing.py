"""What a layer has besides its tensors goes over to the layer in its place, or is refused."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.pytorch_utils import Conv1D

from torch_dora import (
    DoRAConv,
    DoRAConv1D,
    DoRAEmbedding,
    DoRALinear,
    DoRARule,
    apply_dora,
    merge_dora,
    remove_dora,
)

RULE = DoRARule(r"\d", 2, 4)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def test_hooks_go_over_and_come_back(model):
    calls = []
    handles = [
        model[0].register_forward_pre_hook(lambda *a: calls.append("before")),
        model[0].register_forward_hook(
            lambda module, args, kwargs, y: calls.append(type(module).__name__), with_kwargs=True
        ),
        model[0].register_full_backward_hook(lambda *a: calls.append("backward")),
        model[0].register_forward_hook(lambda *a: calls.append("always"), always_call=True),
    ]
    model[0].register_state_dict_post_hook(lambda *a: calls.append("saved"))
    model[0].register_load_state_dict_post_hook(lambda *a: calls.append("loaded"))
    x = torch.randn(3, 4, requires_grad=True)

    def called():
        calls.clear()
        model(x).sum().backward()
        model.load_state_dict(model.state_dict())
        return list(calls)

    want = called()
    assert want == ["before", "Linear", "always", "backward", "saved", "loaded"]
    apply_dora(model, RULE)
    want[1] = "DoRALinear"
    assert called() == want
    added = model[0].register_forward_hook(lambda *a: calls.append("added"))
    remove_dora(model)
    assert called() == ["before", "Linear", "always", "added", "backward", "saved", "loaded"]
    for handle in (*handles, added):
        handle.remove()
    apply_dora(model, RULE)
    assert called() == ["saved", "loaded"]


def test_attributes_and_buffers_go_over(model):
    model[0].name = "first"
    model[0].register_buffer("count", torch.ones(1))
    names = set(model.state_dict())
    layer = apply_dora(model, RULE)[0]
    assert layer.name == "first"
    assert names < set(model.state_dict())
    model.load_state_dict(model.state_dict() | {"0.count": torch.zeros(1)}, assign=True)
    assert remove_dora(model)[0].count == 0


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (DoRALinear, nn.Linear(4, 6)),
        (DoRAConv, nn.Conv1d(4, 6, 3, stride=2, padding=1)),
        (DoRAConv, nn.Conv2d(4, 6, (3, 2), groups=2, dilation=2, padding="same")),
        (DoRAEmbedding, nn.Embedding(9, 6, padding_idx=3)),
        (DoRAConv1D, Conv1D(6, 4)),
    ],
)
def test_a_layer_offers_the_attributes_of_its_base(kind, base):
    layer = apply_dora(base, DoRARule("", 2, 4))
    assert type(layer) is kind
    names = [name for name in vars(base) if not name.startswith("_")]
    assert len(names) > 2
    for name in names:
        assert getattr(layer, name) == getattr(base, name), name
    assert getattr(layer, "norm_type", 2.0) == 2.0
    assert callable(layer.norm)


def test_accelerates_hooks_on_a_device_go_over(model):
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    for layer in (model[0], model[2]):
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"), append=True)
    x = torch.randn(3, 4)
    want = model(x)
    hook = model[0]._hf_hook
    apply_dora(model, RULE)
    torch.testing.assert_close(model(x), want)
    model[0].magnitude.data.mul_(2)
    doubled = model(x)
    assert not torch.allclose(doubled, want)
    assert model[0]._hf_hook is hook
    merged = merge_dora(model)
    torch.testing.assert_close(merged(x), doubled)
    model[0].magnitude.data.mul_(1e3)
    torch.testing.assert_close(merged(x), doubled)
    torch.testing.assert_close(remove_dora(model)(x), want)


def test_offloaded_layers_are_refused_by_name(model):
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(NotImplementedError, match=r"offloaded(.|\n)*\n  0 \(Linear\)\n  2 \(Lin"):
        apply_dora(model, RULE)
    assert type(model[0]) is nn.Linear
    model(torch.randn(3, 4))


def test_a_forward_of_its_own_is_refused(model):
    model[2].forward = lambda x: x
    with pytest.raises(NotImplementedError, match=r"'2' cannot be .*base\.forward was replaced"):
        apply_dora(model, RULE)


class Negative(nn.Module):
    def forward(self, x):
        return -x


def registered(layer):
    name = "bias" if hasattr(layer, "bias") else "weight"
    parametrize.register_parametrization(layer, name, Negative())
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (parametrizations.weight_norm, "weight by _WeightNorm, .*remove_parametrizations"),
        (parametrizations.orthogonal, "weight by _Orthogonal"),
        (registered, "(bias|weight) by Negative"),
        (
            nn.utils.weight_norm,
            r"base\.weight is not a parameter .*weight_g, weight_v.*remove_weight",
        ),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
)
@pytest.mark.parametrize("base", [nn.Linear(4, 6), nn.Conv1d(4, 6, 1), nn.Embedding(4, 6)])
def test_parametrized_layers_are_refused(make, match, base):
    model = nn.Sequential(nn.Linear(4, 4), make(copy.deepcopy(base)))
    before = list(model.modules())
    with pytest.raises(NotImplementedError, match="'1' cannot be adapted: .*" + match):
        apply_dora(model, RULE)
    assert list(model.modules()) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_attentions_projection_is_refused():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"MultiheadAttention, which reads(.|\n)*\n  0\.out_proj"):
        apply_dora(model, DoRARule("0.out_proj", 2, 4))


class PeftModel(nn.Module):
    """What PEFT's is told by."""


class PeftModelForCausalLM(PeftModel):
    pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (torch.compile, r"a OptimizedModule, .* inner one: model\._orig_mod"),
        (nn.DataParallel, r"a DataParallel, .* inner one: model\.module"),
        (lambda _: DDP.__new__(DDP), r"a DistributedDataParallel, .* inner one: model\.module"),
        (lambda model: PeftModelForCausalLM(), r"a PeftModelForCausalLM, .* model\.unload"),
    ],
)
@pytest.mark.parametrize("function", [lambda m: apply_dora(m, RULE), remove_dora, merge_dora])
def test_wrappers_are_refused(model, wrap, match, function):
    with pytest.raises(TypeError, match=match):
        function(wrap(model))


@pytest.mark.parametrize("name", ["weight", "lora_a", "magnitude"])
@pytest.mark.parametrize("function", [remove_dora, merge_dora])
def test_hooks_that_compute_tensors_would_stay_behind(name, function):
    model = apply_dora(nn.Sequential(nn.Linear(8, 8)), RULE)
    pruned = prune.random_unstructured(model[0], name, 0.5)
    with pytest.raises(NotImplementedError, match=rf"first call .*prune\.remove .*:\n  0\.{name}$"):
        function(model)
    prune.remove(pruned, name)
    assert function(model)(torch.ones(2, 8)).isfinite().all()


@pytest.mark.parametrize("function", [remove_dora, merge_dora])
def test_a_weight_that_is_parametrized_afterwards_would_be_lost(function):
    model = apply_dora(nn.Sequential(nn.Linear(8, 8)), RULE)
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    with pytest.raises(
        NotImplementedError, match=r"first call .*remove_parametrizations.*:\n  0.weight"
    ):
        function(model)
    assert isinstance(model[0].settings.weight, nn.Parameter)


def test_a_merged_copy_does_not_call_the_layers_of_the_model():
    model = apply_dora(nn.Sequential(nn.Linear(8, 8)), RULE)
    forward = model.forward
    model.forward = lambda x: forward(x)
    with pytest.raises(
        NotImplementedError, match=r"a copy would call the original.*:\n  the model itself"
    ):
        merge_dora(model)


class FullyShardedDataParallel(nn.Module):
    """What FSDP1 is told by, which stands inside of models too."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.mark.parametrize("function", [lambda m: apply_dora(m, RULE), remove_dora, merge_dora])
def test_what_fsdp1_wraps_inside_is_refused(function):
    with pytest.raises(TypeError, match=r"model\.1 is a FullyShardedDataParallel, .*fully_shard"):
        function(nn.Sequential(nn.Linear(4, 4), FullyShardedDataParallel(nn.Linear(4, 4))))


@pytest.mark.parametrize("function", [lambda m: apply_dora(m, RULE), remove_dora, merge_dora])
def test_what_fsdp1_has_flattened_is_refused(function):
    model = nn.Sequential(nn.Linear(4, 4))
    part = model[0].weight.data
    del model[0].weight
    model[0].weight, model[0]._is_fsdp_managed_module = part, True
    with pytest.raises(TypeError, match=r"model\.0 is a Linear whose weight FSDP1 .*fully_shard"):
        function(model)
