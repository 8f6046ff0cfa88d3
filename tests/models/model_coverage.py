"""Prints the table of docs/your_model.md: how much of tiny public models can be adapted.

make setup-models
PYTHONPATH=.:.models python -m tests.models.model_coverage
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import jax_dora
import jax_dora.linen
from dora_common.coverage import Coverage
from tests.jax_dora.linen import test_lm1b
from tests.jax_dora.tracing import sharded_models
from tests.models import gemma_models, maxtext_models, tunix_models


def tables() -> Iterator[tuple[str, Coverage]]:
    """Yields the name and the coverage of each model."""
    for name, make in tunix_models.MODELS.items():
        model = nnx.eval_shape(make)
        yield f"Tunix {name}", jax_dora.coverage(model, *tunix_models.EXAMPLE)
    for name, model in gemma_models.MODELS.items():
        yield f"gemma {name}", jax_dora.linen.coverage(model(), *gemma_models.EXAMPLE)
    for name in maxtext_models.MODELS:
        yield f"MaxText {name}", jax_dora.coverage(maxtext_models.made(name), maxtext_models.call)
    x = jax.ShapeDtypeStruct((2, 3, maxtext_models.WIDTH), jnp.float32)
    decoder = jax_dora.linen.coverage(maxtext_models.Decoder(), x)
    yield "MaxText's layers in a linen decoder", decoder
    # Miniatures of models that are in no package.
    ids = jnp.zeros((2, 5), jnp.int32)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    for name, kind in (("Qwen3", sharded_models.Tied), ("LLaDA", sharded_models.Own)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(ids, jax.P("fsdp", None))
            table = jax_dora.coverage(kind(nnx.Rngs(0)), placed)
        yield f"bonsai {name}, in miniature, FSDP+TP", table
    yield "Flax's lm1b, in miniature", jax_dora.linen.coverage(test_lm1b.Model(), ids)


def rows() -> Iterator[str]:
    """Yields a line of Markdown for each model."""
    for name, table in tables():
        adaptable = [weight for weight in table.weights if weight.status == "adaptable"]
        linear = [weight for weight in adaptable if weight.is_linear]
        sizes = {w.path: math.prod(w.shape) for w in table.weights}
        share = sum(sizes[w.path] for w in linear) / sum(sizes.values())
        others = len(adaptable) - len(linear)
        cells = (name, len(table.weights), len(linear), others, f"{share:.0%}")
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join(rows()))
