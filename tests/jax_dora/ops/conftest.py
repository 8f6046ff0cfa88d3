"""How a test runs a Mosaic kernel: interpreted with race detection, or natively (`-m gpu`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

# A race raises.
RACES = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(params=["interpreted", pytest.param("native", marks=pytest.mark.gpu)])
def on_mosaic(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager]:
    """A context in which `implementation="mosaic"` runs."""
    if request.param == "native":
        return nullcontext
    return lambda: plgpu.force_gpu_interpret_mode(RACES)
