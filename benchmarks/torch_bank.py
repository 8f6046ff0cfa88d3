"""Level `bank --torch`: torch_dora's bank beside the base alone, and beside PEFT.

One layer's seven projections of Llama 3 8B in bf16, eagerly, 64 adapters of ranks 8 to 64. Batches
are those of level `bank`.

    base         the projections alone
    LoRA         the bank, filled with adapters that have no magnitude
    DoRA         the bank
    PEFT LoRA    the same ranks by `adapter_names`, adapter by adapter
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

import torch_dora
from benchmarks.bank_adapters import draw_ids
from benchmarks.bank_programs import Sizes
from benchmarks.clock import QUICK, DeviceClock, Effort, wall_time
from benchmarks.results import Row


class Settings(NamedTuple):
    """What is measured: nothing is begun after `seconds`."""

    sizes: Sizes = Sizes()
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    shapes: tuple[tuple[int, int], ...] = (
        *((rows, 1) for rows in (1, 8, 32, 64, 128, 256)),
        (8, 512),
    )
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    kinds: tuple[str, ...] = ("base", "LoRA", "DoRA", "PEFT LoRA")
    seconds: float = 420.0


TINY = Settings(Sizes(32, 16, 48), 3, (1, 5), ((3, 1), (2, 4)), ("zipf",))


class Layer(nn.Module):
    """A decoder layer's projections, without attention: as level `bank` has them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.by: Any = nn.ModuleDict(
            {
                f"{name}_proj": nn.Linear(into, out, bias=False, dtype=torch.bfloat16)
                for name, (into, out) in sizes.projections.items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        into = rms_norm(x, x.shape[-1:])
        q, k, v = (self.by[f"{name}_proj"](into) for name in "qkv")
        x = x + self.by.o_proj(q + (k + v).repeat(1, 1, q.shape[-1] // k.shape[-1]))
        into = rms_norm(x, x.shape[-1:])
        return x + self.by.down_proj(silu(self.by.gate_proj(into)) * self.by.up_proj(into))


@torch.no_grad()
def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a measurement; the kinds of one batch are timed one after the other."""
    started = time.monotonic()
    torch.manual_seed(0)
    with torch.device(device):
        layer = Layer(settings.sizes).eval()
    banks = {
        kind: filled(
            torch_dora.AdapterBank(layer, settings.slots, max(settings.ranks)), settings.ranks, kind
        )
        for kind in ("LoRA", "DoRA")
    }
    peft = _peft(settings, device) if "PEFT LoRA" in settings.kinds else None
    clock = DeviceClock() if device == "cuda" else None
    for shape in settings.shapes:
        x = torch.randn(*shape, settings.sizes.hidden, dtype=torch.bfloat16, device=device)
        for mix in settings.mixes:
            ids = draw_ids(mix, shape[0], settings.slots)
            found: dict[str, float] = {}
            for kind in settings.kinds:
                if time.monotonic() - started > settings.seconds:
                    return
                model, options = layer, {}
                if kind in banks:
                    model = torch_dora.with_bank(layer, banks[kind], ids.tolist())
                elif peft is not None and kind == "PEFT LoRA":
                    model, options = peft, {"adapter_names": [str(one) for one in ids]}
                row: Row = {"task": "prefill" if shape[1] > 1 else "decode", "kind": kind}
                row |= {"rows": shape[0], "tokens": shape[1], "mix": mix}
                row |= _times(model, x, options, clock) | {"distinct": len(np.unique(ids))}
                found[kind] = row["us"]
                for other in ("base", "LoRA"):
                    if other in found:
                        row[f"over_{other.lower()}"] = found[kind] / found[other]
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


def _peft(settings: Settings, device: str) -> Any:
    """Returns a layer of its own that PEFT has adapted."""
    with torch.device(device):
        model: Any = Layer(settings.sizes).eval()
    adapted: Any = None
    for slot in range(settings.slots):
        rank = settings.ranks[slot % len(settings.ranks)]
        targets = [f"{name}_proj" for name in settings.sizes.projections]
        config = LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
        if adapted is None:
            adapted = get_peft_model(model, config, str(slot), autocast_adapter_dtype=False)
        else:
            adapted.add_adapter(str(slot), config, autocast_adapter_dtype=False)
    return adapted.eval()


def _times(model: Any, x: Tensor, options: dict[str, Any], clock: DeviceClock | None) -> Row:
    def step(x: Tensor) -> Tensor:
        return model(x, **options)

    step(x)
    wall = wall_time(step, [(x,)], Effort() if clock else QUICK)
    spread = clock.time("torch", step, [(x,)], Effort()) if clock else wall
    return {"us": spread.median, "p10_us": spread.p10, "p90_us": spread.p90, "wall_us": wall.median}


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    told = f"{row['task']:7} {row['rows']:4}×{row['tokens']:<4} {row['mix']:8} {row['kind']:10}"
    told += f"{row['us']:9.1f} µs, {row['wall_us']:9.1f} with its gaps"
    told += f"  {row['distinct']:3} adapters"
    for other in ("base", "lora"):
        told += f"  {row[f'over_{other}']:6.3f} of {other}" if f"over_{other}" in row else ""
    return told
