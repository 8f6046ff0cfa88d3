"""Level `model --torch`: inference and gradient of a transformers decoder, eagerly, as its users
call it: torch_dora and PEFT, with what both make by default, and with bf16 adapters.

The model is a transformers Llama of Qwen3-8B's dimensions with random bf16 weights, adapters on all
projections (rsLoRA), one sequence of 4,096 tokens, the loss on the last 1,024. For the gradient
every layer is checkpointed. By default adapters are fp32: PEFT's need autocast then.

The variants take turns, round by round, since the host's speed changes during a run. One line is
one variant: the median wall time of a call and of the host in it, in ms, the largest minus the
smallest, the bytes that a call allocates at most, and the time divided by PEFT's LoRA's, by that of
PEFT's DoRA in bf16, and by that of PEFT's default.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.model.protocol import QUICK, QWEN3, Protocol
from benchmarks.results import Row, milliseconds
from benchmarks.torch_decoder import Side, adapted

LORA, IN_BF16, DEFAULT = (
    Side("PEFT", "LoRA"),
    Side("PEFT", "DoRA"),
    Side("PEFT", "DoRA", wide=True),
)
OURS = Side("torch_dora", "DoRA"), Side("torch_dora", "DoRA", wide=True)


class Settings(NamedTuple):
    """The settings of the level."""

    sizes: Protocol = QWEN3
    layers: int = 8
    rank: int = 384
    rounds: int = 7
    tokens: int = 4096
    last: int = 1024


TINY = Settings(QUICK, QUICK.layers, rank=4, rounds=1, tokens=32, last=8)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each variant and each of inference and gradient."""
    sides = {
        **{(side, side.wide): side for side in (LORA, IN_BF16, DEFAULT, *OURS)},
        # Without autocast, as torch_dora's users may call it.
        (OURS[1], False): OURS[1],
    }
    sizes, layers, rank = settings.sizes, settings.layers, settings.rank
    models = {
        key: adapted(side, sizes, layers, rank, rank // 2, device, use_rslora=True)
        for key, side in sides.items()
    }
    tokens = torch.randint(settings.sizes.vocabulary, (1, settings.tokens), device=device)
    for task, call in (("inference", _inference), ("gradient", _gradient)):
        for model in models.values():
            model.train(task == "gradient")
        calls = {
            key: lambda call=call, model=model: call(model, tokens, settings)
            for key, model in models.items()
        }
        timed = in_turns(calls, settings.rounds, device)
        for side, autocast in models:
            yield {
                "kind": side.name + ", autocast" * autocast,
                "task": task,
                "rank": settings.rank,
                "layers": settings.layers,
                "hidden": settings.sizes.hidden,
                **with_ratios(timed, side, autocast),
            }


def in_turns(
    calls: Mapping[tuple[Side, bool], Callable[[], Any]], rounds: int, device: str
) -> dict[tuple[Side, bool], Row]:
    """Returns the times of calls in turns, round by round, and the bytes that each allocates.

    Args:
      calls: by their side, and by whether they run under autocast.
      rounds: the number of rounds to time, after two to warm up.
    """
    times: dict[Any, list[tuple[float, float]]] = {key: [] for key in calls}
    peaks = dict.fromkeys(calls, 0)
    gc.collect()
    gc.freeze()  # The collections between the calls need not visit what is there already.
    for turn in range(rounds + 2):
        for key, call in calls.items():
            gc.collect()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            taken = _time(call, key[1])
            if device == "cuda":
                peaks[key] = torch.cuda.max_memory_allocated() - before
            if turn > 1:
                times[key].append(taken)
    gc.unfreeze()
    return {
        key: milliseconds([wall for wall, _ in each])
        | {"host_ms": milliseconds([host for _, host in each])["ms"], "call_bytes": peaks[key]}
        for key, each in times.items()
    }


def with_ratios(timed: Mapping[tuple[Side, bool], Row], side: Side, autocast: bool) -> Row:
    """Returns the times of a side from `in_turns`, also divided by PEFT's."""
    row = timed[side, autocast]
    return row | {
        "over_lora": row["ms"] / timed[LORA, False]["ms"],
        "over_peft_bf16": row["ms"] / timed[IN_BF16, False]["ms"],
        "over_peft_default": row["ms"] / timed[DEFAULT, True]["ms"],
    }


def _time(call: Callable[[], Any], autocast: bool) -> tuple[float, float]:
    """Returns the seconds until the device is done, and until the host is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        call()
    host = time.perf_counter() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, host


def _inference(model: Any, tokens: torch.Tensor, settings: Settings) -> None:
    with torch.no_grad():
        model(input_ids=tokens, logits_to_keep=settings.last, use_cache=False)


def _gradient(model: Any, tokens: torch.Tensor, settings: Settings) -> None:
    logits = model(input_ids=tokens, logits_to_keep=settings.last, use_cache=False).logits
    targets = tokens[0, -settings.last :]
    F.cross_entropy(logits.flatten(0, 1).float(), targets).backward()
