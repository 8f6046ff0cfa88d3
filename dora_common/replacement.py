"""Replaces files and folders whole: a process that is killed leaves the old one or the new."""

import contextlib
import ctypes
import glob
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from dora_common.disk import locked

_STALE_SECONDS = 60
# Of Linux's <fcntl.h>: paths are relative to the working folder; and exchange them.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Makes a hidden folder beside `path`, from which `path` is made by renaming. Afterwards it is
    removed if it is there still, and so are those of killed processes, as their locks tell."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}"):
        with contextlib.suppress(OSError):
            # A process creates its folder a moment before it locks the folder.
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                with locked(old, wait=False):
                    shutil.rmtree(old)
    new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    new.mkdir()
    try:
        with locked(new):
            yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def exchange_folders(new: Path, old: Path) -> bool:
    """Exchanges two folders in one step, after linking the other files of `old` in `new`, and
    returns whether it did: only Linux can, not on every file system, and not if the folder is the
    working folder or another user's, which it would cease to be."""
    try:
        theirs, mine = old.stat(), new.stat()
        is_theirs = (theirs.st_uid, theirs.st_gid) != (mine.st_uid, mine.st_gid)
        if sys.platform != "linux" or is_theirs or old.samefile(Path.cwd()):
            return False
        new.chmod(stat.S_IMODE(theirs.st_mode))
        _link_others(old, new)
        rename = ctypes.CDLL(None).renameat2
        paths = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
        if rename(*paths, _RENAME_EXCHANGE) != 0:
            return False
    except (OSError, AttributeError):  # no links, or a C library without the function
        return False
    with contextlib.suppress(OSError):
        _link_others(new, old)  # what others have created since the links were made
    return True


def replace_text(file: Path, text: str) -> None:
    """Writes a text file in UTF-8, which replaces the file that is there."""
    with replaced_file(file) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced_file(file: Path) -> Iterator[Path]:
    """Yields the path of a hidden file, which replaces `file` after it was written."""
    new = file.with_name(f".{uuid.uuid4().hex}.{file.name}")
    try:
        yield new
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _link_others(source: Path, target: Path) -> None:
    """Links every file below `source` that `target` does not have there."""
    for folder, subfolders, files in os.walk(source):
        there = target / Path(folder).relative_to(source)
        if not there.exists():
            there.mkdir()
            shutil.copymode(folder, there)
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in (*files, *links):
            if not os.path.lexists(there / name):
                os.link(Path(folder) / name, there / name, follow_symlinks=False)
