import itertools
from contextlib import nullcontext

import pytest

from benchmarks.clock import DeviceClock, Effort, Spread, check_clocks, wall_time


def test_spread_is_the_median_and_the_outer_tenths() -> None:
    spread = Spread.of([float(i) for i in range(100, -1, -1)])
    assert (spread.median, spread.p10, spread.p90, spread.samples) == (50.0, 10.0, 90.0, 101)


def test_wall_time_rotates_inputs_and_counts_its_steps() -> None:
    seen = []
    spread = wall_time(seen.append, [(0,), (1,), (2,)], Effort(0.0, least=4, most=4, blocks=3))
    assert seen == [i % 3 for i in range(1 + 3 * 4)]
    assert spread.samples == 3
    assert 0 < spread.p10 <= spread.median <= spread.p90


class RecordedKernels:
    """A fake CUPTI: records launches with the times that a test gives them."""

    def __init__(self) -> None:
        self.timings: list[tuple[str, float]] = []
        self.other_thread: list[tuple[str, float]] = []

    def launch(self, name: str, microseconds: float) -> None:
        self.timings.append((name, microseconds * 1e-3))

    def _cupti_init(self) -> None:
        self.timings, self.other_thread = [], []

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        # CUPTI has one buffer for each thread.
        return self.timings + self.other_thread


@pytest.fixture
def recorded() -> RecordedKernels:
    return RecordedKernels()


@pytest.fixture
def clock(recorded: RecordedKernels) -> DeviceClock:
    clock = object.__new__(DeviceClock)
    clock._cupti = recorded
    names = ["sum", "sum of sums"]
    clock._flushes = {"torch": (lambda: [recorded.launch(name, 50.0) for name in names], names)}
    return clock


def test_device_time_leaves_out_the_cache_flush(clock, recorded) -> None:
    calls = itertools.count()

    def step(extra: float) -> None:
        # A kernel of the step may have the name of a flush kernel.
        recorded.launch("sum", 10.0 + extra)
        recorded.launch("compose", 20.0 + next(calls) % 2)

    times = clock.time("torch", step, [(0.0,), (2.0,)], Effort(0.0, least=6, most=6))
    assert times.samples == 6
    assert 30 <= times.p10 <= times.median <= times.p90 <= 33


def test_device_time_of_kernels_that_another_thread_launches(clock, recorded) -> None:
    calls = itertools.count()

    def step() -> None:
        recorded.launch("forward", 10.0)
        recorded.other_thread.append(("backward", (20.0 + next(calls) % 2) * 1e-3))

    times = clock.time("torch", step, [()], Effort(0.0, least=5, most=5))
    assert (times.p10, times.p90) == (pytest.approx(30.0), pytest.approx(31.0))


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        (["a", "aa", "a"], "CUPTI recorded"),
        (["ab", "ab", "aab", "a"], "launch 'a' 3 times; CUPTI recorded 4"),
    ],
)
def test_device_time_refuses_steps_that_differ_in_kernels(
    clock, recorded, launches, message
) -> None:
    order = iter(launches + launches)

    def step() -> None:
        for name in next(order):
            recorded.launch(name, 1.0)

    with pytest.raises(RuntimeError, match=message):
        clock.time("torch", step, [()], Effort(0.0, least=3, most=3))


@pytest.mark.parametrize(
    ("framework", "device", "wall", "noticed"),
    [
        ("jax", 400.0, 1000.0, pytest.raises(RuntimeError, match="not recorded all")),
        ("jax", 600.0, 1000.0, nullcontext()),
        ("jax", 5.0, 60.0, nullcontext()),
        ("torch", 400.0, 1000.0, nullcontext()),
    ],
)
def test_missing_kernels_are_noticed(framework, device, wall, noticed) -> None:
    with noticed:
        check_clocks(framework, *(Spread(us, us, us, 5) for us in (device, wall)))
