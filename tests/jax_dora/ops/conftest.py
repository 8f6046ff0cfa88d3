"""Fixtures that run kernels interpreted, Mosaic's with race detection, and natively (`-m gpu`)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection.strip_tiling import Config

BOTH_WAYS = ["interpreted", pytest.param("native", marks=pytest.mark.gpu)]
# A race condition raises an error.
RACES = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(params=BOTH_WAYS)
def on_mosaic(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager]:
    """Returns a context in which `implementation="mosaic"` runs."""
    if request.param == "native":
        return nullcontext
    return lambda: plgpu.force_gpu_interpret_mode(RACES)


@pytest.fixture(params=BOTH_WAYS)
def on_triton() -> None:
    """Runs a test in Triton's interpreter and, under `-m gpu`, natively."""


@pytest.fixture(params=BOTH_WAYS)
def on_hopper() -> None:
    """As `on_triton`, for kernels that only a Hopper runs."""


@pytest.fixture(params=BOTH_WAYS[1:])
def hopper() -> None:
    """Runs a test natively, on a Hopper."""


@pytest.fixture(
    params=[
        Config(tile_cols=64, stages=2, slots=2, splits=1),
        Config(stages=3, slots=1, splits=3),
        Config(stages=2, slots=1, consumers=3, splits=2),
        Config(tile_cols=64, stages=3, slots=2, consumers=3),
    ]
)
def low_rank_config(request: pytest.FixtureRequest) -> Config:
    """Returns each of several different configs of `strip_tiling`."""
    return request.param


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[tuple[int, ...]]]:
    """Returns a function that returns a list, to which a kernel from then on appends the shape of
    its first operand whenever its `launch` is traced, interpreted or natively."""

    def watch(kernel: ModuleType) -> list[tuple[int, ...]]:
        launch, shapes = kernel.launch, []

        @launcher(*launch.static)
        @functools.wraps(launch.__wrapped__)
        def run(*operands: Any, **settings: Any) -> Any:
            shapes.append(operands[0].shape)
            return launch(*operands, **settings)

        monkeypatch.setattr(kernel, "launch", run)
        return shapes

    return watch
