"""Level `bank --torch`: torch_dora's bank, compared with the base alone and with PEFT.

The model is one layer of Llama 3 8B's seven projections in bf16, without attention, run eagerly,
with 64 adapters of ranks 8 to 64. The batches are those of the level `bank`.

    base         the projections alone
    LoRA         the bank with g = 1
    DoRA         the bank
    PEFT LoRA    adapters of the same ranks by `adapter_names`, which PEFT runs one by one

One line is one kind with one batch: device time (`us`) with a cold L2 cache and its outer tenths,
wall time (`wall_us`), `over_base` and `over_lora`, and the number of distinct adapters. The kinds
of a batch are measured in turns, since the card's clock rate changes; times are medians over turns.
"""

import collections
import functools
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
from benchmarks.results import Row, with_ratio


class Settings(NamedTuple):
    """The settings of the level; `shapes` are (rows, tokens) of the batches, `turns` the number of
    measurements of each kind."""

    sizes: Protocol = LLAMA3
    slots: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    shapes: tuple[tuple[int, int], ...] = (
        *((rows, 1) for rows in (1, 8, 32, 64, 128, 256)),
        (8, 512),
    )
    mixes: tuple[str, ...] = ("zipf", "uniform", "one")
    only: tuple[str, ...] = ("base", "LoRA", "DoRA", "PEFT LoRA")
    turns: int = 3


TINY = Settings(QUICK, 3, (1, 5), ((3, 1), (2, 4)), ("zipf",), turns=1)


class Layer(nn.Module):
    """The projections of a decoder layer, without attention; see `benchmarks.bank_programs`."""

    def __init__(self, sizes: Protocol) -> None:
        super().__init__()
        self.projections: Any = nn.ModuleDict(
            {
                name: nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16)
                for name, (n_in, n_out) in sizes.projections().items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        by, normalised = self.projections, rms_norm(x, x.shape[-1:])
        q, k, v = by.q_proj(normalised), by.k_proj(normalised), by.v_proj(normalised)
        x = x + by.o_proj(q + (k + v).repeat(1, 1, q.shape[-1] // k.shape[-1]))
        normalised = rms_norm(x, x.shape[-1:])
        return x + by.down_proj(silu(by.gate_proj(normalised)) * by.up_proj(normalised))


@torch.no_grad()
def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each kind and batch."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = Layer(settings.sizes).eval()
        peft = by_peft(Layer(settings.sizes).eval(), settings.ranks, settings.slots)
    banks = {
        kind: filled(
            torch_dora.AdapterBank(layer, settings.slots, max(settings.ranks)), settings.ranks, kind
        )
        for kind in ("LoRA", "DoRA")
    }
    for shape in settings.shapes:
        x = torch.randn(*shape, settings.sizes.hidden, dtype=torch.bfloat16, device=device)
        for mix in settings.mixes:
            ids = draw_ids(mix, shape[0], settings.slots)
            steps: dict[str, clock.Step] = {}
            for kind in settings.only:
                model, options = layer, {}
                if kind in banks:
                    model = torch_dora.with_bank(layer, banks[kind], ids.tolist())
                elif kind == "PEFT LoRA":
                    model, options = peft, {"adapter_names": [str(slot) for slot in ids]}
                steps[kind] = functools.partial(model, **options)
            times = _times_in_turns(steps, x, settings.turns, device)
            batch: Row = {"task": "prefill" if shape[1] > 1 else "decode"}
            batch |= {"rows": shape[0], "tokens": shape[1], "mix": mix}
            for kind in settings.only:
                row = batch | {"kind": kind} | times[kind] | {"distinct": len(np.unique(ids))}
                for other in ("base", "LoRA"):
                    row = with_ratio(row, times.get(other), f"over_{other.lower()}", "us")
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


def by_peft(model: Any, ranks: tuple[int, ...], count: int) -> Any:
    """Returns a PEFT model with `count` random adapters, of these ranks in turn."""
    options: Any = {"target_modules": list(PROJECTIONS), "init_lora_weights": False}
    adapted: Any = None
    for number in range(count):
        config = LoraConfig(r=ranks[number % len(ranks)], **options)
        if adapted is None:
            adapted = get_peft_model(model, config, str(number), autocast_adapter_dtype=False)
        else:
            adapted.add_adapter(str(number), config, autocast_adapter_dtype=False)
    return adapted.eval()


def _times_in_turns(
    steps: dict[str, clock.Step], x: Tensor, turns: int, device: str
) -> dict[str, Row]:
    """Returns the times of each kind's step."""
    effort = clock.Effort() if device == "cuda" else clock.QUICK
    spreads = collections.defaultdict(list)
    for kind in list(steps) * turns:
        steps[kind](x)
        wall = clock.wall_time(steps[kind], [(x,)], effort)
        device_time = clock.kernel_time("torch", steps[kind], [(x,)], device)
        spreads[kind].append((device_time.median, device_time.p10, device_time.p90, wall.median))
    names = ("us", "p10_us", "p90_us", "wall_us")
    return {
        kind: dict(zip(names, np.median(of_turns, axis=0).tolist(), strict=True))
        for kind, of_turns in spreads.items()
    }
