"""The two clocks, device time and wall time, for both frameworks.

Device time is the sum of the times of a step's kernels, as CUPTI records them for JAX and torch. It
does not contain gaps between kernels, copies by the copy engines, or memory sets. Wall time is the
mean time of back-to-back steps on the host's clock, gaps included.
"""

import functools
import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import torch

# More than four times the L2 cache of a Hopper GPU: reading this much evicts everything from it.
FLUSH_BYTES = 256 * 2**20

Step = Callable[..., Any]
Kernels = list[tuple[str, float]]


class Spread(NamedTuple):
    """The median and spread of `samples` timings, in microseconds."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Self:
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
            len(ordered),
        )


class Effort(NamedTuple):
    """How long a measurement may take.

    Attributes:
      seconds: device or wall time of one series of steps.
      least, most: bounds on the number of steps in a series.
      blocks: number of series of back-to-back steps; each gives one mean wall time.
    """

    seconds: float = 0.04
    least: int = 8
    most: int = 60
    blocks: int = 5

    def steps(self, seconds_per_step: float) -> int:
        return max(self.least, min(self.most, int(self.seconds / max(seconds_per_step, 1e-7))))


QUICK = Effort(seconds=0.0, least=1, most=1, blocks=2)


def synchronise(*results: Any) -> None:
    """Waits for everything that either framework has launched."""
    jax.block_until_ready(results)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_time(step: Step, inputs: Sequence[tuple], effort: Effort) -> Spread:
    """Returns the wall time of a step over rotating inputs; `step` must have run before."""
    sets = itertools.cycle(inputs)
    begin = time.perf_counter()
    synchronise(step(*next(sets)))
    count = effort.steps(time.perf_counter() - begin)
    means = []
    for _ in range(effort.blocks):
        result = None
        begin = time.perf_counter()
        for _ in range(count):
            result = step(*next(sets))
        synchronise(result)
        means.append((time.perf_counter() - begin) / count * 1e6)
    return Spread.of(means)


def check_clocks(framework: str, device: Spread, wall: Spread) -> None:
    """Raises RuntimeError if kernels seem to be missing from the device time.

    A long step of XLA keeps the device busy nearly all the time. If kernels fill less than half of
    that time, CUPTI did not record them all. A torch step is not checked: launching its kernels on
    the host may really take longer than running them.
    """
    long_us = 500.0
    if framework == "jax" and wall.median > long_us and device.median < wall.median / 2:
        raise RuntimeError(
            f"kernels fill {device.median:.0f} µs of steps of {wall.median:.0f} µs: CUPTI has not "
            "recorded all of them"
        )


class DeviceClock:
    """Times kernels with CUPTI, with a cold L2 cache before every step.

    Use `device_clock()`, which returns the only instance of the process.
    """

    def __init__(self) -> None:
        from jax._src.lib import mosaic_gpu

        self._cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
        self._flushes: dict[str, tuple[Step, list[str]]] = {}

    def kernels(self, launch: Callable[[], Any]) -> Kernels:
        """Returns (name, microseconds) of every kernel that `launch` launches, in order."""
        synchronise()
        self._cupti._cupti_init()
        try:
            synchronise(launch())
        finally:
            timings = self._cupti._cupti_get_timings(False)
        return [(name, milliseconds * 1e3) for name, milliseconds in timings]

    def time(self, framework: str, step: Step, inputs: Sequence[tuple], effort: Effort) -> Spread:
        """Returns the device time of `step` over rotating inputs; `step` must have run before."""
        flush, flush_names = self._flush(framework)
        kernels = self.kernels(lambda: step(*inputs[0]))
        # Launching a kernel takes the host some microseconds, more under CUPTI.
        count = effort.steps(1e-6 * (sum(us for _, us in kernels) + 100 + 20 * len(kernels)))

        def launch() -> Any:
            result = None
            for _, operands in zip(range(count), itertools.cycle(inputs), strict=False):
                flush()
                result = step(*operands)
            return result

        timings = self.kernels(launch)
        own = slice(len(flush_names), len(flush_names) + len(kernels))
        period = own.stop
        if len(timings) != count * period:
            raise RuntimeError(
                f"{count} steps of {len(kernels)} kernels, each after {len(flush_names)} that "
                f"empty the L2, are {count * period}; CUPTI recorded {len(timings)}"
            )
        steps = [timings[start : start + period] for start in range(0, len(timings), period)]
        if all([name for name, _ in step[: own.start]] == flush_names for step in steps):
            return Spread.of([sum(us for _, us in step[own]) for step in steps])
        return Spread.of(_times_by_name(timings, [name for name, _ in kernels], count))

    def _flush(self, framework: str) -> tuple[Step, list[str]]:
        """Returns a step that empties the L2 cache, and the names of its kernels."""
        if framework not in self._flushes:
            # The buffer is read: writing it would leave dirty lines for the step to evict.
            count = FLUSH_BYTES // 4
            if framework == "jax":
                buffer = jnp.ones(count, jnp.float32)
                # Compiled ahead of time, so that clearing JAX's caches does not recompile it.
                flush = functools.partial(jax.jit(jnp.sum).lower(buffer).compile(), buffer)
            else:
                # Hardly any step launches the kernel of `prod`, so its name identifies the flush.
                flush = torch.ones(count, device="cuda").prod
            synchronise(flush())
            names = [name for name, _ in self.kernels(flush)]
            if not names:
                raise RuntimeError("CUPTI recorded no kernel; is another profiler attached to it?")
            self._flushes[framework] = flush, names
        return self._flushes[framework]


def by_name(kernels: Kernels) -> dict[str, tuple[int, float]]:
    """Returns the launches and the time of the kernels that take longest, by the parts of their
    names without numbers."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        found[re.sub(r"_\d+|<.*", "", name)[:80]].append(us)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:40]
    return {name: (len(times), sum(times)) for name, times in longest}


def _times_by_name(timings: Kernels, names: list[str], count: int) -> list[float]:
    """Returns the times of `count` steps that launch `names`, from records that are out of order.

    CUPTI keeps a buffer for every thread that launches kernels, and torch's backward pass runs in a
    thread of its own. Launches of one thread stay in order, so if a step launches a kernel n times,
    its first n records belong to the first step, and so on.

    Raises:
      RuntimeError: there are too many or too few records of a name, for example because a step
        launches the kernel that empties the L2 cache.
    """
    total = [0.0] * count
    for name in dict.fromkeys(names):
        times, per_step = [us for other, us in timings if other == name], names.count(name)
        if len(times) != count * per_step:
            raise RuntimeError(
                f"{count} steps launch {name!r} {count * per_step} times; CUPTI recorded "
                f"{len(times)}"
            )
        for step in range(count):
            total[step] += sum(times[step * per_step : (step + 1) * per_step])
    return total


@functools.cache
def device_clock() -> DeviceClock:
    return DeviceClock()


def kernel_time(framework: str, step: Step, inputs: Sequence[tuple], device: str) -> Spread:
    """Returns the device time of a step, or a quick wall time if there is no GPU."""
    if device == "cuda":
        return device_clock().time(framework, step, inputs, Effort())
    return wall_time(step, inputs, QUICK)
