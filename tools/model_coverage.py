"""Prints the table of docs/your_model.md: what of public models, tiny, is adapted.

usage: python tools/model_coverage.py    (in the environment of `make test-models`)
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

import jax_dora
import jax_dora.linen
from jax_dora.adapt import Coverage
from tests.models import gemma_models, maxtext_models, tunix_models


def tables() -> Iterator[tuple[str, Coverage]]:
    """Yields the name and the coverage of each model."""
    for name, make in tunix_models.MODELS.items():
        yield f"Tunix {name}", jax_dora.coverage(make(), *tunix_models.EXAMPLE)
    for name, model in gemma_models.MODELS.items():
        yield f"gemma {name}", jax_dora.linen.coverage(model(), *gemma_models.EXAMPLE)
    for name in maxtext_models.MODELS:
        yield f"MaxText {name}", jax_dora.coverage(maxtext_models.made(name), maxtext_models.call)
    x = jax.ShapeDtypeStruct((2, 3, maxtext_models.WIDTH), jnp.float32)
    decoder = jax_dora.linen.coverage(maxtext_models.Decoder(), x)
    yield "MaxText's layers in a linen decoder", decoder


def rows() -> Iterator[str]:
    """Yields a line of Markdown for each model."""
    for name, table in tables():
        linear = [one for one in table.weights if one.is_linear and one.status == "adaptable"]
        others = [one for one in table.weights if not one.is_linear and one.status == "adaptable"]
        share = sum(one.elements for one in linear) / sum(one.elements for one in table.weights)
        cells = (name, len(table.weights), len(linear), len(others), f"{share:.0%}")
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join(rows()))
