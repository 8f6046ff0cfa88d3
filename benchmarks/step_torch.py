"""Levels `step --torch`, `scale --torch` and `quantised --torch`: an optimizer step in PyTorch.

torch_dora and PEFT adapt the same transformers Llama of Llama 3 8B's dimensions, with random bf16
weights, adapters of rank 16 on all projections, every layer checkpointed, the loss on all tokens,
and AdamW on the adapters. The levels differ in the variants (`sides`) and in where they run:

    step --torch        one GPU, 2 × 4096 tokens, bf16 adapters, eager, and compiled layer by layer
    scale --torch       FSDP2 over all GPUs, one process for each; fp32 adapters under autocast, the
                        default of both packages, and bf16 adapters of PEFT
    quantised --torch   one GPU, 1 × 4096 tokens, projections in bitsandbytes' NF4: PEFT's LoRA is
                        QLoRA, PEFT's DoRA is QDoRA

One line is one variant: the median wall time of a step (`ms`) and the largest minus the smallest
(`spread_ms`), tokens per second of all GPUs, the peak of allocated memory, the time of the first
step (with compilation), the loss of each step, and `over_lora`, the time divided by that of the
first variant, PEFT's LoRA.
"""

import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.results import Row, attempt, milliseconds, with_ratio
from benchmarks.torch_decoder import Side, adapted, free
from parity.sides.torch import processes

SIDES = (
    Side("PEFT", "LoRA"),
    Side("PEFT", "DoRA"),
    Side("torch_dora", "DoRA"),
    Side("torch_dora", "DoRA", compiled=True),
    Side("PEFT", "LoRA", compiled=True),
    Side("PEFT", "DoRA", compiled=True),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      shape: batch and time of one device.
      sharded: whether to run FSDP2, layer by layer, with one process for each GPU.
    """

    sizes: Protocol = LLAMA3
    layers: int = LLAMA3.layers
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    rounds: int = 6
    sides: tuple[Side, ...] = SIDES
    sharded: bool = False


TINY = Settings(QUICK, QUICK.layers, shape=(2, 16), rank=4, rounds=1)


def settings(level: str, quick: bool) -> Settings:
    """Returns the settings of "step", "scale" or "quantised"."""
    chosen = TINY if quick else Settings()
    if level == "scale":
        wide = tuple(side._replace(wide=True) for side in SIDES[:3])
        return chosen._replace(sides=(*wide, Side("PEFT", "DoRA")), sharded=True)
    if level == "quantised":
        sides = tuple(side._replace(in_4bit=True) for side in SIDES[:3])
        return chosen._replace(sides=sides, shape=TINY.shape if quick else (1, 4096))
    return chosen


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each side."""
    count = 1
    if settings.sharded:
        count = torch.cuda.device_count() if device == "cuda" else 2
    first: Row = {}
    for side in settings.sides:
        layout = "fsdp" if settings.sharded else "one device"
        row: Row = {"kind": side.name, "layout": layout, "devices": count}
        row |= {"batch": settings.shape[0], "time": settings.shape[1], "rank": settings.rank}
        row |= {"layers": settings.layers, "hidden": settings.sizes.hidden}
        row = attempt(row, functools.partial(_measured, side, settings, device, count))
        free()
        first = first or row
        yield with_ratio(row, first, "over_lora")


def _measured(side: Side, settings: Settings, device: str, count: int) -> Row:
    if settings.sharded:
        return processes.run(steps, count, device, side, settings, device, count)
    return steps(side, settings, device, count)


def steps(side: Side, settings: Settings, device: str, count: int) -> Row:
    """Returns the time, memory and losses of optimizer steps; each of `count` processes calls
    this."""
    alpha = 2 * settings.rank
    model = adapted(side, settings.sizes, settings.layers, settings.rank, alpha, device)
    if settings.sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if side.compiled:
        # Compiled layer by layer, so that all layers and their recomputation share one program.
        backend = "inductor" if device == "cuda" else "aot_eager"
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator(device).manual_seed(2)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, settings.shape, generator=generator, device=device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=side.wide)
    times, losses = [], []
    for turn in range(settings.rounds + 2):
        if turn == 2 and device == "cuda":  # The first two steps are warm-up.
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # This waits for the device.
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    row = milliseconds(times[2:])
    return row | {
        "tokens_per_s": 1e3 * settings.shape[0] * settings.shape[1] * count / row["ms"],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "first_step_s": times[0],
        "losses": losses,
    }
