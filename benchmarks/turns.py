"""Times of torch's variants, which take turns since the host's speed changes during a run."""

import gc
import operator
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.results import Row, milliseconds, with_ratio
from benchmarks.torch_decoder import Side

LORA, IN_BF16, DEFAULT = (
    Side("PEFT", "LoRA"),
    Side("PEFT", "DoRA"),
    Side("PEFT", "DoRA", wide=True),
)
OURS = Side("torch_dora", "DoRA"), Side("torch_dora", "DoRA", wide=True)


def in_turns[K](
    calls: Mapping[tuple[K, bool], Callable[[], Any]], rounds: int, device: str
) -> dict[tuple[K, bool], Row]:
    """Returns the times of calls in turns, round by round, and the bytes that each allocates.
    `of_first` is the median of a call's time divided by that of the first call in the same round:
    what slows a host down for seconds slows both. `least_ms` is the fastest call's.

    Args:
      calls: by their kind, and by whether they run under autocast.
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
    walls = {key: [wall for wall, _ in each] for key, each in times.items()}
    first = next(iter(walls.values()))
    return {
        key: milliseconds(walls[key])
        | {
            "least_ms": 1e3 * min(walls[key]),
            "of_first": statistics.median(map(operator.truediv, walls[key], first)),
            "host_ms": milliseconds([host for _, host in each])["ms"],
            "call_bytes": peaks[key],
        }
        for key, each in times.items()
    }


def with_ratios(timed: Mapping[tuple[Side, bool], Row], side: Side, autocast: bool) -> Row:
    """Returns the times of a side from `in_turns`, also divided by those of PEFT's sides that are
    there."""
    row = timed[side, autocast]
    row = with_ratio(row, timed.get((LORA, False)), "over_lora")
    row = with_ratio(row, timed.get((IN_BF16, False)), "over_peft_bf16")
    return with_ratio(row, timed.get((DEFAULT, True)), "over_peft_default")


def device_ms(call: Callable[[], Any], autocast: bool) -> float:
    """Returns the milliseconds of a call's kernels and copies on the GPU."""
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=autocast),
        profile(activities=[ProfilerActivity.CUDA]) as profiled,
    ):
        call()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in events) / 1e3


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
