"""What no package may import: the other framework, and what is not installed with it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JAX, TORCH = {"jax", "jaxlib", "flax", "optax", "jax_dora"}, {"torch", "triton", "torch_dora"}
CHECKOUT = {"parity", "benchmarks", "tools", "examples", "tests"}
FOREIGN = {"jax_dora": TORCH, "torch_dora": JAX, "dora_common": JAX | TORCH}


def imported(file: Path) -> set[str]:
    """Returns the top-level names of all that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("package", FOREIGN)
def test_nothing_foreign_is_imported(package):
    found = {file: imported(file) for file in (ROOT / package).rglob("*.py")}
    assert found
    foreign = {str(file): names & (FOREIGN[package] | CHECKOUT) for file, names in found.items()}
    assert not {file: names for file, names in foreign.items() if names}
