"""The tokens of a batch, grouped by the slots of their adapters, as tables that kernels read.

A tile is some tokens of one slot, at most ``rows``. The tables are made once for a batch, on the
host, and lie at fixed addresses: a CUDA graph reads those of the batch with which it is replayed.
Tokens without an adapter are in no tile.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Tensor cores multiply at least 16 rows; a batch of many tokens reads adapters less often in larger
# tiles.
SMALL, LARGE = 16, 64
SMALL_BATCH = 256  # the most tokens that are tiled by SMALL
HEAD = 4  # numbers before a tile's tokens: the slot, its rank, and two that align the tokens


class Batch:
    """The tables of one batch.

    Args:
        tokens: the most tokens of a batch.
        slots: number of slots.

    Attributes:
        tokens: i64[1] on the CPU, the tokens of the batch; 0 if none has an adapter.
        small, large: i32[tiles, HEAD + rows], the tiles of SMALL and LARGE rows.
        slots: i32[tokens, 1], the slot of each token of a batch of few, or -1.
        used: i32[1 + slots, 2], how many slots such a batch has; then those, and their ranks.
    """

    def __init__(self, tokens: int, slots: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(1, dtype=torch.int64)
        few = min(tokens, SMALL_BATCH)
        shapes = [
            *((most_tiles(count, slots, rows), HEAD + rows)
              for rows, count in ((SMALL, few), (LARGE, tokens))),
            (few, 1),
            (1 + min(few, slots), 2),
        ]  # fmt: skip
        sizes = [height * width for height, width in shapes]
        self._table = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = np.zeros(sum(sizes), np.int32)
        tables = map(Tensor.view, self._table.split(sizes), shapes)
        self.small, self.large, self.slots, self.used = tables
        self._parts = np.split(self._host, np.cumsum(sizes)[:-1])
        self._parts = [one.reshape(shape) for one, shape in zip(self._parts, shapes, strict=True)]

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
        self.tokens[0] = len(slots) if len(order) else 0
        small, large, of_token, used = self._parts
        few = slots[:SMALL_BATCH] if len(slots) <= SMALL_BATCH else slots[:0]
        _fill(small, order[: len(few)], slots, ranks)
        _fill(large, order, slots, ranks)
        of_token[:] = -1
        of_token[: len(few), 0] = few
        found = np.unique(few[few >= 0])
        used[0, 0] = len(found)
        used[1 : 1 + len(found), 0] = found
        used[1 : 1 + len(found), 1] = np.asarray(ranks, np.int32)[found]
        values = torch.from_numpy(self._host)
        # A copy, since the device may read it when the next batch's tables are made.
        values = values.pin_memory() if self._table.is_cuda else values
        self._table.copy_(values, non_blocking=True)


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
