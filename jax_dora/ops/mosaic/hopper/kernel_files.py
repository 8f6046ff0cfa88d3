"""Lowered kernels on disk, for other processes.

They are files of "jax_dora_kernels" in JAX's compilation cache, if the user has one:
`JAX_COMPILATION_CACHE_DIR`, or `jax.config.jax_compilation_cache_dir`. Only a local folder holds
them. A file is named by a hash of all that a lowered kernel depends on (`digest`). It holds a hash
of what follows, the types of the results as a line of Python, and a StableHLO module.
"""

import ast
import contextlib
import hashlib
import pathlib
import uuid
import warnings
from typing import Any, NamedTuple

import jax

_HASH_SIZE = hashlib.sha256().digest_size


class Stored(NamedTuple):
    """A lowered kernel.

    Attributes:
      out_info: the types of its results, a tree of tuples, lists and None.
      code: its StableHLO module.
    """

    out_info: Any
    code: bytes


def path(name: str | None) -> pathlib.Path | None:
    """Returns the file of the kernel with this hash, or None if kernels are not stored."""
    folder = jax.config.jax_compilation_cache_dir
    if not (name and folder and jax.config.jax_enable_compilation_cache) or "://" in folder:
        return None
    return pathlib.Path(folder, "jax_dora_kernels", name)


def read(file: pathlib.Path) -> Stored | None:
    """Returns the kernel in a file, or None without one. Warns if the file is damaged."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{file} cannot be read ({error}); the kernel is lowered anew", stacklevel=1)
        return None
    hashed, content = content[:_HASH_SIZE], content[_HASH_SIZE:]
    if hashlib.sha256(content).digest() != hashed:
        warnings.warn(
            f"{file} is damaged; the kernel is lowered anew and replaces it", stacklevel=1
        )
        return None
    results, _, code = content.partition(b"\n")
    return Stored(jax.tree.map(_type, ast.literal_eval(results.decode())), code)


def write(file: pathlib.Path, kernel: Stored) -> None:
    """Stores a kernel, at once as a whole. Warns if that fails, as on a full disk."""
    results = jax.tree.map(_type_text, kernel.out_info)
    content = f"{results!r}\n".encode() + kernel.code
    new = file.with_name(uuid.uuid4().hex)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(hashlib.sha256(content).digest() + content)
        new.replace(file)
    except OSError as error:
        warnings.warn(f"{file.parent} cannot store a kernel: {error}", stacklevel=1)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _type_text(one: Any) -> str:
    return f"{one.dtype}:{','.join(map(str, one.shape))}"


def _type(text: str) -> jax.ShapeDtypeStruct:
    dtype, _, sizes = text.partition(":")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), dtype)
