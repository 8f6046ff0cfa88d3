"""What happens to a run: a kill, Ctrl-C, a full disk or too little memory at any file it touches,
and files that change.

A killed process leaves its folder as it is at that moment. So a kill is a copy of the folder, made
at that moment, and an exception that nothing catches; when it has come through, the copy takes the
folder's place. Nothing has to be compiled again, as it would be in another process.
"""

import contextlib
import errno
import io
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import jax_dora_command
from jax_dora.lm.finetune import packing
from tests.jax_dora.lm.finetune.runs import last_of

WRITING = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate")


class Killed(BaseException):
    """Ends a command as `os._exit` or a signal would, with the exit status of that."""


class Watch:
    """Counts what a command does to the files of one folder, and acts at one of these moments."""

    def __init__(self, folder: Path, at: int, act: Callable[[], None], *, stays: bool) -> None:
        """
        Args:
          at: the moment, from 1.
          stays: act at every later one too.
        """
        self.folder, self.at, self.act, self.stays = str(folder), at, act, stays
        self.count = 0

    def touch(self) -> None:
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at):
            self.act()


_watches: list[Watch] = []


def _hear(event: str, args: Any) -> None:
    if not _watches:
        return
    if event == "open":
        flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        touches = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    else:
        touches = event in WRITING
    if touches and str(args[0]).startswith(_watches[0].folder):
        _watches[0].touch()


sys.addaudithook(_hear)  # of which there is no removing


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Command:
    """A command that is run in this process and under faults, and works on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left = folder.with_name(f"{folder.name}-as-it-was")

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """Returns the exit status, or minus a signal, and what was printed."""
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            mock.patch.object(sys, "argv", ["jax-dora", *last_of(arguments)]),
            mock.patch.object(os, "_exit", self._stop),
        ):
            before = signal.getsignal(signal.SIGINT)
            try:
                jax_dora_command.main()
            except SystemExit as end:
                status = end.code
            except Killed as end:
                (status,) = end.args
                shutil.rmtree(self.folder, ignore_errors=True)
                if self._left.exists():
                    self._left.rename(self.folder)
            except BaseException as error:
                raise AssertionError(f"a traceback, after:\n{printed.getvalue()}") from error
            finally:
                signal.signal(signal.SIGINT, before)
        return status, printed.getvalue()

    def kill(self) -> NoReturn:
        self._stop(-signal.SIGKILL)

    @contextlib.contextmanager
    def watched(self, at: int, act: Callable[[], None], *, stays: bool = False) -> Iterator[Watch]:
        """Lets `act` happen at the moment `at` of what is run meanwhile."""
        watch = Watch(self.folder, at, act, stays=stays)
        _watches.append(watch)
        try:
            yield watch
        finally:
            _watches.clear()

    def _stop(self, status: int) -> NoReturn:
        _watches.clear()
        if self.folder.exists():
            shutil.copytree(self.folder, self._left)
        raise Killed(status)


@contextlib.contextmanager
def limit_files(size: int) -> Iterator[None]:
    """No file may be longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def lack_memory(at: int) -> Iterator[None]:
    """There is too little for one step, from 0."""
    original = packing.batch

    def batch(rows: packing.Rows, step: int, *rest: Any) -> packing.Rows:
        if step == at:
            raise MemoryError("8 GiB asked for")
        return original(rows, step, *rest)

    with mock.patch.object(packing, "batch", batch):
        yield


def damage(file: Path, chance: random.Random) -> str:
    """Changes a file, and says how."""
    raw = bytearray(file.read_bytes())
    way = chance.choice(["flip", "cut", "remove", "zero"])
    if way == "remove":
        file.unlink()
    elif way == "cut":
        file.write_bytes(raw[: chance.randrange(len(raw) + 1)])
    elif raw:
        for _ in range(4 if way == "flip" else 1):
            place = chance.randrange(len(raw))
            raw[place] = raw[place] ^ (1 << chance.randrange(8)) if way == "flip" else 0
        file.write_bytes(raw)
    return f"{way} {file.name}"
