"""Rules for the sources: no foreign imports, no circles, few parameters, no accidental public
names."""

import ast
import functools
import graphlib
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
JAX, TORCH = {"jax", "jaxlib", "flax", "optax", "jax_dora"}, {"torch", "torch_dora"}
CHECKOUT = {"parity", "benchmarks", "tools", "examples", "tests"}
FOREIGN = {"jax_dora": TORCH, "torch_dora": JAX, "dora_common": JAX | TORCH}


class Facts(NamedTuple):
    """What the rules are about in a file."""

    imports: list[ast.Import | ast.ImportFrom]  # also inside functions
    of_types: set[ast.AST]  # those of them that are for types alone
    functions: list[tuple[str, int, bool]]  # name, parameters, and whether `jit` decorates it
    flags: list[int]  # the lines that name one


@functools.cache
def facts(file: Path) -> Facts:
    """Reads a file once, which takes longer than any rule."""
    found = Facts([], set(), [], [])
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import() | ast.ImportFrom():
                found.imports.append(node)
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                found.of_types.update(inner for one in node.body for inner in ast.walk(one))
            case ast.FunctionDef():
                of_jit = any("jit" in ast.unparse(one) for one in node.decorator_list)
                found.functions.append((node.name, parameters(node), of_jit))
            case ast.Constant() if re.search(r"(?<!\S)--[a-z]", str(node.value)):
                found.flags.append(node.lineno)
    return found


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len((*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def imported(file: Path) -> set[str]:
    """Returns the top-level names of everything that a file imports, also inside functions."""
    names = set()
    for node in facts(file).imports:
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


def arrows() -> dict[str, set[str]]:
    """Returns for each module of the checkout the modules that it imports, also inside functions,
    but not those of which a file imports only types."""
    files = {}
    for file in (
        file for package in (*FOREIGN, *CHECKOUT) for file in (ROOT / package).rglob("*.py")
    ):
        path = file.relative_to(ROOT).with_suffix("")
        files[".".join(path.parent.parts if path.name == "__init__" else path.parts)] = file
    found = {}
    for module, file in files.items():
        nodes = [node for node in facts(file).imports if node not in facts(file).of_types]
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & set(files) or {str(node.module)}
        found[module] = names & set(files) - {module}
    return found


def test_imports_go_in_one_direction():
    """No circle, and in `jax_dora` no arrow up: from the functions on arrays to what trains."""
    graph = arrows()
    assert {"jax_dora.ops.norm", "jax_dora.ops.mosaic.norm.one_pass_norm"} <= set(graph)
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    order = ("ops", "layers", "tracing", "adapt", "peft", "bank", "linen", "lm")
    floors = {f"jax_dora.{name}": floor for floor, name in enumerate(order)}

    def floor(module: str) -> int:
        return floors.get(".".join(module.split(".")[:2]), -1)

    up = {(a, b) for a, others in graph.items() for b in others if 0 <= floor(a) < floor(b)}
    assert not up


@pytest.mark.parametrize("package", [*FOREIGN, "parity", "benchmarks", "tools"])
def test_no_private_function_takes_more_than_eight_parameters(package):
    """Except kernels in `ops/triton`, `ops/mosaic` and those of `jit`, which take the arguments
    of a launch."""
    found = {
        f"{file.relative_to(ROOT)}: {name}": count
        for file in (ROOT / package).rglob("*.py")
        if file.parent.name not in ("triton", "mosaic")
        for name, count, of_jit in facts(file).functions
        if name.startswith("_") and not name.endswith("__") and not of_jit
    }
    assert not {name: count for name, count in found.items() if count > 8}


def test_only_commands_name_flags():
    """The library is called from programs, too, which know settings and no flags."""
    commands = ROOT / "jax_dora" / "lm" / "commands"
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in (ROOT / "jax_dora").rglob("*.py")
        if not file.is_relative_to(commands)
        for line in facts(file).flags
    ]
    assert not found


@pytest.mark.parametrize("package", ["jax_dora", "torch_dora"])
def test_what_a_package_imports_for_itself_is_no_public_name(package):
    found = vars(importlib.import_module(package))
    homes = {name: inspect.getmodule(value) for name, value in found.items() if name[0] != "_"}
    foreign = [name for name, home in homes.items() if not home or package not in home.__name__]
    assert not foreign


def test_ci_runs_every_test_that_is_left_to_it():
    """Of all folders: those of `make test`, and those marked ci."""
    assert "make test-ci" in (ROOT / ".ci" / "run").read_text().splitlines()
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    assert re.search(r"^test-ci:.*\n\t.* -m pytest .*-m '\$\(CI_MARKS\)'", makefile, re.M)
    (run,) = re.findall(r"^CI_MARKS \?= (.*)", makefile, re.M)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["addopts"]
    quick = options[options.index("-m") + 1]
    assert {*quick.split(" and ")} - {*" ".join(run.split()).split(" and ")} == {"not ci"}
