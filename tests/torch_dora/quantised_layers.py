"""What tests of quantised weights hold a layer to, whoever has quantised it."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from parity import oracle, tolerances
from torch_dora.ops import dora_linear, factored_norm


def adapter(out: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Returns lora_a and lora_b of rank 5 for a weight [out, width]."""
    rng = np.random.default_rng(seed)
    a = torch.tensor(rng.normal(size=(5, width)) / 11, dtype=torch.float32)
    return a, torch.tensor(rng.normal(size=(out, 5)) / 2, dtype=torch.float32)


def assert_norm_agrees(
    weight: Tensor,
    exact: np.ndarray,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    implementation: str | None = None,
) -> None:
    """Holds `factored_norm` of a quantised weight to the norm of `exact`, what it stands for."""
    wanted = oracle.norm(exact, lora_a.numpy(), lora_b.numpy(), scale)
    arrays = lora_a.to(weight.device), lora_b.to(weight.device)
    norm = factored_norm(weight, *arrays, scale, implementation=implementation)
    assert norm.dtype == torch.float32
    np.testing.assert_allclose(norm.cpu(), wanted, rtol=1e-5)


def assert_projection_agrees(
    weight: Tensor, exact: np.ndarray, bias: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float
) -> None:
    """Holds `dora_linear` over a quantised weight [out, in], and its gradients, to their bounds
    around those of `exact`, what the weight stands for in fp64, on the weight's device."""
    rng, (out, width), device = np.random.default_rng(2), exact.shape, weight.device
    x = torch.tensor(rng.normal(size=(14, width)), dtype=torch.float32)
    dy = torch.tensor(rng.normal(size=(14, out)), dtype=torch.float32)
    norm = oracle.norm(exact, lora_a.numpy(), lora_b.numpy(), scale)
    magnitude = torch.tensor(norm * (1 + 0.1 * rng.normal(size=out)), dtype=torch.float32)
    arrays = [one.cpu().numpy() for one in (lora_a, lora_b, magnitude)]
    arguments = (x.numpy(), exact, *arrays, scale)
    operands = (x, lora_a, lora_b, magnitude, bias)
    leaves = [one.to(device).detach().requires_grad_() for one in operands]
    left, *adapter, added = leaves
    y = dora_linear(left, weight, *adapter, scale, bias=added)
    found = torch.autograd.grad(y, leaves, dy.to(device))
    gradients = oracle.dora_linear_grads(dy.numpy(), *arguments, dtype="float32")
    of_bias = bias.cpu().numpy()
    bound = tolerances.dora_linear(dy.numpy(), *arguments, "float32", bias=of_bias)
    wanted = oracle.dora_linear(*arguments, bias=of_bias, dtype="float32")
    assert np.all(np.abs(y.detach().cpu().double().numpy() - wanted) <= bound.y)
    for name, one in zip(("x", "lora_a", "lora_b", "magnitude", "bias"), found, strict=True):
        error = np.abs(one.cpu().double().numpy() - getattr(gradients, f"d_{name}"))
        assert np.all(error <= getattr(bound, f"d_{name}")), name


class Summed(nn.Module):
    """The sum of what layers of one shape compute: one program of all of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def assert_compiles(model: nn.Module, x: Tensor) -> None:
    """Holds a model of adapted layers over quantised weights, as torch.compile has it, to what it
    computes without; and the graph to be one, that keeps nothing as large as a weight in floats."""
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.is_floating_point() else 0)
        return tensor

    leaves = [x.requires_grad_(), *(one for one in model.parameters() if one.requires_grad)]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = compiled(x)
    dy = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, leaves, dy)
    torch.manual_seed(0)
    y = model(x)
    wanted = y, *torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(found, wanted)
    assert max(kept) < x.shape[-1] * y.shape[-1]
