"""Strips of a factor that programs of a Hopper keep in registers.

A program keeps its strip as the left operand of its products, [rows, r], and walks over every
``splits``-th tile of the other factor. Only these tiles and those of the matrix pass through shared
memory, so there is room for several on their way, fetched by tensor descriptors (TMA).
"""

import dataclasses

import triton.language as tl

from dora_common.triton import strips
from dora_common.triton.jit import jit
from dora_common.triton.strips import dot

# A tile of a tensor descriptor starts at a multiple of 16 bytes: so do rows of 8 elements.
ALIGNMENT = 8
# Lower ranks are faster with strips in shared memory; the registers have no room for higher ones.
LEAST_RANK, MOST_RANK = 129, 384
# Of global memory, for the tensor descriptors of a program.
SCRATCH = 2 * 128


@dataclasses.dataclass(frozen=True)
class Config(strips.Config):
    """As for strips in shared memory, of which a multiprocessor runs two programs."""

    resident: int = 1


def fits(rank: int, *rows: int) -> bool:
    """Returns whether registers hold a strip of this rank, and rows of these sizes have tiles."""
    return LEAST_RANK <= rank <= MOST_RANK and not any(row % ALIGNMENT for row in rows)


# The fastest of an H200 (8192 × 8192, and 4096 × 8192, at rank 384).
CONFIG = Config(128, 64, 128, 8)


@jit
def in_registers(tile, DEPTH: tl.constexpr):
    """Returns a tile [rows, DEPTH] times the unit matrix.

    This is the tile, in the registers in which a product leaves its result, and the next one takes
    its left operand. Without it, Triton would keep the tile in shared memory and read it in every
    step. An infinite element makes its row NaN.
    """
    index = tl.arange(0, DEPTH)
    unit = (index[:, None] == index[None, :]).to(tl.float32).to(tile.dtype)
    zero = tl.zeros(tile.shape, tl.float32)
    return dot(tile, unit, zero).to(tile.dtype)


@jit
def tiles_of(
    pointer, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Describes an array [rows, columns], or [columns, rows] if TRANSPOSED, of tiles [HEIGHT,
    WIDTH]."""
    if TRANSPOSED:
        return tl.make_tensor_descriptor(
            pointer,
            [columns, rows],
            [rows, 1],  # pyright: ignore[reportArgumentType]
            [WIDTH, HEIGHT],
        )
    else:
        return tl.make_tensor_descriptor(
            pointer,
            [rows, columns],
            [columns, 1],  # pyright: ignore[reportArgumentType]
            [HEIGHT, WIDTH],
        )


@jit
def tile_at(tiles, row, column, TRANSPOSED: tl.constexpr):
    """Returns the tile [HEIGHT, WIDTH] at a row and a column, with zeros outside of the array."""
    if TRANSPOSED:
        return tl.trans(tiles.load([column, row]))
    else:
        return tiles.load([row, column])
