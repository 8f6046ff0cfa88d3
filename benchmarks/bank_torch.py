"""Level `bank --torch`: torch_dora's bank beside the base alone, and beside PEFT.

One layer's seven projections of Llama 3 8B in bf16, eagerly, 64 adapters of ranks 8 to 64. Batches
are those of level `bank`.

    base         the projections alone
    LoRA         the bank, filled with adapters that have no magnitude
    DoRA         the bank
    PEFT LoRA    the same ranks by `adapter_names`, adapter by adapter
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

import torch_dora
from benchmarks import clock
from benchmarks.bank_adapters import draw_ids
from benchmarks.model.protocol import LLAMA3, PROJECTIONS, QUICK, Protocol
from benchmarks.results import Row, over


class Settings(NamedTuple):
    sizes: Protocol = LLAMA3
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    shapes: tuple[tuple[int, int], ...] = (
        *((rows, 1) for rows in (1, 8, 32, 64, 128, 256)),
        (8, 512),
    )
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    only: tuple[str, ...] = ("base", "LoRA", "DoRA", "PEFT LoRA")


TINY = Settings(QUICK, 3, (1, 5), ((3, 1), (2, 4)), ("zipf",))


class Layer(nn.Module):
    """A decoder layer's projections, without attention: as level `bank` has them."""

    def __init__(self, sizes: Protocol) -> None:
        super().__init__()
        self.by: Any = nn.ModuleDict(
            {
                name: nn.Linear(into, out, bias=False, dtype=torch.bfloat16)
                for name, (into, out) in sizes.projections().items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        by, into = self.by, rms_norm(x, x.shape[-1:])
        q, k, v = by.q_proj(into), by.k_proj(into), by.v_proj(into)
        x = x + by.o_proj(q + (k + v).repeat(1, 1, q.shape[-1] // k.shape[-1]))
        into = rms_norm(x, x.shape[-1:])
        return x + by.down_proj(silu(by.gate_proj(into)) * by.up_proj(into))


@torch.no_grad()
def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; the kinds of one batch are timed one after the other."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = Layer(settings.sizes).eval()
    banks = {
        kind: filled(
            torch_dora.AdapterBank(layer, settings.slots, max(settings.ranks)), settings.ranks, kind
        )
        for kind in ("LoRA", "DoRA")
    }
    peft = None
    if "PEFT LoRA" in settings.only:
        with torch.device(device):
            peft = by_peft(Layer(settings.sizes).eval(), settings.ranks, settings.slots)
    for shape in settings.shapes:
        x = torch.randn(*shape, settings.sizes.hidden, dtype=torch.bfloat16, device=device)
        for mix in settings.mixes:
            ids = draw_ids(mix, shape[0], settings.slots)
            found: dict[str, Row] = {}
            for kind in settings.only:
                model, options = layer, {}
                if kind in banks:
                    model = torch_dora.with_bank(layer, banks[kind], ids.tolist())
                elif peft is not None and kind == "PEFT LoRA":
                    model, options = peft, {"adapter_names": [str(one) for one in ids]}
                row: Row = {"task": "prefill" if shape[1] > 1 else "decode", "kind": kind}
                row |= {"rows": shape[0], "tokens": shape[1], "mix": mix}
                row |= _times(model, x, options, device) | {"distinct": len(np.unique(ids))}
                found[kind] = row
                for other in ("base", "LoRA"):
                    row = over(row, found.get(other), f"over_{other.lower()}", "us")
                yield row


@torch.no_grad()
def filled(bank: Any, ranks: tuple[int, ...], kind: str = "DoRA") -> Any:
    """Returns a bank with random numbers in every slot, of these ranks in turn."""
    for tensors in bank.tensors.values():
        tensors.g.fill_(1)
        if kind == "DoRA":
            tensors.g.uniform_(0.5, 1.5)
        tensors.scale.fill_(0.5)
        for slot in range(bank.slots):
            rank = ranks[slot % len(ranks)]
            tensors.rank[slot] = rank
            for matrix in (tensors.lora_a, tensors.lora_b):
                matrix[slot, :rank].normal_(0, matrix.shape[-1] ** -0.5)
    return bank


def by_peft(model: Any, ranks: tuple[int, ...], count: int, **options: Any) -> Any:
    """Returns a model with `count` random adapters of PEFT's, of these ranks in turn."""
    adapted: Any = None
    for number in range(count):
        rank = ranks[number % len(ranks)]
        config = LoraConfig(
            r=rank, target_modules=list(PROJECTIONS), init_lora_weights=False, **options
        )
        if adapted is None:
            adapted = get_peft_model(model, config, str(number), autocast_adapter_dtype=False)
        else:
            adapted.add_adapter(str(number), config, autocast_adapter_dtype=False)
    return adapted.eval()


def _times(model: Any, x: Tensor, options: dict[str, Any], device: str) -> Row:
    def step(x: Tensor) -> Tensor:
        return model(x, **options)

    step(x)
    effort = clock.Effort() if device == "cuda" else clock.QUICK
    wall = clock.wall_time(step, [(x,)], effort)
    spread = clock.kernel_time("torch", step, [(x,)], device)
    return {"us": spread.median, "p10_us": spread.p10, "p90_us": spread.p90, "wall_us": wall.median}
