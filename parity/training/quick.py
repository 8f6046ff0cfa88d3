"""A short fp32 run in both frameworks, in this process: it takes seconds on a CPU."""

import atexit
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from parity.sides import SIDES, Backend
from parity.sides.jax.training import make_base
from parity.training import adapter as adapters
from parity.training.difference import Difference, Run, compare
from parity.training.settings import Settings

# A nonzero initial lora_b and a high learning rate make the norm and the magnitude matter at once.
_RUN = {"steps": 16, "warmup": 2, "length": 48, "rows": 6, "eval_rows": 32}
SETTINGS = Settings.tiny(dtype="float32", learning_rate=2e-3, lora_b_deviation=0.02, **_RUN)
SEED = 1


def train(backend: Backend) -> Run:
    """Trains on one side without kernels; other levels check the kernels."""
    side = SIDES[backend]
    start = adapters.initial(SETTINGS, base(), SEED)
    with jax.default_matmul_precision("highest"):
        return side.training.train(SETTINGS, base(), start, SEED, side.plain)


def difference(runs: Mapping[Backend, Run]) -> Difference:
    """Returns the difference between both sides' runs."""
    return compare(runs["jax"], runs["torch"], adapters.initial(SETTINGS, base(), SEED))


@functools.cache
def base() -> Path:
    """Returns the folder of the tiny base model, created once per process. It has no adapter, so no
    fault affects it."""
    temporary = tempfile.TemporaryDirectory(prefix="parity-training-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name) / "base"
    make_base(SETTINGS, folder)
    return folder
