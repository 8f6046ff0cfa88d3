"""Checkpoints of a run: adapter, optimizer state and dropout streams, without the base model.

A checkpoint is a folder with a safetensors file, a JSON file with facts about the run, and the
checksums of both. They are written with plain file operations. A library that writes many files in
background tasks would report a full disk from those tasks, after `save` has returned.
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
from jax_dora.lm.models.sharding import to_devices

ARRAYS, FACTS = "arrays.safetensors", "facts.json"
SUMS = "SHA256SUMS"  # written last, in the format of `sha256sum --check`


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run, by step. A checkpoint becomes visible once it is complete.

    Attributes:
      folder: the folder of all checkpoints. The first checkpoint creates it.
      keep: how many of the latest checkpoints to keep.
    """

    folder: Path
    keep: int = 1

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints in ascending order, including damaged ones."""
        names = [path.name for path in self.folder.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def unfinished(self) -> list[Path]:
        """Returns incomplete checkpoints of killed processes. The next `save` removes them."""
        return sorted(self.folder.glob(".*.partial"))

    def damage(self, step: int) -> str | None:
        """Returns a description of the damage to a checkpoint's files, or None."""
        folder = self.folder / str(step)
        for name in (SUMS, ARRAYS, FACTS):
            if not (folder / name).is_file():
                return f"{folder / name} is missing"
        expected = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
        for line, name in zip(_sums(folder).splitlines(), (ARRAYS, FACTS), strict=True):
            if line not in expected:
                return f"{folder / name} is damaged: its checksum differs from {SUMS}"
        return None

    def facts(self, step: int) -> dict[str, Any]:
        """Returns the `facts` that were saved with a checkpoint."""
        return json.loads((self.folder / str(step) / FACTS).read_text("utf-8"))

    def restore(self, step: int, like: Any) -> Any:
        """Returns the arrays of a checkpoint, with the tree structure and shardings of `like`."""
        with safe_open(self.folder / str(step) / ARRAYS, framework="numpy") as file:
            # Restored arrays are committed to devices only if those of `like` are. Otherwise the
            # step would be compiled once for the restored arrays and again for its own results.
            leaves = [
                to_devices(file.get_tensor(name), leaf.sharding)
                if leaf.committed
                else jnp.asarray(file.get_tensor(name))
                for name, leaf in _by_name(like).items()
            ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def save(self, step: int, arrays: Any, facts: dict[str, Any]) -> None:
        """Writes a checkpoint, and removes old ones.

        Checkpoints of later steps are removed as well: they are damaged, or the run has gone back
        to an earlier step.
        """
        folder, partial = self.folder / str(step), self.folder / f".{step}.partial"
        for unfinished in self.unfinished():
            shutil.rmtree(unfinished)
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
        # Renamed first, so that an interrupted removal leaves no checkpoint that looks complete.
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
