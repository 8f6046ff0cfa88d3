"""Adapters away from where they begin, and a module of packed experts."""

import torch
from torch import nn

from torch_dora import DoRALayer


@torch.no_grad()
def trained[Module: nn.Module](module: Module) -> Module:
    """Returns the module as training leaves it: lora_b not zero, every magnitude off its norm."""
    for layer in module.modules():
        if isinstance(layer, DoRALayer):
            nn.init.normal_(layer.lora_a, std=0.2)
            nn.init.normal_(layer.lora_b, std=0.2)
            layer.reset_magnitude()
            layer.magnitude.mul_(1 + torch.randn_like(layer.magnitude) / 20)
    return module


class Experts(nn.Module):
    """Packed experts [experts, in, out], multiplied as transformers' modules do."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x):
        return torch.bmm(x, self.down_proj)
