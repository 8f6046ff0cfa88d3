"""Folders held against other processes, files written to the disk, and what a full one says."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], *, wait: bool = True) -> Iterator[None]:
    """Holds the folder against other processes and threads of this host.

    Raises:
      BlockingIOError: another holds it, and `wait` is False.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                # Some network file systems have no locks.
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named_in_disk_errors(path: Path) -> Iterator[None]:
    """Names `path` in an OSError that names no file, and makes one of safetensors' errors."""
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


def to_disk(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
