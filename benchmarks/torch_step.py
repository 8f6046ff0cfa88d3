"""Levels `step --torch` and `scale --torch`: a whole optimizer step of transformers' Llama.

Llama 3 8B's dimensions, random bf16 weights drawn on the device, adapters on all projections,
every layer checkpointed, loss on all tokens, AdamW on the adapters. torch_dora and PEFT take the
same base model: on one GPU eagerly and compiled layer by layer; on several GPUs under FSDP2, layer
by layer, with fp32 adapters under autocast, which is what both have by default, and with PEFT's
bf16 ones.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_dora
from benchmarks.model.protocol import PROJECTIONS
from benchmarks.results import Row
from parity.sides.torch import processes


class Side(NamedTuple):
    """One way to adapt the model.

    Attributes:
      package: "torch_dora" or "PEFT".
      method: "DoRA" or "LoRA".
      wide: fp32 adapters, under autocast; otherwise bf16 ones.
    """

    package: str
    method: str
    compiled: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        precision = "fp32 adapters" if self.wide else "bf16 adapters"
        return f"{self.package} {self.method}, {precision}" + ", compiled" * self.compiled


ALONE = (
    Side("PEFT", "LoRA"),
    Side("PEFT", "DoRA"),
    Side("torch_dora", "DoRA"),
    Side("torch_dora", "DoRA", compiled=True),
    Side("PEFT", "LoRA", compiled=True),
    Side("PEFT", "DoRA", compiled=True),
)
SHARDED = (
    Side("PEFT", "LoRA", wide=True),
    Side("PEFT", "DoRA", wide=True),
    Side("torch_dora", "DoRA", wide=True),
    Side("PEFT", "DoRA"),
)


class Settings(NamedTuple):
    """What is measured: `shape` is batch and time of one device; no side begins after `seconds`,
    and one that takes longer than `side_seconds` is given up."""

    layers: int = 32
    hidden: int = 4096
    shape: tuple[int, int] = (2, 4096)
    rank: int = 16
    rounds: int = 6
    seconds: float = 240.0
    side_seconds: float = 60.0

    def config(self) -> LlamaConfig:
        """Returns Llama 3 8B's dimensions, or a small model of `hidden` below 1024."""
        small = self.hidden < 1024
        return LlamaConfig(
            vocab_size=256 if small else 128_256,
            hidden_size=self.hidden,
            intermediate_size=7 * self.hidden // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=4 if small else 32,
            num_key_value_heads=2 if small else 8,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_cache=False,
        )


TINY = Settings(layers=2, hidden=64, shape=(2, 16), rank=4, rounds=1)


def measure(settings: Settings, device: str, count: int = 0) -> Iterator[Row]:
    """Yields one row a side: on one device, or under FSDP2 in ``count`` processes, one a device."""
    started = time.monotonic()
    lora = None
    for side in SHARDED if count else ALONE:
        if time.monotonic() - started > settings.seconds:
            return
        row: Row = {"kind": side.name, "layout": "fsdp" if count else "one device"}
        row |= {"devices": max(1, count), "batch": settings.shape[0], "time": settings.shape[1]}
        row |= {"rank": settings.rank, "layers": settings.layers, "hidden": settings.hidden}
        try:
            if count:
                row |= processes.run(_sharded, count, device, side, settings, device)
            else:
                row |= _measured(side, settings, device)
        except Exception as error:  # One that fails costs no other its measurement.
            row["failed"] = f"{type(error).__name__}: {error}"[-600:]
        lora = lora or row.get("ms")
        if lora and "ms" in row:
            row["over_lora"] = row["ms"] / lora
        yield row


def _sharded(side: Side, settings: Settings, device: str) -> Row:
    return _measured(side, settings, device, torch.distributed.get_world_size())


def _measured(side: Side, settings: Settings, device: str, count: int = 0) -> Row:
    with _limited(settings.side_seconds):
        try:
            return _steps(side, settings, device, count)
        finally:
            torch.compiler.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def _steps(side: Side, settings: Settings, device: str, count: int) -> Row:
    model = _model(side, settings, device)
    if count:
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
    compile_s = 0.0
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
        taken = time.perf_counter() - begin
        if turn > 1:
            times.append(1e3 * taken)
        elif turn == 0:
            compile_s = taken
    ms = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    rows = settings.shape[0] * settings.shape[1] * max(1, count)
    return {
        "ms": ms,
        "spread_ms": max(times) - min(times),
        "tokens_per_s": 1e3 * rows / ms,
        "peak_bytes": peak,
        "first_step_s": compile_s,
        "losses": losses,
    }


def _model(side: Side, settings: Settings, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            settings.config(), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.requires_grad_(False)
    # transformers is about to rename it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    with torch.device(device):
        if side.package == "PEFT":
            config = LoraConfig(
                r=settings.rank,
                lora_alpha=2 * settings.rank,
                use_dora=side.method == "DoRA",
                target_modules=list(PROJECTIONS),
            )
            get_peft_model(model, config, autocast_adapter_dtype=side.wide)
        else:
            dtype = torch.float32 if side.wide else torch.bfloat16
            paths = rf".*\.({'|'.join(PROJECTIONS)})"
            rule = torch_dora.DoRARule(paths, settings.rank, 2 * settings.rank, adapter_dtype=dtype)
            torch_dora.apply_dora(model, rule)
    return model.train()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def line(row: Row) -> str:
    """Returns a row as a line to read."""
    name = f"{row['layout']:10} {row['kind']:40}"
    if "failed" in row:
        return f"{name} failed: {row['failed'][-150:]}"
    return (
        f"{name} {row['ms']:8.1f} ms  {row['tokens_per_s']:8,.0f} tokens/s  peak "
        f"{row['peak_bytes'] / 2**30:5.1f} GiB  first step {row['first_step_s']:5.1f} s  "
        f"loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}  {row['over_lora']:.3f} of LoRA"
    )
