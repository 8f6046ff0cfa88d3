"""Checkpoints by orbax, of what training changes; the base model is in its folder."""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

SUMS = "SHA256SUMS"  # the last file of a checkpoint, in the form of `sha256sum --check`


class Checkpoints:
    """The checkpoints of one run, a folder each, which count once their checksums are written."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        """
        Args:
          folder: made with the first checkpoint. What killed writers left in it is removed.
          keep: so many of the newest checkpoints stay.
        """
        self.folder, self.keep = folder.absolute(), keep
        self._checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        self._remove_unfinished()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints in order, sound or not."""
        if not self.folder.is_dir():
            return []
        return sorted(int(one.name) for one in self.folder.iterdir() if one.name.isdecimal())

    def is_finished(self, step: int) -> bool:
        """Returns whether a checkpoint has been written to its end."""
        return (self.folder / str(step) / SUMS).is_file()

    def damage(self, step: int) -> str | None:
        """Returns what is wrong with the files of a checkpoint, or None."""
        folder = self.folder / str(step)
        if not self.is_finished(step):
            return f"{folder} is unfinished: it has no {SUMS}"
        lines = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
        told = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        found = {str(file.relative_to(folder)): file for file in _files(folder)}
        for name in sorted(told.keys() | found.keys()):
            if name not in found:
                return f"{folder / name} is missing"
            if told.get(name) != _digest(found[name]):
                return f"{folder / name} is damaged: it is not what {SUMS} says"
        return None

    def facts(self, step: int) -> dict[str, Any]:
        """Returns what `save` was given as `facts`."""
        args = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return self._checkpointer.restore(self.folder / str(step), args=args)["facts"]

    def restore(self, step: int, like: Any) -> Any:
        """Returns the tree of arrays of a step, in the structure and with the shardings of
        `like`."""
        named = _by_name(like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, named)
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract))
        arrays = self._checkpointer.restore(self.folder / str(step), args=args)["arrays"]
        # Orbax commits arrays to their devices. A step compiled for those would be compiled again
        # for what it returns, where the frozen weights are not committed.
        leaves = [
            arrays[name] if leaf.committed else jnp.asarray(np.asarray(arrays[name]))
            for name, leaf in named.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def save(self, step: int, arrays: Any, facts: dict[str, Any]) -> None:
        """Writes a checkpoint, and removes those that are too old.

        Args:
          arrays: a tree of arrays.
          facts: whatever JSON can say.

        Raises:
          OSError: it could not be written; those before it are as they were.
        """
        # Later ones are damaged, or of steps that this run has gone back from.
        for later in self.steps():
            if later >= step:
                self._remove(later)
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_by_name(arrays)), facts=ocp.args.JsonSave(facts)
        )
        folder = self.folder / str(step)
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # orbax logs tracebacks of what it raises
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._checkpointer.save(folder, args=args)
            _write_sums(folder)
        except Exception as error:
            self._remove(step)
            self._remove_unfinished()
            raise OSError(*_reason(error), str(folder)) from error
        finally:
            logging.disable(disabled)
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def _remove(self, step: int) -> None:
        folder = self.folder / str(step)
        # Without its checksums it counts no longer, at whatever file the removal is stopped.
        (folder / SUMS).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for one in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(one, ignore_errors=True)
        for one in self.folder.glob(f"*.{SUMS}"):
            one.unlink()


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != SUMS:
            yield file


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_sums(folder: Path) -> None:
    lines = [f"{_digest(file)}  {file.relative_to(folder)}\n" for file in _files(folder)]
    for file in _files(folder):
        _to_disk(file)
    partial = folder.parent / f"{folder.name}.{SUMS}"
    partial.write_text("".join(lines), "utf-8")
    _to_disk(partial)
    partial.replace(folder / SUMS)
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> tuple[int, str]:
    """Returns the number and the words of what went wrong with a file, from tensorstore's
    message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno, error.strerror or ""
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", text)
    if code is None:
        return errno.EIO, text
    return int(code[1]), os.strerror(int(code[1]))


def _by_name(tree: Any) -> dict[str, jax.Array]:
    """Leaf by leaf: orbax need not know Flax's and optax's classes."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
