"""What belongs to language models uses the core as anybody would: by its public names."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import jax_dora.lm

PUBLIC = (
    *("jax_dora", "jax_dora.bank", "jax_dora.linen", "jax_dora.ops", "jax_dora.peft"),
    "jax_dora.quantisation",
)
# What cannot be done by public names yet. Nothing may be added here.
PRIVATE = {
    "jax_dora.layers.base_layer.check_has_values",
    "jax_dora.ops.dispatch.choose",
    "jax_dora.ops.dispatch.mesh",
    "jax_dora.ops.residuals",
}


def is_public(name: str) -> bool:
    """Returns whether a name is a public package, or below something in one that is no module."""
    if name.startswith("jax_dora.lm"):
        return True
    parts = name.split(".")
    for end in range(1, len(parts)):
        package, attribute = ".".join(parts[:end]), parts[end]
        if f"{package}.{attribute}" not in PUBLIC:
            value = getattr(importlib.import_module(package), attribute, None)
            is_module = value is None or isinstance(value, ModuleType)
            is_private = attribute.startswith("_") and attribute != "__version__"
            return not is_module and not is_private
    return True


def used_names(file: Path) -> set[str]:
    """Returns the names below jax_dora that a file imports, or reads from an imported package."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.fullmatch(r"jax_dora(\.\w+)*", name)}


def test_the_core_is_used_by_its_public_names():
    [folder] = jax_dora.lm.__path__
    used = {file: used_names(file) for file in Path(folder).rglob("*.py")}
    private = {(name, file.name) for file, names in used.items() for name in names}
    private = {(name, file) for name, file in private if not is_public(name)}
    new = {(name, file) for name, file in private if name not in PRIVATE}
    assert not new, "import public names, or make these public"
    unused = PRIVATE - {name for name, _ in private}
    assert not unused, "remove these from the list"


def test_the_decoder_uses_public_names_alone():
    [folder] = jax_dora.lm.__path__
    for name in ("decoder", "decoder_layer"):
        assert all(map(is_public, used_names(Path(folder) / "models" / f"{name}.py")))
