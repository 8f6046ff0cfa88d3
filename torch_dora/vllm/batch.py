"""The tokens of a batch, grouped by the slots of their adapters, as tables that kernels read.

A tile is some tokens of one slot, at most ``rows``. The tables are made once for a batch, on the
host, and lie at fixed addresses: a CUDA graph reads those of the batch with which it is replayed.
Tokens without an adapter are in no tile.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

# Tensor cores multiply at least 16 rows; a batch of many tokens reads adapters less often in larger
# tiles.
SMALL, LARGE = 16, 64
SMALL_BATCH = 256  # the most tokens that are tiled by SMALL
LARGE_BATCH = 1024  # the fewest tokens for which the base weight is multiplied in tiles of MANY
MANY = 128  # rows that are multiplied by the base weight at a time, of whichever slots
HEAD = 4  # numbers before a tile's tokens: the slot, its rank, and two that align the tokens
_ALIGNED = 32  # numbers between the begins of tables
_AT: weakref.WeakValueDictionary[int, "Batch"] = weakref.WeakValueDictionary()


class Batch:
    """The tables of one batch.

    Args:
        tokens: the most tokens of a batch.
        slots: number of slots.

    Attributes:
        all: i32[numbers], the tables below.
        tokens: of the batch; 0 if none has an adapter.
        has_base: whether some have none.
        small, large: i32[tiles, HEAD + rows], the tiles of SMALL and LARGE rows.
        slots: i32[tokens, 1], the slot of each token, or -1.
        used: i32[1 + slots, 2], how many slots a batch of few has; then those, and their ranks.
        ranges: i32[1 + tiles, 1], where the members begin of each MANY tokens.
        members: i32[members, 2], their slots, and the ranks; of LARGE_BATCH tokens or more.
    """

    def __init__(self, tokens: int, slots: int, device: torch.device | str) -> None:
        self.tokens, self.has_base = 0, False
        few, many = min(tokens, SMALL_BATCH), -(-tokens // MANY)
        shapes = [
            (1 + min(few, slots), 2),
            *((most_tiles(count, slots, rows), HEAD + rows)
              for rows, count in ((SMALL, few), (LARGE, tokens))),
            (tokens, 1),
            (1 + many, 1),
            (min(tokens, many * slots), 2),
        ]  # fmt: skip
        ends = accumulate((-(-height * width // _ALIGNED) * _ALIGNED for height, width in shapes))
        begins = [0, *ends]
        self.all = torch.zeros(begins[-1], dtype=torch.int32, device=device)
        self._host = np.zeros(begins[-1], np.int32)
        parts = [slice(begin, begin + height * width)
                 for begin, (height, width) in zip(begins[:-1], shapes, strict=True)]  # fmt: skip
        tables = (self.all[part].view(shape) for part, shape in zip(parts, shapes, strict=True))
        self.used, self.small, self.large, self.slots, self.ranges, self.members = tables
        self._parts = [self._host[p].reshape(shape) for p, shape in zip(parts, shapes, strict=True)]
        self._of_token = shapes[3][0]  # numbers in `slots` that may not be -1
        self._tiles = [0, 0]  # of small and large
        self._ends = begins[3], begins[5]
        _AT[self.used.data_ptr()] = self

    def update(self, slots: np.ndarray, ranks: Sequence[int] | np.ndarray) -> None:
        """Makes the tables of a batch, i32[tiles, HEAD + rows]: the slot, the rank and the tokens
        of each tile, padded with -1; zeros after the last. Does not wait for the device.

        Tables that are not read for so many tokens are left as they were; without an adapter, those
        of few are emptied too, since no tables are made for further batches without one.

        Args:
            slots: int[tokens], the slot of each token, -1 without an adapter.
            ranks: the rank of the adapter in each slot; 0 if it is for other layers only.
        """
        ranks = np.asarray(ranks, np.int32)
        if not ranks.all():
            slots = np.where(np.append(ranks, 0)[slots] > 0, slots, -1)
        count = len(slots)
        counts = np.bincount(slots + 1, minlength=len(ranks) + 1)
        # NumPy sorts numbers of 16 bits by counting them.
        order = slots.astype(np.int16).argsort(kind="stable")[counts[0] :]
        found = counts[1:].nonzero()[0]
        self.tokens, self.has_base = count if len(order) else 0, bool(counts[0])
        used, small, large, of_token, ranges, members = self._parts
        groups = _Groups(found, ranks[found], counts[1:][found], order)
        if count <= SMALL_BATCH or not self.tokens:
            used[0, 0] = len(found)
            used[1 : 1 + len(found), 0] = found
            used[1 : 1 + len(found), 1] = groups.ranks
            self._tiles[0] = groups.fill(small, self._tiles[0])
        self._tiles[1] = groups.fill(large, self._tiles[1])
        before, self._of_token = self._of_token, count
        of_token[:count, 0] = slots
        of_token[count:before] = -1
        end = self._ends[0] + max(count, before)
        if count >= LARGE_BATCH:
            is_in = np.zeros((len(ranges), len(ranks) + 1), bool)
            is_in[np.arange(count) // MANY, slots] = True
            tiles, found = is_in[:, :-1].nonzero()
            ranges[:, 0] = np.searchsorted(tiles, np.arange(len(ranges)))
            members[: len(found), 0] = found
            members[: len(found), 1] = ranks[found]
            end = self._ends[1] + 2 * len(found)
        values = torch.from_numpy(self._host[:end])
        # A copy, since the device may read it when the next batch's tables are made.
        values = values.pin_memory() if self.all.is_cuda else values
        self.all[:end].copy_(values, non_blocking=True)


def of(used: Tensor) -> Batch:
    """Returns the batch whose table this is. Operators get a table alone: Inductor takes results of
    an operator that is given numbers on the host for unaligned, and reads them one by one.

    Raises:
        RuntimeError: the table is a copy.
    """
    found = _AT.get(used.data_ptr())
    if found is None:
        raise RuntimeError(
            "a layer's buffer `table` is at another address than the batch's tables; expected the "
            "buffer that the plugin has made, not a copy of it: move or replace the model before "
            "its adapters' layers are made, or set TORCH_DORA_VLLM_PUNICA=1"
        )
    return found


def rows_of_tile(tokens: int) -> int:
    """Returns the rows of a tile for a batch that is padded to ``tokens``."""
    return SMALL if tokens <= SMALL_BATCH else LARGE


def most_tiles(tokens: int, slots: int, rows: int) -> int:
    """Returns how many tiles any batch of so many tokens can have."""
    used = min(tokens, slots)
    return used + (tokens - used) // rows


class _Groups:
    """The tokens of each slot of a batch.

    Args:
        slots, ranks, counts: int[slots].
        order: int[tokens], the tokens in the order of their slots.
    """

    def __init__(
        self, slots: np.ndarray, ranks: np.ndarray, counts: np.ndarray, order: np.ndarray
    ) -> None:
        self.slots, self.ranks, self.counts, self.order = slots, ranks, counts, order
        number = np.arange(len(order))
        self.number = number - (counts.cumsum() - counts).repeat(counts)  # of a token in its group

    def fill(self, table: np.ndarray, before: int) -> int:
        """Fills a table that had so many tiles, and returns how many it has."""
        width = table.shape[1]
        rows = width - HEAD
        tiles = -(-self.counts // rows)
        ends = tiles.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        table[total:before] = 0
        table[:total, HEAD:] = -1
        table[:total, 0] = self.slots.repeat(tiles)
        table[:total, 1] = self.ranks.repeat(tiles)
        tile, row = np.divmod(self.number, rows)
        tile += (ends - tiles).repeat(self.counts)
        table.reshape(-1)[tile * width + HEAD + row] = self.order
        return total
