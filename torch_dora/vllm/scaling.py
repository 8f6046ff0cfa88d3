"""The multiplication of a base layer's result by g, row by row.

vLLM's layers with LoRA compute the base's part by ``base_layer.quant_method.apply``, on all of
their ways: alone, on a second stream, and sharded. So that is what multiplies.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


class RowScales(nn.Module):
    """The g of the adapters in the slots, for one layer.

    A module, since vLLM keeps the buffers of modules when it sleeps or reloads weights.

    Attributes:
        g: f32[slots + 1, out], with the outputs of this process. The last row, of ones, is that of
            slot -1, which means no adapter.
        slots: i64[tokens], the slot of every token of the batch; vLLM writes it in place.
        is_left_to_kernels: whether something else multiplies, as in :mod:`torch_dora.vllm.punica`.
    """

    g: Tensor
    slots: Tensor

    def __init__(self, slots: int, features: int, rows: Tensor) -> None:
        super().__init__()
        ones = torch.ones(slots + 1, features, dtype=torch.float32, device=rows.device)
        self.register_buffer("g", ones, persistent=False)
        self.register_buffer("slots", rows, persistent=False)
        self.is_left_to_kernels = False

    def forward(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Returns g ∘ (y - bias) + bias for y [..., out]; the bits of y where g is 1."""
        g = self.g[self.slots[: math.prod(y.shape[:-1])]].view(y.shape)
        scaled = y * g
        if bias is not None:
            scaled = scaled + (1 - g) * bias
        return scaled.to(y.dtype)


class _Scaled:
    """Makes a linear method of vLLM multiply its result by the layer's g."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Called in this form, which torch.compile traces.
        y = super().apply(layer, x, bias)  # pyright: ignore[reportAttributeAccessIssue]
        scales = layer.row_scales
        return y if scales.is_left_to_kernels else scales(y, bias)


def attach(base_layer: Any, slots: int, features: int, rows: Tensor) -> None:
    """Makes ``base_layer`` multiply its result by the g of each row's slot, which is 1 at first.

    Args:
        base_layer: a linear layer of vLLM.
        slots: number of slots.
        features: number of outputs of this process.
        rows: i64[tokens], the slot of every token.
    """
    base_layer.row_scales = RowScales(slots, features, rows)
    # A copy, since layers may share their method. Its class is a subclass of the same name: vLLM
    # looks at both.
    method = base_layer.quant_method
    kind = type(method)
    scaled = type(kind.__name__, (_Scaled, kind), {"__module__": kind.__module__})
    base_layer.quant_method = scaled.__new__(scaled)
    base_layer.quant_method.__dict__.update(method.__dict__)


def product(base_layer: Any, x: Tensor) -> Tensor:
    """Returns what ``base_layer`` computes for x [..., in] without its bias and without g."""
    method: Any = super(_Scaled, base_layer.quant_method)
    return method.apply(base_layer, x, None)
