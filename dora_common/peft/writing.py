"""Writes an adapter folder atomically."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dora_common.disk import add_path_to_disk_errors, fsync, locked
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, PICKLE, TENSORS, check_folder
from dora_common.replacement import exchange_folders, temporary_folder


def write(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    write_tensors: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> None:
    """Writes an adapter folder atomically.

    A reader finds the old adapter or the new one. It never finds part of an adapter, or the tensors
    of one adapter with the configuration of another. This also holds if this process is killed, or
    if several processes on a host write at once. Other files in the folder are not changed.
    Temporary folders of killed writers are removed.

    If the configuration changes, and the folder cannot be exchanged for another one (elsewhere than
    on Linux, on some network file systems, or if it is the working folder or another user's), then
    a reader may find no adapter, and a process that is killed at that moment may leave none.

    Args:
      folder: the folder, which is created if it does not exist.
      write_tensors: writes the safetensors file to the given path.
      overwrite: whether to replace an existing adapter.

    Raises:
      FileExistsError: the folder has an adapter and `overwrite` is False, or `folder` is a file.
      OSError: the files cannot be written, for example since the disk is full.
    """
    check_writable(folder, overwrite=overwrite)
    path = Path(folder).resolve()  # a link to a folder stays a link
    with add_path_to_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as new:
            write_tensors(new / TENSORS)
            (new / CONFIG).write_text(config.to_json(), encoding="utf-8")
            # safetensors creates files that only their owner can read.
            shutil.copymode(new / CONFIG, new / TENSORS)
            for name in (TENSORS, CONFIG):
                fsync(new / name)
            if not _rename(new, path):
                with locked(path):
                    check_writable(path, overwrite=overwrite)
                    _replace(new, path)
            fsync(path)
            fsync(path.parent)


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


def _replace(new: Path, path: Path) -> None:
    """Replaces the adapter in the folder `path`."""
    old = path / CONFIG
    # With the same configuration, the old tensors and the new ones are both a whole adapter.
    if old.is_file() and old.read_bytes() != (new / CONFIG).read_bytes():
        if exchange_folders(new, path):
            return
        # Until both files are replaced, the folder has no configuration, and so no adapter.
        old.unlink()
    (new / TENSORS).replace(path / TENSORS)
    (new / CONFIG).replace(path / CONFIG)
