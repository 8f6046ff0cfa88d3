"""Level `encoder`: a training step of DeBERTa, by transformers and by `jax_dora.lm.encoder`.

The encoders have the dimensions of DeBERTa-v2 xlarge, and of a deep and narrow one, with random
weights, 20 texts of 512 tokens, labels, and all of the original's dropout. A step is the gradient
of all parameters, which are float32, and their update by AdamW; products are in bf16, in PyTorch by
autocast. A BERT is the same encoder without relative positions; transformers' has PyTorch's fused
attention.

One line is one side of a model: wall time of a step by the clock of `benchmarks.clock`, also per
layer (`layer_us`), and by CUPTI the launches and the time of a step's kernels, together
(`launches`, `device_us`) and by operator (`operators`, name: [launches, µs]). Kernels are assigned
by their names, of XLA's fusions by what they contain; "product" are the matrix products of any
library, and "fused attention" has the products, gathers, softmax and dropout of its kernels.

Each side runs in a process of its own. A few at a time prepare their steps. When all of these are
ready, they are timed in turns, for some rounds, while the others wait: `rounds_us` has the times of
all rounds, so that a disturbed one can be seen, and `device_us` the kernels of the median of three
more steps. A side that may fill most of a card's memory is alone. `ready_s` are the seconds until a
side has made two steps.

A line of `layernorm` is norm(dropout(y) + x) alone, device time with a cold L2 cache: forward, and
for `both_us` its gradient with the forward pass that it needs. `of_copy` is the rate of the bytes
of y, x and the result, and for both passes of y, x and three gradients, too, divided by that at
which XLA copies a large array in the same run; `of_equal_copy` is the time in which XLA copies as
many bytes, divided by the norm's.
"""

import itertools
import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.clock import (
    Effort,
    Kernels,
    Spread,
    by_name,
    device_clock,
    kernel_time,
    synchronise,
    wall_time,
)
from benchmarks.encoder_steps import Encoder, Side, jax_step, torch_step
from benchmarks.results import Row
from jax_dora import ops

OPERATORS = {
    "fused attention": r"disentangled|attention|attend|flash|fmha|cudnn_generated|mha",
    "product": r"gemm|nvjet|cutlass|cublas|xmma|matmul|dot",
    "gather": r"gather|scatter|index",
    "dropout": r"dropout|masked_scale|random|rng|philox",
    "softmax": r"softmax|masked_fill|exponential",
    "layernorm": r"layer_norm|layernorm|GammaBeta|residual_norm",
    "update": r"adam|multi_tensor",
}
SIDES = (
    Side("jax_dora fused", "deberta", "triton"),
    Side("BERT of transformers eager", "bert"),
    Side("jax_dora, default options", "deberta", "triton", has_options=False),
    Side("transformers, layers compiled", "deberta", compiled="layers", keeps_scores=True),
    Side("transformers eager", "deberta", keeps_scores=True),
    Side("transformers compiled", "deberta", compiled="whole", keeps_scores=True),
    Side("BERT of jax_dora", "bert", "triton"),
    Side("BERT of transformers compiled", "bert", compiled="whole"),
    Side("jax_dora XLA", "deberta", "xla", keeps_scores=True),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      only: patterns of the beginnings of names, of an encoder and a side, in order; all by default.
      layers: of the encoders; 0 for all of theirs.
      rounds: the number of turns of each side.
      together: the number of sides that prepare their steps at the same time, and take turns.
      patience: the seconds that sides have until they are ready.
      copied: number of bf16 elements whose copying is timed.
    """

    encoders: tuple[Encoder, ...] = (
        Encoder("xlarge", 24, 1536, 24),
        Encoder("deep and narrow", 48, 512, 8),
    )
    batch: int = 20
    time: int = 512
    rounds: int = 9
    layers: int = 0
    together: int = 3
    patience: float = 600
    copied: int = 2**29
    only: tuple[str, ...] = ()


TINY = Settings((Encoder("tiny", 2, 64, 4, 99, 8),), batch=2, time=24, rounds=2, copied=2**10)


class Work(NamedTuple):
    """A side of an encoder, to be measured in a process of its own."""

    encoder: Encoder
    side: Side
    settings: Settings
    device: str

    @property
    def facts(self) -> Row:
        encoder, settings = self.encoder, self.settings
        facts: Row = {"encoder": encoder.name, "layers": self.layers, "of_layers": encoder.layers}
        facts |= {"hidden": encoder.hidden, "heads": encoder.heads, "batch": settings.batch}
        return facts | {"time": settings.time, "side": self.side.name}

    @property
    def layers(self) -> int:
        return self.settings.layers or self.encoder.layers

    @property
    def is_large(self) -> bool:
        """Whether a step may fill most of a card's memory: xlarge's, with scores in memory."""
        return self.side.keeps_scores and self.layers * self.encoder.heads > 400


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each side of each encoder, and those of norms."""
    works = [
        Work(encoder, side, settings, device) for encoder in settings.encoders for side in SIDES
    ]
    wanted = dict.fromkeys(
        work
        for pattern in settings.only or ("",)
        for work in works
        if fnmatch(f"{work.encoder.name} {work.side.name}", f"{pattern}*")
    )
    for group in _groups([*wanted], settings.together):
        for work, row in zip(group, _in_turns(group, settings), strict=True):
            yield work.facts | row
    if any(fnmatch("layernorm", f"{pattern}*") for pattern in settings.only or ("",)):
        large = _copy_us(settings.copied, device)
        rate = 4 * settings.copied / large
        yield {"work": "copy", "us": large, "tb_per_s": rate / 1e6}
        for encoder in settings.encoders:
            for implementation in ("triton", "xla") if device == "cuda" else ("xla",):
                yield _layernorm(encoder, settings, device, implementation, rate)


def _groups(works: Sequence[Work], together: int) -> Iterator[list[Work]]:
    """Yields works that are prepared at the same time, in order."""
    for (alone, _), some in itertools.groupby(works, lambda work: (work.is_large, work.encoder)):
        yield from map(list, itertools.batched(some, 1 if alone else together))


def _in_turns(works: Sequence[Work], settings: Settings) -> list[Row]:
    """Returns the rows of works, which prepare at the same time, each in a process, and are timed
    one after another, round by round."""
    context: Any = multiprocessing.get_context("spawn")
    pipes, processes, begin = [], [], time.monotonic()
    for work in works:
        here, there = context.Pipe()
        process = context.Process(target=_measure, args=(there, work), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    rows = []
    for pipe, process in zip(pipes, processes, strict=True):
        rows.append(_answer(pipe, begin + settings.patience - time.monotonic()))
        if "failed" in rows[-1]:
            process.kill()
    for question in (*["wall"] * settings.rounds, "kernels"):
        for row, pipe in zip(rows, pipes, strict=True):
            if "failed" not in row:
                pipe.send(question)
                answer = _answer(pipe)
                rounds = row.get("rounds_us", []) + answer.pop("rounds_us", [])
                row |= answer | {"rounds_us": rounds}
    for process in processes:
        process.kill()
        process.join()
    for work, row in zip(works, rows, strict=True):
        if times := row.get("rounds_us"):
            wall = Spread.of(times)
            row |= {"wall": wall._asdict(), "layer_us": wall.median / work.layers}
    return rows


def _answer(pipe: Any, seconds: float | None = None) -> Row:
    try:
        if seconds is not None and not pipe.poll(max(0, seconds)):
            return {"failed": "not ready in time"}
        return pipe.recv()
    except EOFError:
        return {"failed": "the process has ended"}


def _measure(pipe: Any, work: Work) -> None:
    """Prepares a step, says how long that took, and then measures what it is asked for."""
    if work.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    begin = time.monotonic()
    try:
        make = jax_step if work.side.attention else torch_step
        encoder = work.encoder._replace(layers=work.layers)
        step = make(encoder, work.side, (work.settings.batch, work.settings.time), work.device)
        step()
        loss = float(step())
        pipe.send({"ready_s": time.monotonic() - begin, "loss": loss})
        while True:
            pipe.send(_wall(step) if pipe.recv() == "wall" else _kernels(step, work.device))
    except EOFError:  # The measurement has ended.
        pass
    except Exception as error:  # of memory, at some sizes
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:600]})


def _wall(step: Callable[[], Any]) -> Row:
    """Returns the mean time of a few steps, after one that is not timed."""
    return {"rounds_us": [wall_time(step, [()], Effort(0.3, least=3, blocks=1)).median]}


def _kernels(step: Callable[[], Any], device: str) -> Row:
    """Returns the kernels of the step whose kernels take the median of three steps' times."""
    if device != "cuda":
        return {}
    steps = [device_clock().kernels(step) for _ in range(3)]
    kernels = sorted(steps, key=lambda kernels: sum(us for _, us in kernels))[1]
    return {
        "launches": len(kernels),
        "device_us": sum(us for _, us in kernels),
        "operators": by_operator(kernels),
        "kernels": by_name(kernels),
    }


def _layernorm(
    encoder: Encoder, settings: Settings, device: str, implementation: str, rate: float
) -> Row:
    """Returns the line of the norms of an encoder; `rate` is that of copying, in bytes per µs."""
    shape = settings.batch, settings.time, encoder.hidden
    y, x, dz = jax.random.normal(jax.random.key(0), (3, *shape), jnp.bfloat16)
    vectors = jnp.ones(shape[-1:]), jnp.zeros(shape[-1:])
    dropout = ops.Dropout(jnp.zeros((2,), jnp.uint32), 0.1)
    options: Any = {"epsilon": 1e-7, "dropout": dropout, "implementation": implementation}

    def forward(*operands: jax.Array) -> jax.Array:
        return ops.residual_layer_norm(*operands, **options)

    def gradient(dz: jax.Array, *operands: jax.Array) -> Any:
        return jax.vjp(forward, *operands)[1](dz)

    row: Row = {"work": "layernorm", "encoder": encoder.name, "hidden": encoder.hidden}
    row["implementation"] = implementation
    for prefix, function, operands, arrays in (
        ("", forward, (y, x, *vectors), 3),
        ("both_", gradient, (dz, y, x, *vectors), 8),
    ):
        us = _device_us(jax.jit(function), operands, device)
        row |= {f"{prefix}us": us, f"{prefix}of_copy": arrays * y.nbytes / us / rate}
        row[f"{prefix}of_equal_copy"] = _copy_us(arrays * y.size // 2, device) / us
    return row


def _copy_us(elements: int, device: str) -> float:
    x = jnp.zeros((elements,), jnp.bfloat16)
    return _device_us(jax.jit(lambda x: x + 1), (x,), device)


def _device_us(step: Any, operands: tuple[Any, ...], device: str) -> float:
    synchronise(step(*operands))
    return kernel_time("jax", step, [operands], device).median


def by_operator(kernels: Kernels) -> dict[str, tuple[int, float]]:
    """Returns the launches and the time of each operator."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        matches = (one for one, words in OPERATORS.items() if re.search(words, name, re.I))
        found[next(matches, "others")].append(us)
    return {name: (len(times), sum(times)) for name, times in found.items()}
