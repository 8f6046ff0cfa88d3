"""Rules for the sources: no foreign imports, few parameters, no accidental public names."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JAX, TORCH = {"jax", "jaxlib", "flax", "optax", "jax_dora"}, {"torch", "triton", "torch_dora"}
CHECKOUT = {"parity", "benchmarks", "tools", "examples", "tests"}
FOREIGN = {"jax_dora": TORCH, "torch_dora": JAX, "dora_common": JAX | TORCH}


def imported(file: Path) -> set[str]:
    """Returns the top-level names of everything that a file imports, also inside functions."""
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


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len((*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


@pytest.mark.parametrize("package", [*FOREIGN, "parity", "benchmarks", "tools"])
def test_no_private_function_takes_more_than_eight_parameters(package):
    """Except kernels in `ops/triton` and `ops/mosaic`, which take the arguments of a launch."""
    found = {
        f"{file.relative_to(ROOT)}: {node.name}": parameters(node)
        for file in (ROOT / package).rglob("*.py")
        if file.parent.name not in ("triton", "mosaic")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
        if not node.name.endswith("__")
    }
    assert not {name: count for name, count in found.items() if count > 8}


def test_only_commands_name_flags():
    """The library is called from programs, too, which know settings and no flags."""
    commands = ROOT / "jax_dora" / "lm" / "commands"
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in (ROOT / "jax_dora").rglob("*.py")
        if not file.is_relative_to(commands)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and re.search(r"(?<!\S)--[a-z]", str(node.value))
    ]
    assert not found


@pytest.mark.parametrize("package", ["jax_dora", "torch_dora"])
def test_what_a_package_imports_for_itself_is_no_public_name(package):
    found = vars(importlib.import_module(package))
    homes = {name: inspect.getmodule(value) for name, value in found.items() if name[0] != "_"}
    foreign = [name for name, home in homes.items() if not home or package not in home.__name__]
    assert not foreign
