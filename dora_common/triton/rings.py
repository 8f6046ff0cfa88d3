"""Rings of tiles in shared memory, by which the warps of a Hopper share the work of a program.

Single warps fetch tiles by tensor descriptors (TMA). Two groups of four warps multiply: each keeps
its 64 rows of a strip in registers, as the left operand of its products, and walks over the tiles
that the ring holds. While one group adds its tile up, the other one keeps the tensor cores busy.

A program makes its tensor descriptors in global memory, each by a write that it waits for. So each
of its warps and groups makes those that it uses, at the same time as the others.

This is written in Gluon, the language under Triton, because Triton's own compiler makes all warps
of a program wait for each other in every step. Triton's interpreter does not run it.
"""

# Gluon's annotations are those of its compiler, not of what a kernel passes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import dataclasses
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dora_common.triton import strips
from dora_common.triton.jit import cdiv

# The rows and columns of a tile in shared memory: 128 bytes, the most that TMA swizzles.
TILE = 64
GROUPS = 2
# A slice of 64 ranks takes 16 registers of a thread.
MOST_SLICES = 6
# A tile of a tensor descriptor starts at a multiple of 16 bytes: so do rows of 8 elements.
ALIGNMENT = 8
# Of global memory, for a tensor descriptor of a program.
DESCRIPTOR_BYTES = 128
# Of 8 KiB, in a Hopper's shared memory.
_MOST_TILES, _MOST_STAGES = 28, 8
# Registers of a thread that multiplies, and of one that fetches.
CONSUMER_REGISTERS, FETCH_REGISTERS = gl.constexpr(240), gl.constexpr(24)
# Of tiles in shared memory.
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@dataclasses.dataclass(frozen=True)
class Config(strips.Config):
    """As for strips in shared memory: a program has a multiprocessor for itself.

    Attributes:
        slots: the tiles of base and y on their way for each group, of expand and compose.
    """

    features: int = GROUPS * TILE
    width: int = TILE
    depth: int = TILE
    warps: int = 4  # of each group
    resident: int = 1
    slots: int = 3


def stages(tiles_of_a_stage: int, others: int = 0) -> int:
    """Returns how many stages of so many tiles there is room for beside ``others``."""
    return min(_MOST_STAGES, (_MOST_TILES - others) // tiles_of_a_stage)


def fits(rank: int, *rows: int, pieces: int = 1) -> bool:
    """Returns whether registers hold a strip of this rank, rows of these sizes have tiles, and
    Triton's Gluon has descriptors, as since 3.6."""
    return (
        hasattr(tma, "make_tensor_descriptor")
        and pieces * cdiv(rank, TILE) <= MOST_SLICES
        and not any(row % ALIGNMENT for row in rows)
    )


def jit(function: Any) -> Any:
    """Returns a function of Gluon, with a type as that of `dora_common.triton.jit.jit`."""
    return gluon.jit(function)


@jit
def turn(number, SIZE: gl.constexpr):
    """Returns the place of a tile in a ring, and the phase of its barrier."""
    return number % SIZE, (number // SIZE) & 1


@jit
def number(value):
    """Returns a number that is passed by value, as a torch launch does, or by its address, as XLA
    does."""
    if value.dtype.is_ptr():
        return gl.load(value)
    else:
        return value


@jit
def transposed(tile, IS_TRANSPOSED: gl.constexpr):
    """Returns the transposed tile, or the tile."""
    if IS_TRANSPOSED:
        return tile.permute((1, 0))
    else:
        return tile


@jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns barriers in shared memory."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@jit
def wait_for_turn(turns, step, GROUP: gl.constexpr):
    """Waits until the other group has started its products of the tile before: the first group's
    of the step before, or the second group's of this step."""
    mbarrier.wait(turns.index(GROUP), (step + 1 - GROUP) & 1)


@jit
def tiles(pointer, rows, columns, HEIGHT: gl.constexpr = 64):
    """Describes the tiles [HEIGHT, 64] of an array [rows, columns]."""
    return tma.make_tensor_descriptor(pointer, [rows, columns], [columns, 1], [HEIGHT, 64], LAYOUT)
