"""The product of an input and a weight over any axes, as products of matrices.

Each axis of the weight has one of three roles:

- "b", batch axis: each index has its own matrix and its own adapter.
- "i", input axis: the product contracts it, and norms are taken over it.
- "o", output axis: only the result has it too.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_dora.layers.seeds import split_dropout
from jax_dora.ops import quantised
from jax_dora.ops.dropout import Dropout

_RANK = "rank"  # the label of the rank axis


class MatrixAxes(NamedTuple):
    """The axes of one array of a weight or its adapter, viewed as matrices [n, rows, columns]: the
    array's shape as `stored`, the same shape with joined axes `split`, and those axes of `split`
    that form n (`batch`), the rows and the columns."""

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


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A product x, weight -> y over labelled axes, like an einsum.

    A label is a letter, or any other value. If x or y joins several axes to one, then its entry is
    the sequence of their labels, outermost first.

    Attributes:
      weight: the label of each axis of the weight.
      roles: the role of each axis of the weight, as one string.
      sizes: the size of each axis of the weight; () if only x and y are rearranged.
      rank: the adapter's rank.
      x, y: for each axis of the input and of the result its label, or the sequence of its labels;
        () if they are unknown. Axes of size 1 may be missing.
      is_grouped: whether the weight is a grouped convolution's, whose batch axis, the groups, is
        stored in the last axis, joined with the output axis. They share the rank equally.
    """

    weight: Sequence[Any]
    roles: str
    sizes: tuple[int, ...] = ()
    rank: int = 1
    x: Sequence[Any] = ()
    y: Sequence[Any] = ()
    is_grouped: bool = False

    @classmethod
    def of_weight(cls, shape: tuple[int, ...], roles: str, rank: int) -> "Contraction":
        """Returns the contraction of a weight with these roles, by any x."""
        return cls(tuple(range(len(shape))), roles, shape, rank)

    @classmethod
    def of_convolution(cls, shape: tuple[int, ...], groups: int, rank: int) -> "Contraction":
        """Returns the contraction of a convolution's kernel [*window, in / groups, out]."""
        *inputs, out = shape
        roles = "i" * len(inputs) + "bo"
        sizes = (*inputs, groups, out // groups)
        return cls(tuple(range(len(sizes))), roles, sizes, rank, is_grouped=True)

    @classmethod
    def of_letters(cls, x: str, weight: str, y: str) -> "Contraction":
        """Returns the contraction in which the axes of x, weight and y have these letters."""
        roles = (("b" if label in x else "o") if label in y else "i" for label in weight)
        return cls(weight, "".join(roles), x=x, y=y)

    @classmethod
    def of_einsum(cls, equation: str, ndim: int = 0) -> "Contraction":
        """Returns the contraction of an einsum with an x of `ndim` axes; 0 is the smallest possible
        number."""
        x, weight, y = einsum_letters(equation)
        free = (letter for letter in string.ascii_letters if letter not in x + weight + y)
        count = max(0, ndim - len(x.replace("...", "")))
        ellipsis = "".join(next(free) for _ in range(count))
        return cls.of_letters(x.replace("...", ellipsis), weight, y.replace("...", ellipsis))

    @classmethod
    def of_dot_general(
        cls, dimension_numbers: Any, ndim: int, weight_ndim: int, *, weight_first: bool = False
    ) -> "Contraction":
        """Returns the contraction of `lax.dot_general(x, weight, dimension_numbers)`, or with the
        weight as the left operand. Its labels are the numbers of the weight's axes, and -1, -2, …
        for other axes of x."""
        contracted, batch = (tuple(map(_labels_of, pair)) for pair in dimension_numbers)
        if weight_first:
            contracted, batch = contracted[::-1], batch[::-1]
        shared = dict(zip((*contracted[0], *batch[0]), (*contracted[1], *batch[1]), strict=True))
        x = tuple(shared.get(axis, ~axis) for axis in range(ndim))
        rows, axes = [label for label in x if label < 0], tuple(range(weight_ndim))
        known = dict.fromkeys(contracted[1], "i") | dict.fromkeys(batch[1], "b")
        outer = [axis for axis in axes if axis not in known]
        y = (*batch[1], *(outer + rows if weight_first else rows + outer))
        return cls(axes, "".join(known.get(axis, "o") for axis in axes), x=x, y=y)

    def with_sizes(self, shape: Sequence[int], rank: int = 1) -> "Contraction":
        """Returns this contraction for a weight of this shape and an adapter of this rank."""
        return dataclasses.replace(self, sizes=tuple(shape), rank=rank)

    def labels(self, role: str) -> tuple[Any, ...]:
        """Returns the labels of the weight's axes with this role, in the weight's order."""
        return tuple(
            label for label, own in zip(self.weight, self.roles, strict=True) if own == role
        )

    @property
    def is_one_matrix(self) -> bool:
        """Whether the parameters are stored as plain matrices: kernel [in, out], lora_a [in, r],
        lora_b [r, out]."""
        return self.roles == "io"

    @functools.cached_property
    def kernel(self) -> MatrixAxes:
        """The kernel's axes; its matrices are [n, in, out]."""
        return self._axes("kernel", self.labels("i"), self.labels("o"))

    @functools.cached_property
    def lora_a(self) -> MatrixAxes:
        """The axes of lora_a [*batch, *in, rank], or [*in, rank] of a grouped convolution; its
        matrices are [n, in, r]."""
        return self._axes("lora_a", self.labels("i"), (_RANK,))

    @functools.cached_property
    def lora_b(self) -> MatrixAxes:
        """The axes of lora_b [*batch, rank, *out], or [rank / groups, out] of a grouped
        convolution; its matrices are [n, r, out]."""
        return self._axes("lora_b", (_RANK,), self.labels("o"))

    @functools.cached_property
    def magnitude(self) -> MatrixAxes:
        """The axes of magnitude, norm and g [*batch, *out], or grouped [out], as [n, 1, out]."""
        return self._axes("magnitude", (), self.labels("o"))

    def matrices(self, **arrays: Any) -> dict[str, Any]:
        """Returns arrays as matrices: kernel, lora_a and lora_b, and g as [n, out]."""
        return {
            name: self.magnitude.to_matrices(array).reshape(self.magnitude.matrices[::2])
            if name == "g"
            else getattr(self, name).to_matrices(array)
            for name, array in arrays.items()
        }

    def adapter_axes(self, axes: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """Returns one entry for each axis of lora_a, lora_b and magnitude: the entry of the
        corresponding kernel axis in `axes`, and None for the rank axis."""
        joined = self.labels("b") if self.is_grouped else ()
        stored = {
            name: [label for label in labels if label not in joined]
            for name, labels in self._stored_labels.items()
        }
        entries = dict(zip(stored.pop("kernel"), axes, strict=True))
        return {name: tuple(map(entries.get, labels)) for name, labels in stored.items()}

    @property
    def _stored_labels(self) -> dict[str, Sequence[Any]]:
        """The labels of each array's axes as stored; those of groups join the last two."""
        b, i, o = map(self.labels, "bio")
        if self.is_grouped:
            a, b_and_o = (*i, *b, _RANK), (_RANK, *b, *o)
        else:
            a, b_and_o = (*b, *i, _RANK), (*b, _RANK, *o)
        return {"kernel": self.weight, "lora_a": a, "lora_b": b_and_o, "magnitude": (*b, *o)}

    def _axes(self, name: str, rows: Sequence[Any], columns: Sequence[Any]) -> MatrixAxes:
        labels, sizes = self._stored_labels[name], self._sizes
        split = tuple(sizes[label] for label in labels)
        stored = (*split[:-2], math.prod(split[-2:])) if self.is_grouped else split
        groups = (tuple(map(labels.index, group)) for group in (self._batch, rows, columns))
        return MatrixAxes(stored, split, *groups)

    @functools.cached_property
    def _sizes(self) -> dict[Any, int]:
        sizes = dict(zip(self.weight, self.sizes, strict=True))
        groups = math.prod(sizes[label] for label in self.labels("b")) if self.is_grouped else 1
        return sizes | {_RANK: self.rank // groups}

    def _shape(self, labels: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self._sizes[label] for label in labels)

    @functools.cached_property
    def _x_labels(self) -> list[Any]:
        return [label for labels in map(_labels_of, self.x) for label in labels]

    @functools.cached_property
    def _y_labels(self) -> list[Any]:
        return [label for labels in map(_labels_of, self.y) for label in labels]

    @property
    def rows(self) -> list[Any]:
        """The labels of those axes of x that the weight does not have."""
        return [label for label in self._x_labels if label not in self.weight]

    @property
    def _shared(self) -> list[Any]:
        """The labels of the batch axes that x has too."""
        return [label for label in self.labels("b") if label in self._x_labels]

    @property
    def _batch(self) -> list[Any]:
        """The labels of the batch axes, those that x has too first."""
        return sorted(self.labels("b"), key=lambda label: label not in self._x_labels)

    @property
    def _result_labels(self) -> list[Any]:
        """The labels of [*batch, *rows, *out] as far as x or y has them."""
        x, y, batch = self._x_labels, self._y_labels, self._batch
        outer = [label for label in self.weight if label in y and label not in (*x, *batch)]
        return [*(label for label in batch if label in x or label in y), *self.rows, *outer]

    def arrange_input(self, x: jax.Array) -> jax.Array:
        """Returns x with its axes in the order [*batch, *rows, *in], joined axes split."""
        batch, labels = self.labels("b"), self._x_labels
        inner = [label for label in self.weight if label in labels and label not in batch]
        order = [labels.index(label) for label in (*self._shared, *self.rows, *inner)]
        return self._split(self.x, x).transpose(order)

    def arrange_result(self, y: jax.Array) -> jax.Array:
        """Returns a result with its axes in the order [*batch, *rows, *out], joined axes split."""
        order = [self._y_labels.index(label) for label in self._result_labels]
        return self._split(self.y, y).transpose(order)

    def result(self, arranged: jax.Array) -> jax.Array:
        """Returns y of [*batch, *rows, *out], summed over the batch axes that only x has."""
        labels, y = self._result_labels, self._y_labels
        sizes = dict(zip(labels, arranged.shape, strict=True))
        if summed := [number for number, label in enumerate(labels) if label not in y]:
            arranged = arranged.sum(summed)
        kept = [label for label in labels if label in y]
        shape = [math.prod(sizes[label] for label in _labels_of(axis)) for axis in self.y]
        return arranged.transpose([kept.index(label) for label in y]).reshape(shape)

    def _split(self, axes: Sequence[Any], array: jax.Array) -> jax.Array:
        shape: list[int] = []
        for axis, size in zip(axes, array.shape, strict=True):
            labels = _labels_of(axis)
            shape += [size] if len(labels) == 1 else self._shape(labels)
        return array.reshape(shape)

    def bias_matrices(self, bias: jax.Array) -> jax.Array:
        """Returns a bias, which has those axes of y that the weight has too, as [n, out]."""
        labels = [label for label in self._y_labels if label in self.weight]
        order = (*self._batch, *self.labels("o"))
        bias = bias.reshape(self._shape(labels)).transpose([labels.index(label) for label in order])
        return bias.reshape(self.magnitude.matrices[::2])

    def __call__(
        self,
        multiply: Callable[..., jax.Array],
        x: jax.Array,
        arrays: Mapping[str, Any],
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Returns the result for an input x as products of matrices: `multiply(x, arrays, dropout)`
        of an x [*rows, in] and the arrays of one matrix is [*rows, out]. `arrays` have a leading
        axis n, as from `matrices`. With dropout each matrix has its own mask."""
        x, count, rows = self.arrange_input(x), len(self._shared), len(self.rows)
        lead = x.shape[count : count + rows]
        x = x.reshape(math.prod(x.shape[:count]), *lead, math.prod(x.shape[count + rows :]))
        n = math.prod(self._shape(self._batch))
        parts = arrays, split_dropout(dropout, n)
        if n == 1:
            y = multiply(x[0], *jax.tree.map(lambda array: array[0], parts))[None]
        elif n == x.shape[0]:
            y = jax.vmap(multiply)(x, *parts)
        else:
            parts = jax.tree.map(
                lambda array: array.reshape(x.shape[0], n // x.shape[0], *array.shape[1:]), parts
            )
            y = jax.vmap(jax.vmap(multiply, in_axes=(None, 0, 0)))(x, *parts)
        sizes = dict(zip(self.rows, lead, strict=True)) | self._sizes
        return self.result(y.reshape([sizes[label] for label in self._result_labels]))


def _labels_of(axis: Any) -> Sequence[Any]:
    return axis if isinstance(axis, tuple | list) else (axis,)


def einsum_letters(equation: str) -> tuple[str, str, str]:
    """Returns the letters of x, weight and y in an einsum, with ellipses."""
    operands, _, y = equation.replace(" ", "").partition("->")
    x, _, weight = operands.partition(",")
    return x, weight, y


def why_no_projection(equation: str | None) -> str | None:
    """Returns why an einsum with a kernel is not a projection, or None if it is one."""
    if not equation:
        return (
            "einsum_str is None; expected an equation: a layer that gets its equation with each "
            "call has no fixed output features. Pass it to the constructor of nnx.Einsum"
        )
    x, kernel, y = letters = einsum_letters(equation)
    ellipses = ["..." in own for own in letters]
    x, y = x.replace("...", ""), y.replace("...", "")
    reason = None
    if ellipses[1]:
        reason = "the kernel has an ellipsis"
    elif ellipses[0] != ellipses[2]:
        reason = "the ellipsis is not in both the input and the result"
    elif any(len(set(letters)) < len(letters) for letters in (x, kernel, y)):
        reason = "a letter occurs twice in one operand"
    elif unknown := set(y) - set(x + kernel):
        reason = f"{sorted(unknown)} occurs in the result alone"
    elif lone := (set(x) ^ set(kernel)) - set(y):
        reason = f"{sorted(lone)} occurs in one operand alone and is summed away"
    elif not set(kernel) - set(x):
        reason = "the kernel has no output axis"
    elif not (set(x) & set(kernel)) - set(y):
        reason = "no axis is contracted"
    return reason and (
        f"einsum_str is {equation!r}, in which {reason}; expected a projection such as "
        "'...d,dnh->...nh'"
    )
