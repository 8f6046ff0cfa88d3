"""Layers whose adapters cannot be multiplied by g."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def wrapped(kind, base):
    """Returns a layer with LoRA of vLLM around a base layer, made without their constructors."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.base_layer = base
    return layer


def linear(kind):
    base = kind.__new__(kind)
    torch.nn.Module.__init__(base)
    base.quant_method = SimpleNamespace()
    return base


def test_experts_and_layers_with_a_forward_of_their_own_are_refused_by_name():
    from vllm.lora import layers  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
        ReplicatedLinear,
    )

    from torch_dora.vllm import slices

    class Router(ReplicatedLinear):
        def forward(self, x):
            return x

    plain = wrapped(layers.ColumnParallelLinearWithLoRA, linear(ColumnParallelLinear))
    assert slices.refuses(plain) is None
    for kind in (layers.FusedMoEWithLoRA, layers.FusedMoE3DWithLoRA):
        reason = slices.refuses(wrapped(kind, torch.nn.Module()))
        assert reason == f"vLLM serves it by {kind.__name__}; expected a linear layer"
    router = wrapped(layers.ReplicatedLinearWithLoRA, linear(Router))
    assert slices.refuses(router).startswith("Router has a forward of its own; expected one of")
    plain.base_layer.quant_method = None
    assert slices.refuses(plain).startswith("ColumnParallelLinear has no quant_method")


def test_layers_that_something_calls_without_their_adapters_are_found():
    """As latent attention (MLA) does, and vLLM before 0.32 where two modules share a layer."""
    from vllm.lora import layers  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
        ColumnParallelLinear,
    )

    from torch_dora.vllm import slices

    plain, absorbed, shared = (linear(ColumnParallelLinear) for _ in range(3))
    attention, other = torch.nn.Module(), torch.nn.Module()
    attention.impl = SimpleNamespace(kv_b_proj=absorbed, scale=1.0)
    other.gate = shared
    model = torch.nn.ModuleDict({"attention": attention, "other": other})
    for i, base in enumerate((plain, absorbed, shared)):
        model[str(i)] = wrapped(layers.ColumnParallelLinearWithLoRA, base)
    found = slices.called_without_adapters(model)
    assert [id(base) in found for base in (plain, absorbed, shared)] == [False, True, True]
