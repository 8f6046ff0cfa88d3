"""How to view a layer's parameters as matrices: kernel [n, in, out], lora_a [n, in, r], lora_b [n,
r, out].

n is 1 for most layers. A grouped convolution has n groups, and a projection with batch axes has n
batch indices; each has its own matrix and its own adapter. A norm is taken per column, over `in`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jax_dora.ops import quantised


class Axes(NamedTuple):
    """The axes of one parameter.

    Attributes:
      stored: the parameter's shape.
      split: the same shape with a grouped axis split in two, (groups, size / groups).
      batch, rows, columns: the axes of `split` that form n, the rows and the columns of the
        matrices.
    """

    stored: tuple[int, ...]
    split: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape [n, rows, columns]."""

        def size(axes: tuple[int, ...]) -> int:
            return math.prod(self.split[axis] for axis in axes)

        return size(self.batch), size(self.rows), size(self.columns)

    def to_matrices(self, array: jax.Array) -> jax.Array:
        """Reshapes an array of shape `stored`, quantised or not, to [n, rows, columns]."""
        if quantised.is_quantised(array):
            groups = (self.batch, self.rows, self.columns)
            return quantised.with_own_scales(quantised.as_matrices(array, self.split, groups))
        order = (*self.batch, *self.rows, *self.columns)
        return array.reshape(self.split).transpose(order).reshape(self.matrices)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """Reverses `to_matrices`."""
        order = (*self.batch, *self.rows, *self.columns)
        split = matrices.reshape(tuple(self.split[axis] for axis in order))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return split.transpose(inverse).reshape(self.stored)


class Layout(NamedTuple):
    """The axes of one layer's parameters. As matrices, magnitude is [n, 1, out]."""

    kernel: Axes
    lora_a: Axes
    lora_b: Axes
    magnitude: Axes

    @property
    def is_one_matrix(self) -> bool:
        """Whether the parameters are stored as plain matrices: kernel [in, out], lora_a [in, r],
        lora_b [r, out]."""
        return self.kernel[1:] == (self.kernel.stored, (), (0,), (1,))

    def adapter_axes(self, axes: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """Returns one entry for each axis of lora_a, lora_b and magnitude: the entry of the
        corresponding kernel axis in `axes`, and None for the rank axis."""
        groups = self.kernel[2:]
        if self.kernel.split != self.kernel.stored:
            # A convolution stores its groups in the kernel's last axis.
            *window, features = range(len(axes))
            groups = (), window, (features,)
        batch, rows, columns = (tuple(axes[axis] for axis in group) for group in groups)
        return {
            "lora_a": (*batch, *rows, None),
            "lora_b": (*batch, None, *columns),
            "magnitude": (*batch, *columns),
        }


def projection_layout(shape: tuple[int, ...], order: str, rank: int) -> Layout:
    """Returns the layout of a projection's kernel, which may have several batch, input and output
    axes.

    lora_a is [*batch, *in, rank], lora_b [*batch, rank, *out] and magnitude [*batch, *out].

    Args:
      shape: the kernel's shape.
      order: the role of each kernel axis: "b" (batch), "i" (input) or "o" (output).
    """
    by_role = [tuple(axis for axis, role in enumerate(order) if role == wanted) for wanted in "bio"]
    batch, in_, out = (tuple(shape[axis] for axis in axes) for axes in by_role)
    n = len(batch)

    def after_batch(rows: tuple[int, ...], columns: tuple[int, ...]) -> Axes:
        stored = (*batch, *rows, *columns)
        axes, split = tuple(range(len(stored))), n + len(rows)
        return Axes(stored, stored, axes[:n], axes[n:split], axes[split:])

    return Layout(
        kernel=Axes(shape, shape, *by_role),
        lora_a=after_batch(in_, (rank,)),
        lora_b=after_batch((rank,), out),
        magnitude=after_batch((), out),
    )


def convolution_layout(kernel_shape: tuple[int, ...], groups: int, rank: int) -> Layout:
    """Returns the layout of a convolution's kernel [*window, in / groups, out].

    Each group has rank / groups of the rank: lora_a is [*window, in / groups, rank], lora_b [rank /
    groups, out] and magnitude [out].
    """
    *rows, out = kernel_shape
    n = len(rows)
    rows, row_axes, group, column = tuple(rows), tuple(range(n)), (n,), (n + 1,)
    inner, outer = rank // groups, out // groups
    return Layout(
        kernel=Axes((*rows, out), (*rows, groups, outer), group, row_axes, column),
        lora_a=Axes((*rows, rank), (*rows, groups, inner), group, row_axes, column),
        lora_b=Axes((inner, out), (inner, groups, outer), (1,), (0,), (2,)),
        magnitude=Axes((out,), (groups, outer), (0,), (), (1,)),
    )
