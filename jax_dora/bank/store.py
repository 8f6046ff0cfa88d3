"""Adapters in host memory, which are loaded into the slots of a bank when they are used."""

import dataclasses
import difflib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dora_common.hyperparameters import is_integer
from jax_dora.adapt.adapter import Adapter
from jax_dora.bank.adapter_bank import AdapterBank
from jax_dora.bank.host import HostAdapter
from jax_dora.peft.names import Names

type Source = str | os.PathLike[str]


class SlotsBusy(RuntimeError):
    """Raised if all slots of a bank hold acquired adapters; retry after one has been released."""


@dataclasses.dataclass(eq=False)
class StoredAdapter:
    """One version of an adapter in a store. It stays in host memory as long as this object is used.

    Attributes:
      name: the adapter's name.
      host: the adapter, in the layout of the bank.
      extra: what else was stored with this version, such as its tokenizer.
      slot: its slot in the bank, if it has one.
      users: how many times it is acquired.
    """

    name: str
    host: HostAdapter
    extra: Any = None
    slot: int | None = None
    users: int = 0


@dataclasses.dataclass(eq=False)
class _Version:
    """How a store gets the current version of an adapter.

    Attributes:
      adapter: refers to the adapter if it is in host memory.
      source: the folder or function to read it from again, or the adapter itself if there is none.
      extra: what is stored with an adapter from a folder.
      digest: of an adapter from a folder that was dropped, and that the folder must still hold.
        Times and sizes of files would not tell, since copies can keep both.
      lock: held while the adapter is read again.
    """

    adapter: weakref.ref[StoredAdapter]
    source: Source | Callable[[], tuple[HostAdapter, Any]] | StoredAdapter
    extra: Any = None
    digest: bytes | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class AdapterStore:
    """Named adapters in host memory, which share the slots of one bank.

        store = AdapterStore(jax_dora.AdapterBank(model, slots=64, max_rank=64))
        store.add("french", "adapters/french")
        slot = store.acquire("french")
        logits = step(state, store.bank, tokens, ids_with_slot)
        store.release("french", slot)

    An acquired adapter keeps its slot until it has been released as many times as acquired. If no
    slot is empty, the least recently used adapter that is not acquired loses its slot.

    Methods are thread-safe. `acquire` and `release` donate the arrays of `bank`, and all others
    leave it as it is. So read `bank` again for every step, and if other threads acquire or release
    adapters, hold `lock` while you read `bank` and run the step.

    Attributes:
      bank: the current bank.
      loads, evictions: the numbers of loads into slots and of evictions so far.
      lock: a lock that every method holds, but not while it reads a folder.
    """

    def __init__(
        self, bank: AdapterBank, *, host_bytes: int | None = None, names: Names | None = None
    ) -> None:
        """
        Args:
          bank: the bank. The store takes it over and replaces adapters that are in it.
          host_bytes: the host memory for adapters that can be read again, or None for no limit.
            Beyond it, the least recently used are dropped, and are read again when they are needed.
            Adapters in slots, those whose `StoredAdapter` is in use, and the last used one are
            always kept. `HostAdapter.nbytes` is what an adapter counts.
          names: translates the model's paths to PyTorch's names, as in `AdapterBank.read`.

        Raises:
          TypeError: bank is not an `AdapterBank`.
          ValueError: host_bytes is neither a whole number of at least 0 nor None.
        """
        if not isinstance(bank, AdapterBank):
            raise TypeError(f"bank is a {type(bank).__name__}; expected an AdapterBank")
        if host_bytes is not None and not (is_integer(host_bytes) and host_bytes >= 0):
            raise ValueError(
                f"host_bytes is {host_bytes!r}; expected a whole number of at least 0, or None"
            )
        self.lock = threading.RLock()
        self.bank, self._host_bytes = bank, host_bytes
        self.loads = self.evictions = 0
        self._free = list(range(bank.slots - 1, -1, -1))
        self._pytorch_names = names
        self._versions: dict[str, _Version] = {}
        # The adapters in slots, and the sizes of those that can be read again, except adapters in
        # slots or in use beyond the limit; of both the least recently used first.
        self._in_slots: dict[StoredAdapter, None] = {}
        self._in_memory: dict[StoredAdapter, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The sorted names of the adapters."""
        with self.lock:
            return tuple(sorted(self._versions))

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each adapter that has one, by name."""
        with self.lock:
            held = filter(self._is_current, self._in_slots)
            return {one.name: one.slot for one in held if one.slot is not None}

    def __contains__(self, name: object) -> bool:
        return name in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    def add(
        self,
        name: str,
        adapter: Adapter | HostAdapter | Source,
        *,
        extra: Any = None,
        read_again: Callable[[], tuple[HostAdapter, Any]] | None = None,
    ) -> None:
        """Adds an adapter, which replaces an adapter of the same name.

        The adapter is read and checked at once, and loaded into a slot when it is first acquired.
        A replaced adapter stays in its slot until all its users have released it.

        Args:
          name: the name.
          adapter: the adapter, or the PEFT folder to read it from.
          extra: what else to keep with it, as `StoredAdapter.extra`.
          read_again: returns the same adapter and `extra` again, or raises an error. With it, or if
            `adapter` is a folder, `host_bytes` applies to the adapter.

        Raises:
          TypeError, ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError: the
            same errors as `AdapterBank.read`. The store has not changed.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}; expected a string that is not empty")
        host = self.bank.read(adapter, names=self._pytorch_names)
        stored = StoredAdapter(name, host, extra)
        version = _Version(weakref.ref(stored), read_again or stored)
        if read_again is None and isinstance(adapter, str | os.PathLike):
            version.source, version.extra = adapter, extra
        with self.lock:
            if name in self._versions:
                self.remove(name)
            self._versions[name] = version
            self._touch(stored)

    def remove(self, name: str) -> None:
        """Removes an adapter, which stays in its slot until all its users have released it.

        Raises:
          KeyError: there is no adapter of that name.
        """
        with self.lock:
            adapter = self._version(name).adapter()
            del self._versions[name]
            if adapter is not None:
                self._in_memory.pop(adapter, None)

    def get(self, name: str) -> StoredAdapter:
        """Returns the current version of an adapter, read again if it was dropped.

        Raises:
          KeyError: there is no adapter of that name; the message has the nearest names.
          ValueError, FileNotFoundError, …: the adapter's folder had to be read again, and has been
            changed or deleted; add the adapter again.
        """
        while True:
            version = self._version(name)
            try:
                # Without the lock of the store, so that other adapters can be used meanwhile.
                with version.lock:
                    if (adapter := version.adapter()) is None:
                        adapter = self._read_again(name, version)
                        version.adapter = weakref.ref(adapter)
            except Exception:
                if self._versions.get(name) is version:
                    raise
                continue  # it was replaced meanwhile
            with self.lock:
                if self._is_current(adapter):
                    self._touch(adapter)
                    return adapter

    def acquire(self, adapter: str | StoredAdapter) -> int:
        """Returns the slot of an adapter, which keeps it until `release`. Loads it if necessary.

        Args:
          adapter: the adapter's name, or a result of `get`, which may have been replaced since.

        Raises:
          SlotsBusy: all slots hold acquired adapters.
          KeyError, ValueError, FileNotFoundError, …: the same errors as `get`.
        """
        with self.lock:
            self._empty_slots()
            if not isinstance(adapter, StoredAdapter):
                # Nothing is read again if there is no slot for it.
                self._check_room(self._version(adapter).adapter())
        if not isinstance(adapter, StoredAdapter):
            adapter = self.get(adapter)
        with self.lock:
            self._check_room(adapter)
            if adapter.slot is None:
                slot = self._free.pop() if self._free else self._drop(self._idle()[0])
                try:
                    self.bank = self.bank.load(slot, adapter.host)
                except BaseException:
                    self._free.append(slot)
                    raise
                adapter.slot = slot
                self.loads += 1
            self._in_slots.pop(adapter, None)
            self._in_slots[adapter] = None
            adapter.users += 1
            return adapter.slot

    def release(self, adapter: str | StoredAdapter, slot: int | None = None) -> None:
        """Releases an adapter that `acquire` returned the slot of.

        Args:
          adapter: the adapter, or its name.
          slot: the slot that `acquire` returned. It is needed only with the name of an adapter that
            may have been replaced since: without it, the oldest acquired version is released.

        Raises:
          ValueError: the adapter is not acquired.
        """
        with self.lock:
            acquired = [
                held
                for held in self._in_slots
                if adapter in (held, held.name) and held.users and slot in (None, held.slot)
            ]
            if not acquired:
                name = adapter.name if isinstance(adapter, StoredAdapter) else adapter
                where = "" if slot is None else f" in slot {slot}"
                raise ValueError(f"adapter {name!r}{where} is released, but nobody has acquired it")
            min(acquired, key=self._is_current).users -= 1
            self._empty_slots()

    def _version(self, name: str) -> _Version:
        version = self._versions.get(name)
        if version is None:
            near = difflib.get_close_matches(str(name), self.names, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise KeyError(f"there is no adapter {name!r}{hint}")
        return version

    def _is_current(self, adapter: StoredAdapter) -> bool:
        """Returns whether an adapter's name refers to this version."""
        version = self._versions.get(adapter.name)
        return version is not None and version.adapter() is adapter

    def _check_room(self, adapter: StoredAdapter | None) -> None:
        has_slot = adapter is not None and adapter.slot is not None
        if not (has_slot or self._free or self._idle()):
            raise SlotsBusy(
                f"all {self.bank.slots} slots hold adapters that are in use; wait until one is "
                "released"
            )

    def _empty_slots(self) -> None:
        """Empties the slots of adapters that have been removed and that nobody has acquired."""
        for held in self._idle():
            if not self._is_current(held):
                slot = self._drop(held)
                self.bank = self.bank.evict(slot)
                self._free.append(slot)

    def _idle(self) -> list[StoredAdapter]:
        """Returns the adapters in slots that nobody has acquired, the least recently used first."""
        return [held for held in self._in_slots if not held.users]

    def _drop(self, adapter: StoredAdapter) -> int:
        """Takes an adapter's slot from it, and returns the slot."""
        slot, adapter.slot = adapter.slot, None
        assert slot is not None
        del self._in_slots[adapter]
        self.evictions += 1
        return slot

    def _read_again(self, name: str, version: _Version) -> StoredAdapter:
        """Reads an adapter that was dropped; raises ValueError if its folder holds another one."""
        source = version.source
        assert not isinstance(source, StoredAdapter)
        if callable(source):
            return StoredAdapter(name, *source())
        folder = os.fspath(source)
        try:
            host = self.bank.read(folder, names=self._pytorch_names)
        except Exception as error:
            error.add_note(
                f"Folder {folder} was added as {name!r}, and had to be read again because of "
                "host_bytes. Restore the folder, or add another one."
            )
            raise
        if host.digest != version.digest:
            raise ValueError(
                f"folder {folder} has changed since it was added as {name!r}, and had to be read "
                "again because of host_bytes; expected the same adapter: add it again to use the "
                "new one"
            )
        return StoredAdapter(name, host, version.extra)

    def _touch(self, adapter: StoredAdapter) -> None:
        """Marks an adapter as the last used one, and drops others to respect `host_bytes`."""
        if isinstance(self._versions[adapter.name].source, StoredAdapter):
            return
        kept = self._in_memory
        kept.pop(adapter, None)
        kept[adapter] = adapter.host.nbytes
        while self._host_bytes is not None and len(kept) > 1:
            if sum(kept.values()) <= self._host_bytes:
                break
            dropped = next(iter(kept))
            del kept[dropped]
            version = self._versions[dropped.name]
            if not callable(version.source):
                version.digest = dropped.host.digest
