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
        members: i32[members, 2], their slots, and the ranks.
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
        _AT[self.used.data_ptr()] = self

    def update(self, slots: np.ndarray, ranks: Sequence[int]) -> None:
        """Makes the tables of a batch, i32[tiles, HEAD + rows]: the slot, the rank and the tokens
        of each tile, padded with -1; zeros after the last. Does not wait for the device.

        Args:
            slots: int[tokens], the slot of each token, -1 without an adapter.
            ranks: the rank of the adapter in each slot; 0 if it is for other layers only.
        """
        slots = np.where(np.append(ranks, 0)[slots] > 0, slots, -1)
        order = np.argsort(slots, kind="stable")
        order = order[np.count_nonzero(slots < 0) :]
        self.tokens, self.has_base = len(slots) if len(order) else 0, len(order) < len(slots)
        used, small, large, of_token, ranges, members = self._parts
        few = slots[:SMALL_BATCH] if len(slots) <= SMALL_BATCH else slots[:0]
        _fill(small, order[: len(few)], slots, ranks)
        _fill(large, order, slots, ranks)
        of_token[:] = -1
        of_token[: len(slots), 0] = slots
        found = np.unique(few[few >= 0])
        used[0, 0] = len(found)
        used[1 : 1 + len(found), 0] = found
        used[1 : 1 + len(found), 1] = np.asarray(ranks, np.int32)[found]
        pairs = np.unique(
            np.arange(len(slots))[slots >= 0] // MANY * len(ranks) + slots[slots >= 0]
        )
        tiles, pairs = np.divmod(pairs, len(ranks))
        ranges[:, 0] = np.searchsorted(tiles, np.arange(len(ranges)))
        members[: len(pairs), 0] = pairs
        members[: len(pairs), 1] = np.asarray(ranks, np.int32)[pairs]
        values = torch.from_numpy(self._host)
        # A copy, since the device may read it when the next batch's tables are made.
        values = values.pin_memory() if self.all.is_cuda else values
        self.all.copy_(values, non_blocking=True)


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


def _fill(table: np.ndarray, order: np.ndarray, slots: np.ndarray, ranks: Sequence[int]) -> None:
    """Fills a table for tokens that are ordered by their slots."""
    rows = table.shape[1] - HEAD
    used, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles = -(-counts // rows)
    total = int(tiles.sum())
    number = np.arange(total) - np.repeat(tiles.cumsum() - tiles, tiles)
    begin = np.repeat(begins, tiles) + number * rows
    place = begin[:, None] + np.arange(rows)
    is_valid = place < np.repeat(begins + counts, tiles)[:, None]
    table[:] = 0
    table[:total, 0] = np.repeat(used, tiles)
    table[:total, 1] = np.repeat(np.asarray(ranks, np.int32)[used], tiles)
    table[:total, HEAD:] = np.where(is_valid, np.append(order, -1)[place * is_valid], -1)
