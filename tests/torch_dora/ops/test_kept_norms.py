"""A compiled layer that is checkpointed computes its norm once, and again if anything changed."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_dora import DoRALinear
from torch_dora.ops import kept_norms
from torch_dora.ops import norm as norm_module

# Of Dynamo's own: of layers that follow one another, and of what 2.11 deprecates and uses.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning"
)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list with one item for each norm that is computed; a new layer computes one."""
    compute, calls = norm_module._squared_norm, []
    monkeypatch.setattr(norm_module, "_squared_norm", lambda *a: (calls.append(1), compute(*a))[1])
    return calls


def layers(count: int, device: str) -> nn.Sequential:
    made = nn.Sequential(*(DoRALinear(8, 8, rank=2, alpha=4, device=device) for _ in range(count)))
    for layer in made:
        nn.init.normal_(layer.lora_b)
        layer.compile(backend="aot_eager", fullgraph=True)
    return made


def gradients(
    model: nn.Sequential,
    x: Tensor,
    between: Callable[[], object] = lambda: None,
    reentrant: bool = False,
) -> list:
    """Returns the gradients of checkpointed layers, with something done before the backward
    pass."""
    model.zero_grad()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=reentrant)
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


def test_a_norm_is_used_once(computed, device):
    """A call without a gradient, as of reentrant checkpointing, keeps none, and finds none that is
    older."""
    model, x = layers(1, device), torch.randn(5, 8, device=device, requires_grad=True)
    gradients(model, x)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    gradients(model, x, reentrant=True)
    assert len(computed) == 3 + len(model)


def test_layers_that_share_memory_have_norms_of_their_own():
    """FSDP2 gathers the parameters of all layers into memory that it uses again."""
    weight, a, memory = torch.randn(8, 8), torch.randn(2, 8), torch.randn(8, 2)
    results = []

    class Repeat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *call):
            ctx.call = call
            kept_norms.kept(*call)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
            results.append(float(kept_norms.kept(*ctx.call)))
            return dy, None, None, None

    def call(number: int, lora_b: Tensor) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        return Repeat.apply(x, lambda: torch.tensor(number), (weight, a, lora_b), (2.0,))

    first, second = memory.view(8, 2), memory.view(8, 2)
    y, _ = call(1, first), call(2, second)
    y.backward()
    assert results == [1]


def test_the_norms_of_freed_models_are_dropped(device):
    gc.collect()
    before = len(kept_norms._KEPT)
    model = layers(1, device)
    model(torch.randn(5, 8, device=device))
    assert len(kept_norms._KEPT) == before + 1
    del model
    torch.compiler.reset()
    gc.collect()
    assert len(kept_norms._KEPT) == before
