"""Watches a folder of adapters while a server runs, and keeps a store of the adapters in it."""

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dora_common.peft.folder import CONFIG, PICKLE, TENSORS, find_adapter_folder
from jax_dora.bank import AdapterStore, HostAdapter, StoredAdapter
from jax_dora.lm.models.tokenizer import TextSettings
from jax_dora.lm.serve.metrics import Metrics

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Signature = tuple[tuple[str, int, int, int], ...]  # name, mtime, size and inode of each file


class UnreadableError(Exception):
    """Raised if an adapter has to be read again and its folder does not hold it any more."""


class Adapters:
    """The adapters in the subfolders of one folder. An adapter has the name of its subfolder.

    A damaged adapter is reported and not served, without an effect on others. If it was valid
    before, then its previous version is served until its folder is valid again or deleted. Tensors
    without adapter_config.json count as damaged. Only files below the folder are read: an adapter
    with a symbolic link to elsewhere counts as damaged, too.

    The store may drop adapters from host memory, which are read again when they are needed.
    """

    def __init__(
        self,
        folder: Path | None,
        store: AdapterStore | None,
        read: Callable[[Path], HostAdapter] | None,
        *,
        read_texts: Callable[[Path], TextSettings] | None = None,
        base_name: str,
        metrics: Metrics,
        tell: Callable[[str], None],
        file_bytes: int | None = None,
    ) -> None:
        """
        Args:
          folder: the folder; None for no adapters.
          store: the store of the adapters, by name; None if `folder` is None.
          read: reads a PEFT folder for the bank, or raises an error if it is damaged; None if
            `folder` is None.
          read_texts: reads how the adapter in a PEFT folder reads and writes text; None if all do
            as the base model.
          base_name: the base model's name, which no adapter may have.
          metrics: the metrics to update.
          tell: a function that is called with a line of text for every change.
          file_bytes: the maximum size of a file of tensors, or None for no limit.
        """
        self._folder: Any = folder  # None only if there are no adapters
        self._store: Any = store
        self._read: Any = read
        self._read_texts = read_texts
        self._base_name = base_name
        self._metrics, self._tell = metrics, tell
        self._file_bytes = file_bytes
        self._damaged: dict[str, str] = {}
        self._read_signatures: dict[str, Signature] = {}  # when last read, successfully or not
        self._last_signatures: dict[str, Signature] = {}  # in the last scan
        self._scan_lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return self._store is not None and name in self._store

    def get(self, name: str) -> StoredAdapter | None:
        """Returns the adapter of a name, or None if there is none that can be served.

        Its `extra` is how it reads and writes text; None for the base model's way. Requests that
        refer to it keep using this version if its folder changes.

        Raises:
          UnreadableError: it was dropped from host memory, and its folder has changed and has not
            been read anew yet, or is damaged.
        """
        if name in self:
            with contextlib.suppress(KeyError):  # it was removed meanwhile
                return self._store.get(name)
        return None

    def names(self) -> list[str]:
        """Returns the sorted names of the adapters that can be served."""
        return [] if self._store is None else list(self._store.names)

    def damaged(self) -> dict[str, str]:
        """Returns the reason why each damaged folder cannot be served, by name.

        The reasons are for clients: they name files relative to the adapter's folder.
        """
        return dict(self._damaged)

    def scan(self, *, settle: bool = True) -> None:
        """Looks for new, changed and deleted adapters.

        An adapter is deleted if two scans in a row have not found it.

        Args:
          settle: whether to read a new or changed folder only after two scans have found it in the
            same state, so that an adapter that is just being written does not count as damaged.
            A folder without adapter_config.json always has to be found twice.
        """
        if self._folder is None:
            return
        with self._scan_lock:
            try:
                folders = self._signatures()
            except OSError as error:
                self._tell(
                    f"{self._folder} cannot be read; its known adapters stay in use: {error}"
                )
                return
            found = {name: one for name, one in folders.items() if one is not None}
            others = sorted(folders.keys() - found.keys())[:10]
            if others and not settle:
                names = ", ".join(others)
                self._tell(f"{self._folder} has folders without an adapter, not served: {names}")
            last = self._last_signatures
            for name in sorted(self._read_signatures.keys() - found.keys() - last.keys()):
                self._forget(name)
            for name, signature in sorted(found.items()):
                if signature == self._read_signatures.get(name):
                    continue
                reads_at_once = not settle and any(file == CONFIG for file, *_ in signature)
                if reads_at_once or signature == last.get(name):
                    self._load(name, signature)
            self._last_signatures = found
            self._metrics.adapters.set(len(self._store))
            self._metrics.damaged.set(len(self._damaged))

    def _signatures(self) -> dict[str, Signature | None]:
        """Returns the signature of each folder by name; None for a folder without an adapter."""
        folders = [one for one in self._folder.iterdir() if one.is_dir()]
        return {one.name: _signature(one) for one in folders if not one.name.startswith(".")}

    def _load(self, name: str, signature: Signature) -> None:
        try:
            read = self._read_state(name, signature)
        except Exception as error:  # must not affect other adapters
            if _signature(self._folder / name) != signature:
                return  # the folder changed meanwhile: a later scan reads it again
            reason = str(error) or type(error).__name__
            self._damaged[name] = _one_line(_without_paths(reason, self._folder / name))
            outcome = "is not replaced" if name in self._store else "is not served"
            self._tell(f"adapter {name!r} {outcome}: {_one_line(reason)}")
        else:
            if read is None:
                return  # the folder changed meanwhile: a later scan reads it again
            outcome = "is replaced" if name in self._store else "is served"
            adapter, texts = read
            again = functools.partial(self._read_again, name, signature)
            self._store.add(name, adapter, extra=texts, read_again=again)
            self._damaged.pop(name, None)
            own = texts.own if texts is not None else ""
            self._tell(f"adapter {name!r} {outcome}" + (f", with its own {own}" if own else ""))
        self._read_signatures[name] = signature

    def _forget(self, name: str) -> None:
        del self._read_signatures[name]
        if name in self._store:
            self._store.remove(name)
        self._damaged.pop(name, None)
        self._tell(f"adapter {name!r} is gone")

    def _read_again(self, name: str, signature: Signature) -> tuple[HostAdapter, Any]:
        """Reads an adapter that was dropped from host memory; raises UnreadableError."""
        self._metrics.reads.inc()
        try:
            read = self._read_state(name, signature)
        except Exception as error:  # must not affect other adapters
            self._tell(f"adapter {name!r} cannot be read again: {_one_line(str(error))}")
            read = None
        if read is None:
            raise UnreadableError(
                f"The model {name!r} has to be read again, and its folder has changed or is "
                "damaged; try again later"
            )
        return read

    def _read_state(
        self, name: str, signature: Signature
    ) -> tuple[HostAdapter, TextSettings | None] | None:
        """Returns an adapter and how it reads and writes text; None if its folder is not in the
        state of the signature."""
        folder = self._checked(name)
        adapter = self._read(folder)
        texts = None if self._read_texts is None else self._read_texts(folder)
        if _signature(self._folder / name) != signature:
            return None
        return adapter, texts

    def _checked(self, name: str) -> Path:
        """Returns the PEFT folder of a name, after checks of the name and of symbolic links."""
        if not NAME.fullmatch(name) or name == self._base_name:
            raise ValueError(
                f"its name is {name[:130]!r}; expected at most 128 letters, digits, '.', '_' and "
                "'-', beginning with a letter or digit, and not the base model's name "
                f"{self._base_name!r}"
            )
        folder, inside = self._folder / name, self._folder.resolve()
        for one in (folder, *folder.rglob("*")):
            if not one.resolve().is_relative_to(inside):
                raise ValueError(
                    f"{one} links out of the folder of adapters; expected files below it"
                )
        found = _folder_with_files(folder) or folder
        size = (found / TENSORS).stat().st_size if (found / TENSORS).is_file() else 0
        if self._file_bytes is not None and size > self._file_bytes:
            raise ValueError(
                f"{found / TENSORS} has {size:,} bytes; expected at most {self._file_bytes:,}, "
                "enough for the server's maximum rank on all projections in fp64: start the server "
                "with a larger `max_rank`, or leave out modules_to_save, which are not served"
            )
        return found


def _without_paths(text: str, folder: Path) -> str:
    """Returns a text with paths below an adapter's folder made relative to it."""
    paths = {str(folder), os.path.abspath(folder), os.path.realpath(folder)}
    for path in sorted(paths, key=len, reverse=True):  # a path may end with another one
        text = text.replace(f"{path}{os.sep}", "").replace(path, folder.name)
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _folder_with_files(folder: Path) -> Path | None:
    """Returns the folder with an adapter's files, of which adapter_config.json may be missing."""
    if (found := find_adapter_folder(folder)) is not None:
        return found
    tensors = (folder / inner / name for inner in ("", "adapter") for name in (TENSORS, PICKLE))
    return next((file.parent for file in tensors if file.is_file()), None)


def _signature(folder: Path) -> Signature | None:
    """Returns a value that changes with the files of an adapter; None if there is no adapter."""
    files = []
    try:
        if (found := _folder_with_files(folder)) is None:
            return None
        for entry in os.scandir(found):
            with contextlib.suppress(FileNotFoundError):  # the file is being replaced
                if entry.is_file():
                    stat = entry.stat()
                    files.append((entry.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except OSError:  # the folder is being deleted
        return None
    return tuple(sorted(files))
