"""Adapters in host memory, which are loaded into the slots of a bank when they are used."""

import dataclasses
import difflib
import os
import threading

from dora_common.hyperparameters import is_integer
from jax_dora.adapt.adapter import Adapter
from jax_dora.bank.adapter_bank import AdapterBank
from jax_dora.bank.host import HostAdapter
from jax_dora.bank.recently_used import RecentlyUsed
from jax_dora.bank.slot_cache import SlotCache
from jax_dora.peft.names import Names


class SlotsBusy(RuntimeError):
    """Raised if all slots of a bank hold acquired adapters; retry after one has been released."""


@dataclasses.dataclass(eq=False)
class _Entry:
    """One version of an adapter.

    Attributes:
      name: the adapter's name.
      source: the folder that the adapter can be read from again, or None.
      host: the adapter in host memory, or None if it was dropped to save memory.
      digest: the digest of the adapter that was dropped. The folder must still hold this adapter
        when it is read again; times and sizes of files would not tell, since copies can keep both.
      is_listed: whether the name refers to this version; False after removal or replacement.
    """

    name: str
    source: str | os.PathLike[str] | None
    host: HostAdapter | None
    digest: bytes | None = None
    is_listed: bool = True


class AdapterStore:
    """Named adapters in host memory, which share the slots of one bank.

        store = AdapterStore(jax_dora.AdapterBank(model, slots=64, max_rank=64))
        store.add("french", "adapters/french")
        slot = store.acquire("french")
        logits = step(state, store.bank, tokens, ids_with_slot)
        store.release("french", slot)

    An acquired adapter keeps its slot until it has been released as many times as acquired. If no
    slot is empty, the least recently used adapter that is not acquired loses its slot.

    Methods are thread-safe. Loading donates the arrays of `bank`, so read `bank` again for every
    step. If other threads acquire adapters, hold `lock` while you read `bank` and run the step.

    Attributes:
      lock: a lock that every method holds.
    """

    def __init__(
        self, bank: AdapterBank, *, host_bytes: int | None = None, names: Names | None = None
    ) -> None:
        """
        Args:
          bank: the bank. The store takes it over and replaces adapters that are in it.
          host_bytes: the host memory for adapters that were read from folders, or None for no
            limit. Beyond it, the least recently used are dropped, and are read again when they are
            needed. The last used one is always kept, and so are adapters that were added as an
            `Adapter` or a `HostAdapter`. `HostAdapter.nbytes` is what an adapter counts.
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
        self._slot_cache: SlotCache[_Entry] = SlotCache(bank)
        self._pytorch_names = names
        self._by_name: dict[str, _Entry] = {}
        # The entries that can be read again and are in host memory.
        self._in_memory: RecentlyUsed[_Entry] = RecentlyUsed(host_bytes)

    @property
    def bank(self) -> AdapterBank:
        """The current bank."""
        return self._slot_cache.bank

    @property
    def loads(self) -> int:
        """The number of loads into slots so far."""
        return self._slot_cache.loads

    @property
    def evictions(self) -> int:
        """The number of evictions so far."""
        return self._slot_cache.evictions

    @property
    def names(self) -> tuple[str, ...]:
        """The sorted names of the adapters."""
        with self.lock:
            return tuple(sorted(self._by_name))

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each adapter that has one, by name."""
        with self.lock:
            return {
                entry.name: at for entry, at in self._slot_cache.slots.items() if entry.is_listed
            }

    def __contains__(self, name: object) -> bool:
        with self.lock:
            return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, name: str, adapter: Adapter | HostAdapter | str | os.PathLike[str]) -> None:
        """Adds an adapter, which replaces an adapter of the same name.

        The adapter is read and checked at once, and loaded into a slot when it is first acquired.
        A replaced adapter stays in its slot until all its users have released it.

        Raises:
          TypeError, ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError: the
            same errors as `AdapterBank.read`. The store has not changed.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}; expected a string that is not empty")
        source = None if isinstance(adapter, Adapter | HostAdapter) else adapter
        host = self.bank.read(adapter, names=self._pytorch_names)
        with self.lock:
            if name in self._by_name:
                self.remove(name)
            self._by_name[name] = entry = _Entry(name, source, host)
            self._touch(entry)

    def remove(self, name: str) -> None:
        """Removes an adapter, which stays in its slot until all its users have released it.

        Raises:
          KeyError: there is no adapter of that name.
        """
        with self.lock:
            entry = self._entry(name)
            del self._by_name[name]
            entry.is_listed = False
            self._drop_unused(entry)

    def acquire(self, name: str) -> int:
        """Returns the slot of an adapter, which keeps it until `release`. Loads it if necessary.

        Raises:
          KeyError: there is no adapter of that name; the message has the nearest names.
          SlotsBusy: all slots hold acquired adapters.
          ValueError, FileNotFoundError, …: the adapter's folder had to be read again, and has been
            changed or deleted; add the adapter again.
        """
        with self.lock:
            entry = self._entry(name)
            if not self._slot_cache.has_room(entry):
                raise SlotsBusy(
                    f"all {self.bank.slots} slots hold adapters that are in use; wait until one is "
                    "released"
                )
            if entry.host is None and entry not in self._slot_cache:
                entry.host = self._read_again(entry)
            self._touch(entry)
            slot = self._slot_cache.pin(entry, entry.host)
            assert slot is not None
            return slot

    def release(self, name: str, slot: int | None = None) -> None:
        """Releases an adapter that `acquire` returned the slot of.

        Args:
          name: the adapter's name.
          slot: the slot that `acquire` returned. It is needed only if an adapter of this name may
            have been replaced since: without it, the oldest acquired version is released.

        Raises:
          ValueError: the adapter is not acquired.
        """
        with self.lock:
            acquired = [
                entry
                for entry, at in self._slot_cache.slots.items()
                if entry.name == name and self._slot_cache.pins(entry) and slot in (None, at)
            ]
            if not acquired:
                where = "" if slot is None else f" in slot {slot}"
                raise ValueError(f"adapter {name!r}{where} is released, but nobody has acquired it")
            entry = min(acquired, key=lambda item: item.is_listed)
            self._slot_cache.unpin(entry)
            if not entry.is_listed:
                self._drop_unused(entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._by_name:
            near = difflib.get_close_matches(str(name), self._by_name, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise KeyError(f"there is no adapter {name!r}{hint}")
        return self._by_name[name]

    def _read_again(self, entry: _Entry) -> HostAdapter:
        """Reads an adapter that was dropped; raises ValueError if its folder holds another one."""
        assert entry.source is not None
        folder = os.fspath(entry.source)
        try:
            host = self.bank.read(folder, names=self._pytorch_names)
        except Exception as error:
            error.add_note(
                f"Folder {folder} was added as {entry.name!r}, and had to be read again because of "
                "host_bytes. Restore the folder, or add another one."
            )
            raise
        if host.digest != entry.digest:
            raise ValueError(
                f"folder {folder} has changed since it was added as {entry.name!r}, and had to be "
                "read again because of host_bytes; expected the same adapter: add it again to use "
                "the new one"
            )
        return host

    def _touch(self, entry: _Entry) -> None:
        """Marks an entry as the most recently used, and drops others to respect `host_bytes`."""
        if entry.host is None or entry.source is None:
            return
        for dropped in self._in_memory.use(entry, entry.host.nbytes):
            assert dropped.host is not None
            dropped.digest, dropped.host = dropped.host.digest, None

    def _drop_unused(self, entry: _Entry) -> None:
        """Removes an entry and empties its slot, unless it is acquired."""
        if not self._slot_cache.pins(entry):
            self._in_memory.remove(entry)
            self._slot_cache.drop(entry)
