"""The two clocks, the same for both frameworks.

Device time is the sum of the kernels' own times, as CUPTI records them for everything that this
process launches, JAX's and torch's kernels alike; gaps between kernels, copies by the copy engines
and memory sets are not in it. Wall time is that of back-to-back steps, gaps included.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

# More than four times the L2 of a Hopper: a pass over it leaves nothing of what was there before.
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
    def of(cls, times: Sequence[float]) -> Spread:
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.1 * last)],
            ordered[round(0.9 * last)],
            len(ordered),
        )


class Effort(NamedTuple):
    """The time and number of steps that a measurement may take.

    Attributes:
      seconds: of device or wall time that one series of steps may take.
      least, most: bounds on the number of steps in it.
      blocks: series of back-to-back steps whose mean wall times are compared.
    """

    seconds: float = 0.04
    least: int = 8
    most: int = 60
    blocks: int = 5

    def steps(self, seconds_per_step: float) -> int:
        return max(self.least, min(self.most, int(self.seconds / max(seconds_per_step, 1e-7))))


QUICK = Effort(seconds=0.0, least=1, most=1, blocks=2)


def synchronise(*results: Any) -> None:
    """Waits until everything that either framework has launched is done."""
    jax.block_until_ready(results)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_time(step: Step, inputs: Sequence[tuple], effort: Effort) -> Spread:
    """Returns the wall time of one of many steps over rotating inputs; `step` has run before."""
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
    """Raises RuntimeError where kernels seem to be missing from the device time.

    A long step of XLA's keeps the device busy nearly all the time; where kernels fill less than
    half of it, CUPTI did not see them all. Torch's host may really be the slower one.
    """
    long_us = 500.0
    if framework == "jax" and wall.median > long_us and device.median < wall.median / 2:
        raise RuntimeError(
            f"kernels fill {device.median:.0f} µs of steps of {wall.median:.0f} µs: CUPTI has not "
            "recorded all of them"
        )


class DeviceClock:
    """Kernel times through CUPTI, with a cold L2 before every step; `device_clock` has the one."""

    def __init__(self) -> None:
        from jax._src.lib import mosaic_gpu

        self._cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
        self._flushes: dict[str, tuple[Step, list[str]]] = {}

    def kernels(self, launch: Callable[[], Any]) -> Kernels:
        """Returns (name, microseconds) of every kernel that `launch` starts, in order."""
        synchronise()
        self._cupti._cupti_init()
        try:
            synchronise(launch())
        finally:
            timings = self._cupti._cupti_get_timings(False)
        return [(name, milliseconds * 1e3) for name, milliseconds in timings]

    def time(self, framework: str, step: Step, inputs: Sequence[tuple], effort: Effort) -> Spread:
        """Returns the device time of `step` over rotating inputs; `step` has run before."""
        flush, expected = self._flush(framework)
        one = self.kernels(lambda: step(*inputs[0]))
        # Launching takes the host some microseconds a kernel, more under CUPTI.
        count = effort.steps(1e-6 * (sum(us for _, us in one) + 100 + 20 * len(one)))

        def launch() -> Any:
            result = None
            for _, operands in zip(range(count), itertools.cycle(inputs), strict=False):
                flush()
                result = step(*operands)
            return result

        timings = self.kernels(launch)
        period = len(expected) + len(one)
        if len(timings) != count * period:
            raise RuntimeError(
                f"{count} steps of {len(one)} kernels, each after {len(expected)} that empty the "
                f"L2, are {count * period}; CUPTI recorded {len(timings)}"
            )
        steps = [timings[start : start + period] for start in range(0, len(timings), period)]
        if all([name for name, _ in step[: len(expected)]] == expected for step in steps):
            return Spread.of([sum(us for _, us in step[len(expected) :]) for step in steps])
        return Spread.of(_by_name(timings, [name for name, _ in one], count))

    def _flush(self, framework: str) -> tuple[Step, list[str]]:
        """Returns a step that empties the L2, and the names of its kernels."""
        if framework not in self._flushes:
            # Read, not written: writing would leave dirty lines for the step to evict.
            count = FLUSH_BYTES // 4
            if framework == "jax":
                buffer = jnp.ones(count, jnp.float32)
                # Compiled ahead: nothing that clears JAX's caches makes it compile again.
                flush = functools.partial(jax.jit(jnp.sum).lower(buffer).compile(), buffer)
            else:
                # A product: hardly anything else launches that kernel, so its name tells it apart.
                flush = torch.ones(count, device="cuda").prod
            synchronise(flush())
            names = [name for name, _ in self.kernels(flush)]
            if not names:
                raise RuntimeError("CUPTI recorded no kernel; is another profiler attached to it?")
            self._flushes[framework] = flush, names
        return self._flushes[framework]


def _by_name(timings: Kernels, names: list[str], count: int) -> list[float]:
    """Returns the times of `count` steps that launch `names`, from records in another order.

    CUPTI keeps a buffer for every thread that launches, and torch's backward pass has a thread of
    its own. What one thread launches stays in order, so the n-th of a name belongs to the step that
    its place among its namesakes says. A step that launches what empties the L2 has too many.
    """
    total = [0.0] * count
    for name in dict.fromkeys(names):
        found, each = [us for other, us in timings if other == name], names.count(name)
        if len(found) != count * each:
            raise RuntimeError(
                f"{count} steps launch {name!r} {count * each} times; CUPTI recorded {len(found)}"
            )
        for step in range(count):
            total[step] += sum(found[step * each : (step + 1) * each])
    return total


@functools.cache
def device_clock() -> DeviceClock:
    return DeviceClock()


def kernel_time(framework: str, step: Step, inputs: Sequence[tuple], device: str) -> Spread:
    """Returns the device time of a step, or, where there is no GPU, a wall time to try the code."""
    if device == "cuda":
        return device_clock().time(framework, step, inputs, Effort())
    return wall_time(step, inputs, QUICK)
