"""A mixed batch over a bank of adapters in torch_dora."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_dora
from parity.bank_cases import RANKS, Adapter, Found, Problem


@torch.no_grad()
def model_of(problem: Problem, device: str) -> nn.Sequential:
    """Returns the model with one projection, `proj`."""
    out, into = problem.weight.shape
    base = nn.Linear(into, out, dtype=getattr(torch, problem.dtype), device=device)
    base.weight.copy_(torch.tensor(problem.weight))
    base.bias.copy_(torch.tensor(problem.bias))
    return nn.Sequential(OrderedDict(proj=base))


@torch.no_grad()
def rows(problem: Problem, folders: Sequence[Path], device: str) -> Found:
    """Returns the batch's rows."""
    model = model_of(problem, device)
    bank = torch_dora.AdapterBank(model, len(problem.adapters) + 1, max(RANKS))
    for slot, (adapter, folder) in enumerate(zip(problem.adapters, folders, strict=True)):
        bank.load(slot, folder if adapter.from_folder else _object(model, adapter))
    x = torch.tensor(problem.x).to(device, getattr(torch, problem.dtype))
    found = torch_dora.with_bank(model, bank, problem.ids.tolist())(x), model(x)
    return Found(*(y.double().cpu().numpy() for y in found))


def _object(model: Any, adapter: Adapter) -> nn.Module:
    """Returns the model with the adapter."""
    layer = torch_dora.DoRALinear.from_linear(model.proj, **adapter.options)
    for name, array in adapter.arrays.items():
        getattr(layer, name).copy_(torch.tensor(array))
    return nn.Sequential(OrderedDict(proj=layer))
