"""Prints the table of docs/your_model.md: what of Tunix's models, tiny, is adapted.

usage: python tools/model_coverage.py    (in the environment of `make test-models`)
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax_dora
from tests.models.tunix_models import EXAMPLE, MODELS


def rows() -> Iterator[str]:
    """Yields a line of Markdown for each model."""
    for name, make in MODELS.items():
        table = jax_dora.coverage(make(), *EXAMPLE)
        linear = [one for one in table.weights if one.is_linear and one.status == "adaptable"]
        others = [one for one in table.weights if not one.is_linear and one.status == "adaptable"]
        share = sum(one.elements for one in linear) / sum(one.elements for one in table.weights)
        cells = (f"Tunix {name}", len(table.weights), len(linear), len(others), f"{share:.0%}")
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join(rows()))
