"""An adapter's folder, written whole or not at all."""

import contextlib
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from dora_common.disk import locked, named_in_disk_errors, to_disk
from dora_common.peft.config import AdapterConfig
from dora_common.peft.folder import CONFIG, PICKLE, TENSORS

_STALE_SECONDS = 60


def write(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    write_tensors: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> None:
    """Writes an adapter folder. Whoever reads it meanwhile, or after this was killed, finds the old
    adapter, the new one, or none: never a part of one, nor the tensors of one with the
    configuration of another, also where several processes of a host write at once. Other files in
    the folder are left alone; what killed writers left beside it is removed.

    Args:
      folder: made if it is not there.
      write_tensors: writes the safetensors file at the path it is given.
      overwrite: replace an adapter that is there.

    Raises:
      FileExistsError: there is an adapter, and `overwrite` is False; or a file has that name.
      OSError: the files cannot be written, for example since the disk is full.
    """
    path = Path(folder)
    check_free(path, overwrite=overwrite)
    with named_in_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        new.mkdir()
        try:
            # Held while this writes, so that no other writer takes it for a killed one's.
            with locked(new):
                write_tensors(new / TENSORS)
                (new / CONFIG).write_text(config.to_json(), encoding="utf-8")
                # safetensors makes files that their owner alone can read; an adapter need not be.
                shutil.copymode(new / CONFIG, new / TENSORS)
                for name in (TENSORS, CONFIG):
                    to_disk(new / name)
                if not _renamed(new, path):
                    with locked(path):
                        check_free(path, overwrite=overwrite)
                        # Without its configuration a folder is no adapter, until both are in.
                        (path / CONFIG).unlink(missing_ok=True)
                        (new / TENSORS).replace(path / TENSORS)
                        (new / CONFIG).replace(path / CONFIG)
            to_disk(path)
            to_disk(path.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def check_free(folder: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Checks, before any work, that `write` may write into a folder."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"folder is {path}, a file; expected a folder, or none")
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


def _renamed(new: Path, path: Path) -> bool:
    if path.is_dir():
        return False
    try:
        new.rename(path)
    except OSError:
        # Another writer made the folder first.
        if path.is_dir():
            return False
        raise
    return True


def _remove_stale(path: Path) -> None:
    """Removes what writers of this folder left that were killed."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}"):
        with contextlib.suppress(OSError):
            # A writer makes its folder a moment before it locks it.
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                with locked(old, wait=False):
                    shutil.rmtree(old)
