"""Loading an adapter takes hardly more host memory than the adapter itself."""

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jax_dora.peft import AdapterConfig, load_adapter

IN, OUT, RANK = 65536, 8, 32
LAYERS = 32
TIMES = 1.2


class Model(nnx.Module):
    """Its layers stand in a list, or stacked along the leading axis of one array."""

    def __init__(self, layers: int, *, stacked: bool) -> None:
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(IN, OUT, kernel_init=nnx.initializers.ones, rngs=rngs)

        if stacked:
            self.layers: Any = nnx.split_rngs(splits=layers)(nnx.vmap(make))(nnx.Rngs(0))
        else:
            self.layers = nnx.List([make(nnx.Rngs(0)) for _ in range(layers)])


def write(folder: Path, layers: int) -> int:
    shapes = {
        "lora_A.weight": (RANK, IN),
        "lora_B.weight": (OUT, RANK),
        "lora_magnitude_vector": (OUT,),
    }
    tensors = {
        f"base_model.model.layers.{layer}.{name}": np.ones(shape, np.float32)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    config = AdapterConfig(r=RANK, lora_alpha=1, use_dora=True, target_modules=r"layers\.\d+")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config.to_json())
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(array.nbytes for array in tensors.values())


def most_memory() -> int:
    """Bytes resident at the worst moment of this process so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts what the parent had before the child began in ru_maxrss.
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def measure(small: Path, folder: Path, stacked: bool, results: Any) -> None:
    # What JAX compiles is not the adapter's.
    load_adapter(Model(1, stacked=stacked), small)
    model = Model(LAYERS, stacked=stacked)
    before = most_memory()
    loaded = load_adapter(model, folder)
    jax.block_until_ready(nnx.state(loaded))
    results.put(most_memory() - before)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_the_peak_is_near_the_adapter(stacked: bool, tmp_path: Path) -> None:
    write(tmp_path / "small", 1)
    size = write(tmp_path / "folder", LAYERS)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()

    process = context.Process(
        target=measure, args=(tmp_path / "small", tmp_path / "folder", stacked, results)
    )
    process.start()
    peak = results.get(timeout=120)
    process.join()

    assert 0.8 * size < peak < TIMES * size
