"""A folder held against other processes and threads of this host."""

import contextlib
import errno
import os
from collections.abc import Iterator

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
