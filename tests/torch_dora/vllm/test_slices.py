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
