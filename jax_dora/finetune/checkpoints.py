"""Checkpoints of what training changes; the base model is in its folder.

Each is a folder of a safetensors file, facts in JSON, and the checksums of both, written by plain
file calls: on a full disk a writer of many files at once would leave tasks behind that report for
themselves.
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from dora_common.disk import add_path_to_disk_errors, fsync
from jax_dora.models.sharding import put

ARRAYS, FACTS = "arrays.safetensors", "facts.json"
SUMS = "SHA256SUMS"  # written last, in the form of `sha256sum --check`


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run, by their steps. Each appears whole or not at all."""

    folder: Path  # made with the first
    keep: int = 1  # so many of the newest stay

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints in order, sound or not."""
        names = [one.name for one in self.folder.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def unfinished(self) -> list[Path]:
        """Returns the unfinished checkpoints of writers that were killed; the next `save` removes
        them."""
        return sorted(self.folder.glob(".*.partial"))

    def damage(self, step: int) -> str | None:
        """Returns what is wrong with the files of a checkpoint, or None."""
        folder = self.folder / str(step)
        for name in (SUMS, ARRAYS, FACTS):
            if not (folder / name).is_file():
                return f"{folder / name} is missing"
        told = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
        for line, name in zip(_sums(folder).splitlines(), (ARRAYS, FACTS), strict=True):
            if line not in told:
                return f"{folder / name} is damaged: it is not what {SUMS} says"
        return None

    def facts(self, step: int) -> dict[str, Any]:
        """Returns the `facts` that `save` was given."""
        return json.loads((self.folder / str(step) / FACTS).read_text("utf-8"))

    def restore(self, step: int, like: Any) -> Any:
        """Returns the tree of arrays of a step, in the structure and with the shardings of
        `like`."""
        with safe_open(self.folder / str(step) / ARRAYS, framework="numpy") as file:
            # A step compiled for arrays that are committed to a device would be compiled again for
            # what it returns, where the frozen weights are not committed.
            leaves = [
                put(file.get_tensor(name), leaf.sharding)
                if leaf.committed
                else jnp.asarray(file.get_tensor(name))
                for name, leaf in _by_name(like).items()
            ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def save(self, step: int, arrays: Any, facts: dict[str, Any]) -> None:
        """Writes a checkpoint, and removes those that are too old, and later ones, which are
        damaged, or of steps that the run has gone back from."""
        folder, partial = self.folder / str(step), self.folder / f".{step}.partial"
        for left in self.unfinished():
            shutil.rmtree(left)
        for later in self.steps():
            if later >= step:
                self._remove(later)
        try:
            with add_path_to_disk_errors(folder):
                partial.mkdir(parents=True)
                tensors = {name: np.asarray(leaf) for name, leaf in _by_name(arrays).items()}
                save_file(tensors, partial / ARRAYS)
                (partial / FACTS).write_text(json.dumps(facts), "utf-8")
                (partial / SUMS).write_text(_sums(partial), "utf-8")
                for name in (ARRAYS, FACTS, SUMS, "."):
                    fsync(partial / name)
                partial.rename(folder)
                fsync(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def _remove(self, step: int) -> None:
        # It counts no longer, at whatever file the removal is stopped.
        partial = self.folder / f".{step}.partial"
        (self.folder / str(step)).rename(partial)
        shutil.rmtree(partial)


def _sums(folder: Path) -> str:
    lines = []
    for name in (ARRAYS, FACTS):
        with (folder / name).open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def _by_name(tree: Any) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
