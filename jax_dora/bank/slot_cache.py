"""A least-recently-used cache of adapters in the slots of a bank, with pinning."""

from collections import Counter, OrderedDict
from collections.abc import Hashable

from jax_dora.bank.adapter_bank import AdapterBank
from jax_dora.bank.host import HostAdapter


class SlotCache[Key: Hashable]:
    """Assigns the slots of one bank to adapters, under keys that the caller chooses.

    A pinned adapter keeps its slot. If there is no empty slot, the least recently used adapter that
    is not pinned loses its slot. Instances are not thread-safe.

    Attributes:
      bank: the current bank.
      loads, evictions: the numbers of loads and of evictions so far.
      slots: the slot of each adapter that has one, by key, the least recently used first.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self.bank = bank
        self.loads = self.evictions = 0
        self.slots: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(bank.slots - 1, -1, -1))
        self._pins: Counter[Key] = Counter()

    def has_room(self, key: Key | None) -> bool:
        """Returns whether an adapter has a slot, or `pin` can give it one; None for a new key."""
        return key in self.slots or bool(self._free) or len(self._pins) < len(self.slots)

    def pins(self, key: Key) -> int:
        """Returns how many times an adapter is pinned."""
        return self._pins[key]

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def pin(self, key: Key, adapter: HostAdapter | None) -> int | None:
        """Pins an adapter, which keeps its slot until it is unpinned as often; returns the slot, or
        None if all slots are pinned for others. An adapter without a slot is loaded (only then it
        must not be None); after an error it is not pinned, though another one may have lost its
        slot."""
        if not self.has_room(key):
            return None
        if key not in self.slots:
            slot = self._free_slot()
            assert adapter is not None
            try:
                self.bank = self.bank.load(slot, adapter)
            except BaseException:
                self._free.append(slot)
                raise
            self.slots[key] = slot
            self.loads += 1
        self.slots.move_to_end(key)
        self._pins[key] += 1
        return self.slots[key]

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def drop(self, key: Key) -> None:
        """Empties the slot of an adapter, if it has one. The adapter must not be pinned."""
        if key in self.slots:
            slot = self.slots.pop(key)
            self.bank = self.bank.evict(slot)
            self._free.append(slot)
            self.evictions += 1

    def _free_slot(self) -> int:
        """Returns an empty slot, or that of the least recently used adapter that is not pinned."""
        if self._free:
            return self._free.pop()
        oldest = next(key for key in self.slots if key not in self._pins)
        self.evictions += 1
        return self.slots.pop(oldest)
