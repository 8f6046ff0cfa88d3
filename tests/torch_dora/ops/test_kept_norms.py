"""A compiled layer that is checkpointed computes its norm once, and again if anything changed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_dora import DoRALinear
from torch_dora.ops import kept_norms
from torch_dora.ops import norm as norm_module

# Dynamo's own, of layers that follow one another.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list with one item for each norm that is computed; a new layer computes one."""
    compute, calls = norm_module._squared_norm, []
    monkeypatch.setattr(norm_module, "_squared_norm", lambda *a: (calls.append(1), compute(*a))[1])
    return calls


def layers(count: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(DoRALinear(8, 8, rank=2, alpha=4, device=device) for _ in range(count)))
    for layer in made:
        nn.init.normal_(layer.lora_b)
        layer.compile(backend="aot_eager", fullgraph=True)
    return made


def gradients(model: nn.Sequential, x: Tensor, between: Callable[[], None] = lambda: None) -> list:
    """Returns the gradients of checkpointed layers, with something done before the backward
    pass."""
    model.zero_grad()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    between()
    x.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def test_a_repeated_call_computes_no_norm(computed, device):
    model, x = layers(2, device), torch.randn(5, 8, device=device)
    found = gradients(model, x)
    assert len(computed) == 2 + len(model)
    wanted = torch.autograd.grad(
        model(x).square().sum(), [one for one in model.parameters() if one.requires_grad]
    )
    torch.testing.assert_close(found, list(wanted))


def test_every_forward_pass_computes_it(computed, device):
    model, x = layers(1, device), torch.randn(5, 8, device=device)
    for step in range(3):
        gradients(model, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(1.5)  # which autograd's versions do not show
        assert len(computed) == len(model) + step + 1


def test_a_changed_operand_has_another_norm(computed, device):
    model, x = layers(1, device), torch.randn(5, 8, device=device)
    gradients(model, x, lambda: model[0].weight.detach().mul_(2))
    assert len(computed) == 2 + len(model)


def test_a_storage_with_the_memory_of_another_has_its_own_norm():
    """FSDP2 gathers the parameters of all layers into memory that it uses again."""
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    weights = [torch.randn(8, 8), torch.randn(8, 8)]
    results: list[Tensor] = []

    class Repeat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *call):
            ctx.call = call
            kept_norms.kept(*call)
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            results.append(kept_norms.kept(*ctx.call))
            return *grad_outputs, None, None

    y = torch.ones(1, requires_grad=True)
    for weight in weights:  # both with the same lora_a and lora_b
        y = Repeat.apply(y, lambda w=weight: w.sum(1), (weight, a, b))
    y.sum().backward()
    torch.testing.assert_close(results, [w.sum(1) for w in reversed(weights)])


def test_the_norms_of_freed_models_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_norms, "_KEPT", {})
    monkeypatch.setattr(kept_norms, "_most", 4)
    for _ in range(9):
        operands = torch.randn(8, 8), torch.randn(2, 8), torch.randn(8, 2)
        kept_norms.kept(lambda w=operands[0]: w.sum(1), operands)
        del operands
    assert len(kept_norms._KEPT) <= 64 + 4
