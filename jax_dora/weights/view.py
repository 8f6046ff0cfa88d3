"""How an array that a program computes from a weight lies in that weight: whole axes, or parts of
them, in another order."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self


class Piece(NamedTuple):
    """A part of an axis of the weight: its indices are stride·(0 … size-1). It is longer than 1."""

    axis: int
    stride: int
    size: int


class View(NamedTuple):
    """The axes of an array, each made of pieces of the weight's axes, outermost first.

    An axis of size 1 has no pieces, so that what is squeezed or inserted needs no account.

    Attributes:
      axes: for each axis of the array its pieces.
    """

    axes: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Self:
        """Returns the weight itself."""
        return cls(
            tuple((Piece(axis, 1, n),) if n != 1 else () for axis, n in enumerate(shape)),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(math.prod(piece.size for piece in axis) for axis in self.axes)

    def whole(self, axis: int) -> int | None:
        """Returns the axis of the weight that axis `axis` of the array is the whole of, or None."""
        pieces = self.axes[axis]
        if len(pieces) != 1 or pieces[0].stride != 1:
            return None
        alone = sum(piece.axis == pieces[0].axis for one in self.axes for piece in one) == 1
        return pieces[0].axis if alone else None

    def transpose(self, order: Sequence[int]) -> "View":
        """Returns the array transposed."""
        return View(tuple(self.axes[axis] for axis in order))

    def reshape(self, shape: Sequence[int]) -> "View | None":
        """Returns the array in row-major order in another shape, or None where an axis of it
        would hold a part of an axis that does not divide it."""
        waiting = [piece for axis in self.axes for piece in axis]
        axes = []
        for size in shape:
            pieces, left = [], size
            while left > 1:
                if not waiting:
                    return None
                piece = waiting.pop(0)
                if left % piece.size == 0:
                    pieces.append(piece)
                    left //= piece.size
                elif piece.size % left == 0:
                    inner = piece.size // left
                    pieces.append(Piece(piece.axis, piece.stride * inner, left))
                    waiting.insert(0, Piece(piece.axis, piece.stride, inner))
                    left = 1
                else:
                    return None
            axes.append(tuple(_joined(pieces)))
        return None if waiting else View(tuple(axes))

    def resized(self, axis: int, size: int) -> "View":
        """Returns the array whose axis `axis`, a whole axis of the weight, has another size."""
        pieces = (self.axes[axis][0]._replace(size=size),) if size > 1 else ()
        return View((*self.axes[:axis], pieces, *self.axes[axis + 1 :]))

    def without(self, axis: int) -> "View":
        """Returns the array at an index of its axis `axis`, or without it where its size is 1."""
        return View((*self.axes[:axis], *self.axes[axis + 1 :]))

    def pieces(self, axes: Sequence[int]) -> list[Piece]:
        """Returns the pieces of these axes of the array, in their order."""
        return [piece for axis in axes for piece in self.axes[axis]]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Joins neighbours that are neighbours in the weight's axis too."""
    joined: list[Piece] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before and before.axis == piece.axis and before.stride == piece.stride * piece.size:
            joined[-1] = Piece(piece.axis, piece.stride, before.size * piece.size)
        else:
            joined.append(piece)
    return joined
