"""Strips of output features, which the norm and expand and compose keep in shared memory.

A program keeps the rows of B that belong to its features, and walks over every ``splits``-th tile
of the other axis: of inputs for the norm, of rows for expand and compose. The loads of the next
tiles run while it computes. B is thus read once by every program, and not once for every tile.
"""

import dataclasses
from typing import Any

import triton.language as tl

from dora_common.triton.cards import CARDS
from dora_common.triton.jit import WIDEN, cdiv, jit, next_power_of_2

# A program's start takes about as long as this many steps.
_START = 2
# Programs of later waves replace those of earlier ones at any time.
_MOST_WAVES = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """The tiles of a program, and how it is launched.

    Attributes:
        features: the output features of a strip.
        width: the inputs or rows of a tile.
        depth: the rank is multiplied in slices of this size.
        stages: this many tiles are in shared memory, or on their way there.
        resident: the programs that a multiprocessor runs at a time.
    """

    features: int
    width: int
    depth: int
    warps: int
    stages: int = 3
    resident: int = 2

    def slices(self, rank: int) -> dict[str, Any]:
        """Returns the constants of a kernel for a rank."""
        return {
            "RANK": rank,
            "FEATURES": self.features,
            "WIDTH": self.width,
            "DEPTH": self.depth,
            "SLICES": cdiv(rank, self.depth),
            "STAGES": self.stages,
        }

    def walk(self, features: int, size: int, capability: int) -> tuple[int, int, int]:
        """Returns the number of programs, of programs per strip, and of steps of a program, for an
        axis of ``size`` to walk over."""
        strips, tiles = cdiv(features, self.features), cdiv(size, self.width)
        card = CARDS.get(capability, CARDS[90])
        running = self.resident * card.multiprocessors

        def time(splits: int) -> int:
            return cdiv(strips * splits, running) * (_START + cdiv(tiles, splits))

        most = min(tiles, max(1, cdiv(_MOST_WAVES * running, strips)))
        splits = min(range(1, most + 1), key=time)
        steps = cdiv(tiles, splits)
        # As many programs as have a tile to compute.
        splits = cdiv(tiles, steps)
        return strips * splits, splits, steps


def depth(rank: int, most: int = 64) -> int:
    """Returns the depth for a rank: tensor cores multiply at least 16."""
    return min(most, max(16, next_power_of_2(rank)))


@jit
def load_tile(pointer, row, column, rows, columns):
    """Returns the elements [row, column] of a matrix [rows, columns] in its own order, of which a
    thread then copies 16 bytes at a time. rows·columns may exceed 2³¹."""
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(pointer + offset, mask=mask, other=0)


@jit
def factor_pointers(pointer, r, index, ranks, features, RANK_FIRST: tl.constexpr):
    """Returns the addresses of a tile of a factor [ranks, features], or [features, ranks]."""
    if RANK_FIRST:
        return pointer + r.to(tl.int64)[:, None] * features + index[None, :]
    else:
        return pointer + index.to(tl.int64)[:, None] * ranks + r[None, :]


@jit
def load_factor(pointers, r_mask, mask, RANK_FIRST: tl.constexpr):
    """Returns the elements at `factor_pointers`."""
    if RANK_FIRST:
        return tl.load(pointers, mask=r_mask[:, None] & mask[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=mask[:, None] & r_mask[None, :], other=0.0)


@jit
def dot(left, right, total):
    """Returns ``total`` + left · right, which the interpreter widens."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)
