"""Adapters in host memory, behind the slots of a bank."""

import collections
import dataclasses
import difflib
import os
import threading
from typing import cast

from jax_dora.adapt.adapter import Adapter
from jax_dora.bank.bank import AdapterBank
from jax_dora.bank.host import HostAdapter
from jax_dora.bank.slot_cache import SlotCache
from jax_dora.peft.names import Names


class SlotsBusy(RuntimeError):
    """Every slot of a bank holds an adapter that somebody uses; one is free once it is released."""


@dataclasses.dataclass(eq=False)
class _Entry:
    """One version of an adapter.

    Attributes:
      source: a folder, or None where it has none to be read from again.
      host: what was read of it, or None where there was no room.
      is_listed: whether it is what its name stands for now.
    """

    name: str
    source: str | os.PathLike[str] | None
    host: HostAdapter | None
    is_listed: bool = True


class AdapterStore:
    """Adapters by name, as many as host memory holds, for the slots of one bank.

        store = AdapterStore(jax_dora.AdapterBank(model, slots=64, max_rank=64))
        store.add("french", "adapters/french")
        slot = store.acquire("french")
        logits = step(state, store.bank, tokens, ids_with_slot)
        store.release("french", slot)

    An adapter that is acquired keeps its slot until as many `release`s. The slot of one that nobody
    holds goes to another adapter when no slot is empty, the least recently used first. Methods may
    be called from several threads; `bank` is to be read anew for every step, since loading donates
    its arrays: whoever runs steps beside another thread that acquires takes `lock` around both.

    Attributes:
      lock: held by every method.
    """

    def __init__(
        self, bank: AdapterBank, *, host_bytes: int | None = None, names: Names | None = None
    ) -> None:
        """
        Args:
          bank: its slots are the store's from now on; what they hold is evicted as they are needed.
          host_bytes: how much of what was read of folders is kept, the least recently used dropped
            first and read again when it is needed; everything if None. An `Adapter` that was added
            is always kept.
          names: how PyTorch calls the modules of the model, as `AdapterBank.read`'s.
        """
        if host_bytes is not None and (isinstance(host_bytes, bool) or host_bytes < 0):
            raise ValueError(f"host_bytes is {host_bytes!r}; expected at least 0, or None")
        self.lock = threading.RLock()
        self._residents: SlotCache[_Entry] = SlotCache(bank)
        self._host_bytes = host_bytes
        self._pytorch_names = names
        self._by_name: dict[str, _Entry] = {}
        # Of everything that was used, the least recently first.
        self._used: collections.OrderedDict[_Entry, None] = collections.OrderedDict()

    @property
    def bank(self) -> AdapterBank:
        """Returns the bank as it is now."""
        return self._residents.bank

    @property
    def loads(self) -> int:
        """Returns how many adapters were put into slots."""
        return self._residents.loads

    @property
    def evictions(self) -> int:
        """Returns how many lost their slots."""
        return self._residents.evictions

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the adapters, in order."""
        with self.lock:
            return tuple(sorted(self._by_name))

    @property
    def slots(self) -> dict[str, int]:
        """Returns the slot of each adapter that has one."""
        with self.lock:
            return {one.name: at for one, at in self._residents.slots.items() if one.is_listed}

    def __contains__(self, name: object) -> bool:
        with self.lock:
            return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, name: str, adapter: Adapter | HostAdapter | str | os.PathLike[str]) -> None:
        """Makes an adapter known, in the place of another of that name.

        It is read and checked at once, and loaded when it is first acquired. Those who hold the
        other one keep it until they release it.

        Raises:
          TypeError, ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError: as
            `AdapterBank.read`; the store is as before.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}; expected a string that is not empty")
        if isinstance(adapter, HostAdapter):
            source, host = None, adapter
        else:
            source = None if isinstance(adapter, Adapter) else adapter
            host = self.bank.read(adapter, names=self._pytorch_names)
        with self.lock:
            if name in self._by_name:
                self.remove(name)
            self._by_name[name] = entry = _Entry(name, source, host)
            self._touch(entry)

    def remove(self, name: str) -> None:
        """Forgets an adapter; those who hold it keep it until they release it.

        Raises:
          KeyError: there is none of that name.
        """
        with self.lock:
            entry = self._entry(name)
            del self._by_name[name]
            entry.is_listed = False
            self._drop_unused(entry)

    def acquire(self, name: str) -> int:
        """Returns the slot of an adapter, which it keeps until `release`.

        Raises:
          KeyError: there is none of that name; the message has those that are near.
          SlotsBusy: no slot is empty, and all adapters in them are held.
          ValueError, FileNotFoundError, …: its folder, which is read again, is not what it was.
        """
        with self.lock:
            entry = self._entry(name)
            if not self._residents.has_room(entry):
                raise SlotsBusy(
                    f"all {self.bank.slots} slots hold adapters that are in use; wait until one is "
                    "released"
                )
            if entry.host is None and entry not in self._residents:
                assert entry.source is not None
                entry.host = self.bank.read(entry.source, names=self._pytorch_names)
            self._touch(entry)
            slot = self._residents.pin(entry, entry.host)
            assert slot is not None
            return slot

    def release(self, name: str, slot: int | None = None) -> None:
        """Gives back what `acquire` returned.

        Args:
          slot: that it returned; needed only where the adapter of this name has been replaced
            meanwhile: without it, the oldest that is still held is released.

        Raises:
          ValueError: nobody holds it.
        """
        with self.lock:
            held = [
                one
                for one, at in self._residents.slots.items()
                if one.name == name and self._residents.pins(one) and slot in (None, at)
            ]
            if not held:
                where = "" if slot is None else f" in slot {slot}"
                raise ValueError(f"adapter {name!r}{where} is released, but nobody has acquired it")
            entry = min(held, key=lambda one: one.is_listed)
            self._residents.unpin(entry)
            if not entry.is_listed:
                self._drop_unused(entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._by_name:
            near = difflib.get_close_matches(name, self._by_name, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise KeyError(f"there is no adapter {name!r}{hint}")
        return self._by_name[name]

    def _touch(self, entry: _Entry) -> None:
        """Makes an entry the most recently used, and drops what the host has no room for."""
        self._used[entry] = None
        self._used.move_to_end(entry)
        if self._host_bytes is None:
            return
        kept = [one for one in self._used if one.host is not None and one.source is not None]
        sizes = [cast(HostAdapter, one.host).nbytes for one in kept]
        for at, one in enumerate(kept[:-1]):
            if sum(sizes[at:]) <= self._host_bytes:
                break
            one.host = None

    def _drop_unused(self, entry: _Entry) -> None:
        """Forgets an entry, and empties its slot, unless somebody uses it."""
        if not self._residents.pins(entry):
            self._used.pop(entry, None)
            self._residents.drop(entry)
