"""A weight, what it is multiplied by and the result as matrices, whichever axes they have."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.dropout import Dropout
from jax_dora.weights.operations import Product
from jax_dora.weights.view import Piece
from jax_dora.weights.weight import Weight

# Odd, so that the masks of products that share a seed differ.
NEXT_SEED = 0x9E3779B9


class Plan:
    """How x, the weight and the result of one product are matrices."""

    def __init__(self, weight: Weight, product: Product, x: jax.Array, *, is_transposed: bool):
        view, self.is_transposed = weight.view, is_transposed
        self.weight = weight
        axes = range(len(view.axes))
        free = [a for a in axes if a not in product.contracted and a not in product.batch]
        rows = [
            a for a in range(x.ndim) if a not in product.x_contracted and a not in product.x_batch
        ]
        contracted = view.pieces(product.contracted)
        batch = view.pieces(product.batch)
        roles = weight.roles
        assert roles is not None
        summed = [piece for piece in _sorted(contracted) if roles[piece.axis] == "b"]
        both = _sorted([*summed, *batch])
        self.lone = _sorted([piece for piece in view.pieces(free) if roles[piece.axis] == "b"])
        self.inner = [piece for piece in _sorted(contracted) if roles[piece.axis] != "b"]
        outer = [piece for piece in _sorted(view.pieces(free)) if roles[piece.axis] != "b"]
        self.both = both
        # x: its axes apart, then as matrices.
        apart: list[Any] = [("row", axis) for axis in range(x.ndim)]
        for mine, its in zip(
            (*product.x_contracted, *product.x_batch),
            (*product.contracted, *product.batch),
            strict=True,
        ):
            apart[mine] = view.axes[its]
        labels: list[Any] = []
        sizes: dict[Any, int] = {}
        for axis, label in enumerate(apart):
            if isinstance(label, tuple) and label[:1] == ("row",):
                labels.append(label)
                sizes[label] = x.shape[axis]
            else:
                labels += label
                sizes |= {piece: piece.size for piece in label}
        row_labels = [("row", axis) for axis in rows]
        self.x_split = tuple(sizes[label] for label in labels)
        self.x_order = tuple(labels.index(one) for one in (*both, *row_labels, *self.inner))
        count = math.prod(piece.size for piece in both)
        self.x_shape = (count, *(sizes[row] for row in row_labels), _size(self.inner))
        # y: [both, lone, *rows, outer] to what the product gives.
        of_y = [*both, *self.lone, *row_labels, *outer]
        sizes |= {piece: piece.size for piece in (*self.lone, *outer)}
        self.y_split = tuple(sizes[label] for label in of_y)
        self.y_sum = tuple(place for place, label in enumerate(of_y) if label in summed)
        left = [label for label in of_y if label not in summed]
        of_rows = [[row] for row in row_labels]
        of_free = [list(view.axes[axis]) for axis in free]
        parts = [*(list(view.axes[axis]) for axis in product.batch)]
        parts += [*of_free, *of_rows] if product.weight_first else [*of_rows, *of_free]
        self.y_order = tuple(left.index(label) for part in parts for label in part)
        self.y_shape = tuple(math.prod(sizes[label] for label in part) for part in parts)

    def __call__(
        self,
        x: jax.Array,
        arrays: dict[str, jax.Array],
        multiply: Callable[..., jax.Array],
        dropout: Dropout | None,
    ) -> jax.Array:
        weight = self.weight
        x = x.reshape(self.x_split).transpose(self.x_order).reshape(self.x_shape)
        b = tuple(dict.fromkeys(piece.axis for piece in self.both))
        others = tuple(axis for axis in weight.axes("b") if axis not in b)
        parts = matrices(weight, arrays, b, others, weight.axes("i"), weight.axes("o"))
        lone = parts["kernel"].shape[1]
        seeds = None
        if dropout is not None:
            index = jnp.arange(x.shape[0] * lone, dtype=jnp.uint32).reshape(x.shape[0], lone, 1)
            seeds = dropout.seed[None, None] + index * jnp.uint32(NEXT_SEED)
        if lone == 1 and x.shape[0] == 1:
            one = {name: array[0, 0] for name, array in parts.items()}
            y = multiply(x[0], one, None if seeds is None else seeds[0, 0])[None, None]
        else:
            y = jax.vmap(jax.vmap(multiply, in_axes=(None, 0, 0)))(x, parts, seeds)
        y = y.reshape(self.y_split)
        if self.y_sum:
            y = y.sum(self.y_sum)
        return y.transpose(self.y_order).reshape(self.y_shape)


def made_plan(weight: Weight, product: Product, x: jax.Array) -> Plan | None:
    """Returns how to compute the product with matrices; None where its contracted axes are neither
    all of the weight's contracted ones nor all of its features."""
    view = weight.view
    contracted = {piece.axis for piece in view.pieces(product.contracted)}
    batch = {piece.axis for piece in view.pieces(product.batch)}
    free = {
        piece.axis
        for axis in range(len(view.axes))
        if axis not in (*product.contracted, *product.batch)
        for piece in view.axes[axis]
    }
    b, i, o = (long_axes(weight, weight.axes(role)) for role in "bio")
    if contracted & free or contracted & batch or batch & free or batch - b:
        return None
    if contracted - b == i and free - b == o:
        return Plan(weight, product, x, is_transposed=False)
    if contracted - b == o and free - b == i:
        return Plan(weight, product, x, is_transposed=True)
    return None


def matrices(
    weight: Weight,
    arrays: Any,
    b: Sequence[int],
    others: Sequence[int],
    i: Sequence[int],
    o: Sequence[int],
) -> dict[str, jax.Array]:
    """Returns kernel [b, others, in, out], lora_a [b, others, in, r], lora_b [b, others, r, out],
    g [b, others, out]."""
    sizes = weight.kernel.shape

    def size(axes: Sequence[int]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    lead = (size(b), size(others))
    kernel = arrays["kernel"].transpose((*b, *others, *i, *o))
    rank = arrays["lora_a"].shape[-1]
    batch = weight.axes("b")
    order = tuple(batch.index(axis) for axis in (*b, *others))

    def ordered(array: jax.Array) -> jax.Array:
        return array.transpose((*order, *range(len(order), array.ndim)))

    return {
        "kernel": kernel.reshape(*lead, size(i), size(o)),
        "lora_a": ordered(arrays["lora_a"]).reshape(*lead, size(i), rank),
        "lora_b": ordered(arrays["lora_b"]).reshape(*lead, rank, size(o)),
        "g": ordered(arrays["g"]).reshape(*lead, size(o)),
    }


def _sorted(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (piece.axis, -piece.stride))


def _size(pieces: Sequence[Piece]) -> int:
    return math.prod(piece.size for piece in pieces)


def long_axes(weight: Weight, axes: Sequence[int]) -> set[int]:
    return {axis for axis in axes if weight.kernel.shape[axis] != 1}


def whole_pieces(weight: Weight, axes: Sequence[int]) -> list[Piece]:
    """Returns the pieces of these axes of the weight, whole and in its order."""
    sizes = weight.kernel.shape
    return [Piece(axis, 1, sizes[axis]) for axis in axes if sizes[axis] != 1]
