"""The least recently used of items that together exceed a size."""

from collections import OrderedDict
from collections.abc import Hashable


class RecentlyUsed[Item: Hashable]:
    """Items in the order of their last use, with a limit for their total size.

    The last used item is kept whatever its size is. Instances are not thread-safe.
    """

    def __init__(self, limit: int | None) -> None:
        """
        Args:
          limit: the limit, or None for no limit.
        """
        self._limit = limit
        self._sizes: OrderedDict[Item, int] = OrderedDict()  # the least recently used first
        self._total = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def use(self, item: Item, size: int) -> list[Item]:
        """Keeps an item as the last used one, and returns the items that the limit removes."""
        self.remove(item)
        self._sizes[item] = size
        self._total += size
        removed = []
        while self._limit is not None and self._total > self._limit and len(self._sizes) > 1:
            removed.append(next(iter(self._sizes)))
            self.remove(removed[-1])
        return removed

    def remove(self, item: Item) -> None:
        """Removes an item, if it is kept."""
        self._total -= self._sizes.pop(item, 0)
