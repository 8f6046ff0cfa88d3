"""Writes an adapter folder atomically."""

import contextlib
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from dora_common.disk import add_path_to_disk_errors, fsync, locked
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, PICKLE, TENSORS, check_folder

_STALE_SECONDS = 60


def write(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    write_tensors: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> None:
    """Writes an adapter folder atomically.

    A reader finds the old adapter, the new adapter, or none. It never finds part of an adapter, or
    the tensors of one adapter with the configuration of another. This also holds if this process is
    killed, or if several processes on a host write at once. Other files in the folder are not
    changed. Temporary folders of killed writers are removed.

    Args:
      folder: the folder, which is created if it does not exist.
      write_tensors: writes the safetensors file to the given path.
      overwrite: whether to replace an existing adapter.

    Raises:
      FileExistsError: the folder has an adapter and `overwrite` is False, or `folder` is a file.
      OSError: the files cannot be written, for example since the disk is full.
    """
    path = Path(folder)
    check_writable(path, overwrite=overwrite)
    with add_path_to_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        new.mkdir()
        try:
            # The lock tells other writers that this folder is not a killed writer's.
            with locked(new):
                write_tensors(new / TENSORS)
                (new / CONFIG).write_text(config.to_json(), encoding="utf-8")
                # safetensors creates files that only their owner can read.
                shutil.copymode(new / CONFIG, new / TENSORS)
                for name in (TENSORS, CONFIG):
                    fsync(new / name)
                if not _rename(new, path):
                    with locked(path):
                        check_writable(path, overwrite=overwrite)
                        # Until both files are replaced, the folder has no configuration, and so
                        # a reader does not find an adapter.
                        (path / CONFIG).unlink(missing_ok=True)
                        (new / TENSORS).replace(path / TENSORS)
                        (new / CONFIG).replace(path / CONFIG)
            fsync(path)
            fsync(path.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def check_writable(folder: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raises FileExistsError unless `write` may write into a folder, and TypeError or ValueError if
    `folder` is not a path. Call this before any work."""
    check_folder(folder)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise FileExistsError(
            f"folder is {path}, a file; expected a folder, or a path that does not exist"
        )
    there = [name for name in (CONFIG, TENSORS, PICKLE) if (path / name).exists()]
    if there and not overwrite:
        raise FileExistsError(
            f"folder {path} holds {', '.join(there)}; expected no adapter there: choose another "
            "folder, or pass overwrite=True"
        )
    if (path / PICKLE).exists():
        raise FileExistsError(
            f"folder {path} holds {PICKLE}; expected no other adapter there: choose another folder"
        )


def _rename(new: Path, path: Path) -> bool:
    """Renames `new` to `path`, and returns whether it did: not if there is a folder at `path`."""
    if path.is_dir():
        return False
    try:
        new.rename(path)
    except OSError:
        # Another writer has created the folder in the meantime.
        if path.is_dir():
            return False
        raise
    return True


def _remove_stale(path: Path) -> None:
    """Removes the temporary folders of killed writers of this folder."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}"):
        with contextlib.suppress(OSError):
            # A writer creates its temporary folder a moment before it locks the folder.
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                with locked(old, wait=False):
                    shutil.rmtree(old)
