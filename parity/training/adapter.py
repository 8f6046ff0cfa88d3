"""The initial adapter of a training run as NumPy arrays, drawn without either framework."""

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from parity.model.sizes import ADAPTER, PROJECTIONS
from parity.training.settings import Settings

# Projection → name → lora_a f32[layers, rank, in], lora_b f32[layers, out, rank], magnitude
# f32[layers, out].
Adapter = dict[str, dict[str, np.ndarray]]


def initial(settings: Settings, base: Path, seed: int) -> Adapter:
    """Draws the initial adapter: lora_a uniform in ±1/sqrt(in), as in PEFT; the magnitude is ‖W +
    sBA‖ in fp64, rounded once.

    Args:
      base: the folder of the base model.
    """
    rng = np.random.default_rng((23, seed))
    weights = load_file(base / "model.safetensors")  # torch tensors: NumPy has no bf16
    adapter: Adapter = {}
    for projection, (n_out, n_in) in settings.shapes().items():
        a_shape = (settings.layers, settings.rank, n_in)
        b_shape = (settings.layers, n_out, settings.rank)
        a = rng.uniform(-(n_in**-0.5), n_in**-0.5, a_shape).astype(np.float32)
        b = (settings.lora_b_deviation * rng.normal(size=b_shape)).astype(np.float32)
        names = [f"model.layers.{layer}.{projection}.weight" for layer in range(settings.layers)]
        stored = np.stack([weights[name].double().numpy() for name in names])
        product = settings.scale * (b.astype(np.float64) @ a.astype(np.float64))
        magnitude = np.linalg.norm(stored + product, axis=2)
        adapter[projection] = {"lora_a": a, "lora_b": b, "magnitude": magnitude.astype(np.float32)}
    return adapter


def one_ulp_off(adapter: Adapter, seed: int) -> Adapter:
    """Returns `adapter` with every element of lora_a moved to a neighbouring fp32 number, up or
    down at random."""
    rng = np.random.default_rng((29, seed))

    def move(array: np.ndarray) -> np.ndarray:
        towards = np.where(rng.random(array.shape) < 0.5, np.inf, -np.inf).astype(array.dtype)
        return np.nextafter(array, towards)

    return {path: kinds | {"lora_a": move(kinds["lora_a"])} for path, kinds in adapter.items()}


def flatten(adapter: Adapter) -> np.ndarray:
    """Returns all numbers of an adapter in a fixed order: f32[…]."""
    return np.concatenate([adapter[p][name].ravel() for p in PROJECTIONS for name in ADAPTER])
