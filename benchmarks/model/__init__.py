"""Level `model`: a decoder with the dimensions of Qwen3-8B and random bf16 weights.

DoRA and LoRA on all projections with rank 384, in JAX, on 4096 tokens:

    inference   the logits of the last 1024 tokens
    gradient    the gradient of the adapters, every layer rematerialised, loss on the same tokens
    step        the gradient and an AdamW update

"(no Triton)" are variants without XLA's Triton products, "norm kept" computes the norms once and
not in every call. Two layers are compared with fp32. One line is one variant of one task, with
device time (cold L2 cache) and wall time; `benchmarks.report` lists its fields. Level
`model --torch` measures the same with torch_dora and PEFT.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.clock import Effort
from benchmarks.model.protocol import BEST_LORA, KINDS, QUICK, QWEN3, Kind, Protocol, Task
from benchmarks.model.tasks import variant
from benchmarks.work import Work, matches, shape_name

EFFORT: dict[Task, Effort] = {
    "inference": Effort(seconds=1.0, least=3, most=20, blocks=5),
    "gradient": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "step": Effort(seconds=1.5, least=2, most=20, blocks=5),
}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields functions that make the pieces of work, for the chosen tasks of each kind alone."""
    protocol = QUICK if settings.quick else QWEN3
    for kind in KINDS:
        for task in kind.tasks:
            if matches(f"model {task} {shape_name(protocol.shape())} {kind.label}", settings.only):
                yield functools.partial(work, kind, task, protocol, device)


def work(kind: Kind, task: Task, protocol: Protocol, device: str) -> Work:
    """Returns one task of a kind as a piece of work with one variant."""
    only = variant(kind, task, protocol, device)
    baselines = {kind.label: BEST_LORA} if kind.is_baseline else {}
    return Work(f"model {task}", protocol.shape(), 0, 0, {}, [only], baselines, EFFORT[task])
