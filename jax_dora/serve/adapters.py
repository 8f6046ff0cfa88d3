"""The adapters of a folder, by name: read when they come, read again when they change, gone when
they go, while the server runs."""

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dora_common.peft.folder import find_adapter_folder
from jax_dora.serve.metrics import Metrics

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Signature = tuple[tuple[str, int, int, int], ...]


@dataclasses.dataclass(eq=False)
class ServedAdapter:
    """An adapter as it was at one time. Whoever holds it has what it was then, whatever becomes of
    its folder; another state of the folder is another `ServedAdapter`."""

    name: str
    value: Any  # in host memory, what the bank loads


class Adapters:
    """The folders below one folder, of which each is an adapter under its own name.

    A damaged one is told about and not served; the others are. Where a sound one was before, that
    is served until its folder is sound again, or gone. Only what lies below the folder is read: a
    symbolic link that leads out of it is damage too.
    """

    def __init__(
        self,
        folder: Path | None,
        read: Callable[[Path], Any] | None,
        *,
        taken: str,
        metrics: Metrics,
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
          folder: None for no adapters.
          read: makes of a PEFT folder what the bank loads; raises where it is damaged. None where
            there is no folder.
          taken: the base model's name, which no adapter may have.
          tell: is called with a line for everything that changes.
        """
        self._folder: Any = folder  # not None where there is a name to be read
        self._read: Any = read
        self._taken = taken
        self._metrics, self._tell = metrics, tell
        self._served: dict[str, ServedAdapter] = {}
        self._damaged: dict[str, str] = {}
        self._read_signatures: dict[str, Signature] = {}  # as it was read, well or not
        self._last_signatures: dict[str, Signature] = {}  # as the scan before saw it
        self._scan_lock = threading.Lock()

    def get(self, name: str) -> ServedAdapter | None:
        """Returns the adapter of a name, or None where there is none that can be served."""
        return self._served.get(name)

    def names(self) -> list[str]:
        """Returns the names that can be served."""
        return sorted(self._served)

    def damaged(self) -> dict[str, str]:
        """Returns the folders that cannot be served as they are now, and why."""
        return dict(self._damaged)

    def scan(self, *, settle: bool = True) -> None:
        """Looks for what has changed.

        Args:
          settle: read a new or changed folder only once two scans found it alike, so that one that
            is being written is not taken for damaged.
        """
        if self._folder is None:
            return
        with self._scan_lock:
            folders = self._signatures()
            found = {name: one for name, one in folders.items() if one is not None}
            others = sorted(folders.keys() - found.keys())[:10]
            if others and not settle:
                told = ", ".join(others)
                self._tell(f"{self._folder} has folders without an adapter, not served: {told}")
            for name in sorted(self._read_signatures.keys() - found.keys()):
                self._forget(name)
            for name, signature in sorted(found.items()):
                if signature == self._read_signatures.get(name):
                    continue
                if not settle or signature == self._last_signatures.get(name):
                    self._take(name, signature)
            self._last_signatures = found
            self._metrics.adapters.set(len(self._served))
            self._metrics.damaged.set(len(self._damaged))

    def _signatures(self) -> Mapping[str, Signature | None]:
        """Returns the signature of each folder; None of one that holds no adapter."""
        try:
            folders = [one for one in self._folder.iterdir() if one.is_dir()]
        except OSError as error:
            self._tell(f"{self._folder} cannot be read, and what was in it is served on: {error}")
            return self._last_signatures
        return {one.name: _signature(one) for one in folders if not one.name.startswith(".")}

    def _take(self, name: str, signature: Signature) -> None:
        try:
            value = self._read(self._checked(name))
        except Exception as error:  # whatever is wrong with one folder, the others are served
            self._damaged[name] = " ".join(str(error).split())[:500] or type(error).__name__
            what = "is not replaced" if name in self._served else "is not served"
            self._tell(f"adapter {name!r} {what}: {self._damaged[name]}")
        else:
            if _signature(self._folder / name) != signature:
                return  # written while it was read: the next scans see it
            verb = "is replaced" if name in self._served else "is served"
            self._served[name] = ServedAdapter(name, value)
            self._damaged.pop(name, None)
            self._tell(f"adapter {name!r} {verb}")
        self._read_signatures[name] = signature

    def _forget(self, name: str) -> None:
        del self._read_signatures[name]
        self._served.pop(name, None)
        self._damaged.pop(name, None)
        self._tell(f"adapter {name!r} is gone")

    def _checked(self, name: str) -> Path:
        """Returns the PEFT folder of a name."""
        if not NAME.fullmatch(name) or name == self._taken:
            raise ValueError(
                f"its name is {name[:130]!r}; expected letters, digits, '.', '_' and '-', at most "
                f"128, beginning with a letter or digit, and not the base model's {self._taken!r}"
            )
        folder, inside = self._folder / name, self._folder.resolve()
        for one in (folder, *folder.rglob("*")):
            if not one.resolve().is_relative_to(inside):
                raise ValueError(f"{one.name} leads out of {self._folder}; expected files below it")
        return find_adapter_folder(folder) or folder


def _signature(folder: Path) -> Signature | None:
    """Returns a value that changes when an adapter does; None where there is none."""
    try:
        if (found := find_adapter_folder(folder)) is None:
            return None
        entries = [entry for entry in os.scandir(found) if entry.is_file()]
        return tuple(
            (entry.name, stat.st_mtime_ns, stat.st_size, stat.st_ino)
            for entry in sorted(entries, key=lambda entry: entry.name)
            for stat in [entry.stat()]
        )
    except OSError:  # it is going as we look
        return None
