"""Names that equal settings have in every process, for files and for entries of caches."""

import dataclasses
import functools
import glob
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config
from jax.extend import backend


def digest(*values: Any) -> str | None:
    """Returns a hash of the values and of all else that a lowered operator depends on: the
    operators' source, JAX's versions and configuration, and the device. It is None if a value is
    known only by its address, as a function is that cannot be imported by its name."""
    try:
        text = "\n".join(map(_text, (*values, backend.get_default_device().device_kind)))
        return hashlib.sha256(f"{_source()}\n{_configuration()}\n{text}".encode()).hexdigest()
    except _NoTextError:
        return None


class _NoTextError(Exception):
    """A value has no text that is the same in every process."""


def _text(value: Any) -> str:
    """Returns a text that is the same in every process."""
    if inspect.isfunction(value):
        return _path(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{type(value).__qualname__}({', '.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(map(_text, fields))})"
    text = repr(value)
    if _has_address(text):
        raise _NoTextError(text)
    return text


def _has_address(text: str) -> bool:
    return " at 0x" in text


def _path(function: Callable[..., Any]) -> str:
    """Returns where a function can be imported from."""
    name = f"{function.__module__}.{function.__qualname__}"
    found = getattr(sys.modules[function.__module__], function.__qualname__, None)
    if found is None or inspect.unwrap(found) is not function:
        raise _NoTextError(name)
    return name


def _configuration() -> str:
    """Returns JAX's settings that a traced program depends on."""
    return ", ".join(text for text in map(repr, config.trace_context()) if not _has_address(text))


@functools.cache
def _source() -> str:
    """Returns a hash of the source of the operators and kernels, and the versions of JAX
    and of Triton."""
    folder = pathlib.Path(__file__).parents[2]
    found = hashlib.sha256()
    # Not by paths, which take longer to be made relative than the files to be read.
    patterns = "jax_dora/ops/**/*.py", "dora_common/triton/*.py"
    names = (glob.glob(pattern, root_dir=folder, recursive=True) for pattern in patterns)
    for name in sorted(itertools.chain(*names)):
        content = (folder / name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    versions = [importlib.metadata.version("jaxlib")]
    if importlib.util.find_spec("triton"):
        try:
            versions.append(importlib.metadata.version("triton"))
        except importlib.metadata.PackageNotFoundError:  # such as of the package pytorch-triton
            versions.append(importlib.import_module("triton").__version__)
    return f"{jax.__version__} {' '.join(versions)} {found.hexdigest()}"
