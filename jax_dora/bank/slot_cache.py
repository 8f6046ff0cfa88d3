"""Keeps account of which adapter lies in which slot of a bank: pinned while used, the least
recently used out."""

from collections import Counter, OrderedDict
from collections.abc import Hashable

from jax_dora.bank.bank import AdapterBank
from jax_dora.bank.host import HostAdapter


class SlotCache[Key: Hashable]:
    """The adapters in the slots of one bank, by keys of the caller's own. Not for several threads.

    Attributes:
      bank: as it is now.
      loads, evictions: how many there were.
      slots: of each adapter that has one, the least recently used first.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self.bank = bank
        self.loads = self.evictions = 0
        self.slots: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(bank.slots - 1, -1, -1))
        self._pins: Counter[Key] = Counter()

    def has_room(self, key: Key) -> bool:
        """Returns whether an adapter lies in a slot, or could be put into one."""
        return key in self.slots or bool(self._free) or len(self._pins) < len(self.slots)

    def pins(self, key: Key) -> int:
        """Returns how often an adapter is pinned."""
        return self._pins[key]

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def pin(self, key: Key, adapter: HostAdapter | None) -> int | None:
        """Returns the slot in which an adapter lies until it is unpinned as often; None where every
        slot is pinned for others. One that lies in a slot already need not be given.

        Raises whatever loading it does; nothing is changed then but that another may have lost its
        slot.
        """
        if not self.has_room(key):
            return None
        if key not in self.slots:
            slot = self._empty()
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
        """Empties the slot of an adapter that nobody has pinned, if it has one."""
        if key in self.slots:
            slot = self.slots.pop(key)
            self.bank = self.bank.evict(slot)
            self._free.append(slot)
            self.evictions += 1

    def _empty(self) -> int:
        """Returns a slot to load into, its adapter forgotten; there has to be room."""
        if self._free:
            return self._free.pop()
        oldest = next(one for one in self.slots if one not in self._pins)
        self.evictions += 1
        return self.slots.pop(oldest)
