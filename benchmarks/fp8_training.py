"""Level `fp8_training`: adapters trained over a base in FP8, compared with bf16.

The text and the arithmetic are those of level `quality`, and so is the decoder, with half its
width. DoRA is trained with each `format` of the base, of activations and of gradients, from
several seeds, which change the adapter's first values and the order of the text. Nothing is timed.

One line is one run: the loss of held-out text at the end (`held_out`), and the mean and the largest
difference between the losses of a step and those of bf16 with the same seed (`mean_apart`,
`worst_apart`; of means over `WINDOW` steps).

The last lines of a decoder compare the gradients of lora_a, lora_b and magnitude of the adapter
that the first run ends with: the least and the mean cosine with those in bf16 over the arrays of a
layer, for each layer from the first on (`least`, `mean`).
"""

import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import quality
from benchmarks.quality import BASE, FP8, Format
from benchmarks.results import Row
from jax_dora.lm.models import load_model
from parity.sides.jax import training
from parity.training.settings import Settings as Decoder
from parity.training.text import starts

WINDOW = 20
FORMATS = (
    None,
    Format("FP8 forward", FP8, 0, "row"),
    Format("FP8 forward, gradients in e4m3", FP8, 0, "row", FP8),
    Format("FP8 forward, gradients in e5m2", FP8, 0, "row", "float8_e5m2"),
    Format("nf4", "nf4", 64),
)


class Settings(NamedTuple):
    """The settings of the level.

    Attributes:
      depths: the numbers of layers, each with its number of seeds.
    """

    decoder: Decoder = dataclasses.replace(
        quality.Settings().decoder, hidden=64, intermediate=128, kv_heads=2, head_dim=16
    )
    depths: tuple[tuple[int, int], ...] = ((3, 3),)
    steps: int = 2000
    formats: tuple[Format | None, ...] = FORMATS


TINY = Settings(quality.TINY.decoder, ((2, 2),), steps=4, formats=(None, *FORMATS[2:4]))


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row for each run, and for the gradients of each format and depth."""
    for layers, seeds in settings.depths:
        sizes = dataclasses.replace(settings.decoder, layers=layers)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "base"
            training.make_base(sizes, folder)
            load = functools.partial(
                load_model, folder, dtype=jnp.float32, attention="xla", remat=False
            )
            yield from _runs(load, sizes, seeds, settings)


def _runs(load: Any, sizes: Decoder, seeds: int, settings: Settings) -> Iterator[Row]:
    bases, models, adapter = {}, {}, None
    for form in settings.formats:
        base = bases[BASE if form is None else form.name] = load()
        if form is not None:
            quality.quantise(base, form)
    for seed in range(seeds):
        exact = None
        for name, base in bases.items():
            models[name], losses, row = quality.trained(base, sizes, settings.steps, seed)
            count = max(1, len(losses) // WINDOW)
            means = np.asarray([part.mean() for part in np.array_split(losses, count)])
            exact = means if exact is None else exact
            apart = np.abs(means - exact)
            row |= {"mean_apart": float(apart.mean()), "worst_apart": float(apart.max())}
            facts: Row = {"layers": sizes.layers, "format": name, "seed": seed}
            yield facts | {"steps": settings.steps} | row
            adapter = adapter or nnx.state(models[name], nnx.LoRAParam)
    tokens = starts(quality.prose()[0], (sizes.rows,), sizes.length, 99)
    wanted = None
    for name, model in models.items():
        nnx.update(model, adapter)
        found = _gradients(model, tokens, sizes.length)
        wanted = wanted or found
        if found is not wanted:
            by_depth = np.asarray([_cosines(found[path], wanted[path]) for path in wanted])
            facts = {"layers": sizes.layers, "format": name, "compared": "gradients"}
            least, mean = by_depth.min(0).tolist(), by_depth.mean(0).tolist()
            yield facts | {"least": least, "mean": mean}


def _gradients(model: Any, where: Any, length: int) -> dict[Any, np.ndarray]:
    """Returns the gradient of every adapter array, stacked by layer."""
    graphdef, adapter, frozen = nnx.split(model, nnx.LoRAParam, ...)
    tokens = training.rows_at(jnp.asarray(quality.prose()[0]), jnp.asarray(where), length)

    @jax.jit
    def gradient(adapter: Any, frozen: Any) -> Any:
        return jax.grad(
            lambda adapter: training.mean_loss(nnx.merge(graphdef, adapter, frozen), tokens)
        )(adapter)

    flat = nnx.to_flat_state(gradient(adapter, frozen))
    return {path: np.asarray(one.get_value(), np.float64) for path, one in flat}


def _cosines(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the cosine of each layer's gradient with the wanted one."""
    found, wanted = (one.reshape(len(one), -1) for one in (found, wanted))
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return (found * wanted).sum(1) / lengths
