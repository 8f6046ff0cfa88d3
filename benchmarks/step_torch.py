"""Level `step --torch`: a whole optimizer step of transformers' Llama.

Llama 3 8B's dimensions, random bf16 weights drawn on the device, adapters on all projections,
every layer checkpointed, loss on all tokens, AdamW on the adapters. torch_dora and PEFT take the
same base model, eagerly and compiled layer by layer.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig

from benchmarks.model.protocol import LLAMA3, QUICK, Protocol
from benchmarks.model.torch_model import random_model
from benchmarks.results import Row, attempted, milliseconds, over
from parity.sides.torch import processes
from parity.sides.torch.decoder import adapt, checkpoint_layers


class Side(NamedTuple):
    """One way to adapt the model.

    Attributes:
      package: "torch_dora" or "PEFT".
      method: "DoRA" or "LoRA".
      wide: fp32 adapters, under autocast; otherwise bf16 ones.
      in_4bit: over projections in NF4, by bitsandbytes.
    """

    package: str
    method: str
    compiled: bool = False
    wide: bool = False
    in_4bit: bool = False

    @property
    def name(self) -> str:
        precision = "fp32 adapters" if self.wide else "bf16 adapters"
        further = ", nf4" * self.in_4bit + ", compiled" * self.compiled
        return f"{self.package} {self.method}, {precision}{further}"


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
      sharded: under FSDP2, layer by layer, by one process for each GPU.
    """

    sizes: Protocol = LLAMA3
    layers: int = LLAMA3.layers
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    rounds: int = 6
    sides: tuple[Side, ...] = SIDES
    sharded: bool = False


TINY = Settings(QUICK, QUICK.layers, shape=(2, 16), rank=4, rounds=1)


def llama(sizes: Protocol, layers: int, use_cache: bool = False) -> LlamaConfig:
    """Returns the config of transformers' Llama of these sizes."""
    fields = sizes.hf_config(layers, 8192)
    del fields["model_type"]
    return LlamaConfig(**fields, use_cache=use_cache)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a side, with the ratio to the first."""
    count = 1
    if settings.sharded:
        count = torch.cuda.device_count() if device == "cuda" else 2
    first: Row = {}
    for side in settings.sides:
        layout = "fsdp" if settings.sharded else "one device"
        row: Row = {"kind": side.name, "layout": layout, "devices": count}
        row |= {"batch": settings.shape[0], "time": settings.shape[1], "rank": settings.rank}
        row |= {"layers": settings.layers, "hidden": settings.sizes.hidden}
        row = attempted(row, functools.partial(_taken, side, settings, device, count))
        torch.compiler.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        first = first or row
        yield over(row, first, "over_lora")


def _taken(side: Side, settings: Settings, device: str, count: int) -> Row:
    if settings.sharded:
        return processes.run(steps, count, device, side, settings, device, count)
    return steps(side, settings, device, count)


def steps(side: Side, settings: Settings, device: str, count: int) -> Row:
    """Returns the times of optimizer steps, their memory and losses; each of `count` processes
    calls this."""
    model = _model(side, settings, device)
    if settings.sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if side.compiled:
        # Layer by layer: all layers share one compiled program, and are recomputed by it.
        backend = "inductor" if device == "cuda" else "aot_eager"
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator(device).manual_seed(2)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, settings.shape, generator=generator, device=device)
    wide = torch.autocast(device, torch.bfloat16, enabled=side.wide)
    times, losses = [], []
    for turn in range(settings.rounds + 2):
        if turn == 2 and device == "cuda":  # The first two warm up.
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with wide:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    first, _, *kept = times
    row = milliseconds(kept)
    return row | {
        "tokens_per_s": 1e3 * settings.shape[0] * settings.shape[1] * count / row["ms"],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "first_step_s": first,
        "losses": losses,
    }


def _model(side: Side, settings: Settings, device: str) -> Any:
    model = random_model(llama(settings.sizes, settings.layers), device)
    if side.in_4bit:
        _quantise(model, device)
    checkpoint_layers(model)
    with torch.device(device):
        adapt(
            model,
            "peft" if side.package == "PEFT" else None,
            torch.float32 if side.wide else torch.bfloat16,
            settings.rank,
            2 * settings.rank,
            use_rslora=False,
            use_dora=side.method == "DoRA",
        )
    return model.train()


def _quantise(model: Any, device: str) -> None:
    """Puts the projections of a decoder into NF4, with scales that are quantised too, in place."""
    from bitsandbytes.nn import modules

    for module in list(model.model.layers.modules()):
        for name, one in module.named_children():
            if isinstance(one, torch.nn.Linear):
                out, width = one.weight.shape
                made: Any = modules.Linear4bit(width, out, bias=False, compute_dtype=torch.bfloat16)
                packed: Any = modules.Params4bit
                made.weight = packed(one.weight.data, quant_type="nf4", module=made)
                setattr(module, name, made.to(device))
    # By which PEFT knows.
    model.is_loaded_in_4bit = True
