"""Folder locks, checks of new folders, hints for missing ones, flushing files to the disk, and disk
errors that name a path."""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], *, wait: bool = True) -> Iterator[None]:
    """Locks a folder against other processes and threads on this host, or a folder that takes its
    place while this waits. Raises BlockingIOError if it is locked, and `wait` is False."""
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, wait)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        # Some network file systems do not support locks.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextlib.contextmanager
def add_path_to_disk_errors(path: Path) -> Iterator[None]:
    """Adds `path` to every OSError that names no file, which a SafetensorError becomes too."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        number = errno.EIO if code is None else int(code[1])
        raise OSError(number, str(error), str(path)) from error
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_can_create(folder: Path, name: str) -> None:
    """Raises OSError if the folder of a setting `name` does not exist and could not be created."""
    parent = next(one for one in folder.absolute().parents if one.exists())
    if not parent.is_dir():
        raise NotADirectoryError(
            f"{name}={folder}: expected a path below a folder, but {parent} is a file"
        )
    try:
        # Permissions alone do not show a read-only file system or a server's refusal.
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except OSError as error:
        raise OSError(
            f"{name}={folder}: expected a folder where this process may write, but {parent} is not "
            f"writable ({error.strerror})"
        ) from error


def fsync(path: Path) -> None:
    """Waits until a file or folder has been written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hub_hint(folder: str | os.PathLike[str]) -> str:
    """Returns the end of an error message for a folder that does not exist, if it has the form of a
    name on the Hugging Face Hub: how to download it."""
    name = os.fspath(folder)
    owner = Path(name).parent
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or os.path.isdir(owner):
        return ""
    return (
        f"; nothing is downloaded here: if it is a name on the Hugging Face Hub, run hf download "
        f"{name} --local-dir FOLDER, and pass that folder"
    )
