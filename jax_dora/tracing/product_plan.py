"""Computes a product of any axes of a weight as products of matrices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from jax_dora.layers.seeds import split_dropout
from jax_dora.ops.dropout import Dropout
from jax_dora.tracing.operations import Product
from jax_dora.tracing.weight import Weight


class ProductPlan:
    """How to reshape x, the weight and the result of one product to matrices and back.

    The plan identifies each axis by a label. The parts of the weight's axes have their numbers as
    labels; the row axes of x have -1, -2, ….

    Attributes:
      is_transposed: whether the product contracts the weight's features instead of its input axes.
      both: the batch parts that x has too.
      x_split, x_order, x_shape: reshape x to x_split, transpose it by x_order, and reshape it to
        x_shape, which is [both, *rows, features].
      y_split: the result's shape with all parts separate: (*both, *lone, *rows, *outer), where lone
        are the batch parts that x does not have.
      y_sum: the axes of the result to sum over.
      y_order, y_shape: finally transpose the result by y_order and reshape it to y_shape.
    """

    def __init__(
        self,
        weight: Weight,
        product: Product,
        x: jax.Array,
        free: list[int],
        *,
        is_transposed: bool,
    ) -> None:
        """Plans `product` of `weight` and `x`.

        Args:
          free: the axes of the weight's array that are neither contracted nor batch axes.
        """
        self.weight, self.is_transposed = weight, is_transposed
        batch = weight.parts("b")
        contracted, kept = (
            sorted(weight.parts_of_axes(product.contracted)),
            sorted(weight.parts_of_axes(free)),
        )
        summed = [part for part in contracted if part in batch]
        inner = [part for part in contracted if part not in batch]
        lone = [part for part in kept if part in batch]
        outer = [part for part in kept if part not in batch]
        self.both = sorted([*summed, *weight.parts_of_axes(product.batch)])
        x_axes = (*product.x_contracted, *product.x_batch)
        weight_axes = dict(zip(x_axes, (*product.contracted, *product.batch), strict=True))
        rows = [~axis for axis in range(x.ndim) if axis not in weight_axes]
        sizes = dict(enumerate(weight.sizes)) | {row: x.shape[~row] for row in rows}

        def lengths(labels: Iterable[int]) -> tuple[int, ...]:
            return tuple(sizes[label] for label in labels)

        x_labels: list[int] = []
        for axis in range(x.ndim):
            is_row = axis not in weight_axes
            x_labels += [~axis] if is_row else weight.parts_of_axes([weight_axes[axis]])
        self.x_split = lengths(x_labels)
        self.x_order = tuple(x_labels.index(label) for label in (*self.both, *rows, *inner))
        self.x_shape = (math.prod(lengths(self.both)), *lengths(rows), math.prod(lengths(inner)))
        y_labels = [*self.both, *lone, *rows, *outer]
        self.y_split = lengths(y_labels)
        self.y_sum = tuple(axis for axis, label in enumerate(y_labels) if label in summed)
        remaining = [label for label in y_labels if label not in summed]
        row_axes = [[row] for row in rows]
        feature_axes = [weight.parts_of_axes([axis]) for axis in free]
        y_axes = [weight.parts_of_axes([axis]) for axis in product.batch]
        y_axes += [*feature_axes, *row_axes] if product.weight_first else [*row_axes, *feature_axes]
        self.y_order = tuple(remaining.index(label) for labels in y_axes for label in labels)
        self.y_shape = tuple(math.prod(lengths(labels)) for labels in y_axes)

    def __call__(
        self,
        x: jax.Array,
        arrays: dict[str, jax.Array],
        multiply: Callable[..., jax.Array],
        dropout: Dropout | None,
    ) -> jax.Array:
        """Returns the product; `multiply(x, arrays, dropout)` computes each product of matrices."""
        weight = self.weight
        x = x.reshape(self.x_split).transpose(self.x_order).reshape(self.x_shape)
        others = [part for part in weight.parts("b") if part not in self.both]
        parts = as_matrices(weight, arrays, self.both, others)
        lone = parts["kernel"].shape[1]
        dropouts = split_dropout(dropout, x.shape[0], lone)
        if lone == 1 and x.shape[0] == 1:
            single, dropout = jax.tree.map(lambda array: array[0, 0], (parts, dropouts))
            y = multiply(x[0], single, dropout)[None, None]
        else:
            y = jax.vmap(jax.vmap(multiply, in_axes=(None, 0, 0)))(x, parts, dropouts)
        y = y.reshape(self.y_split)
        if self.y_sum:
            y = y.sum(self.y_sum)
        return y.transpose(self.y_order).reshape(self.y_shape)


def plan_product(weight: Weight, product: Product, x: jax.Array) -> ProductPlan | None:
    """Returns the plan of a product; None if the product contracts neither exactly the weight's
    input axes nor exactly its features."""
    axes = range(len(weight.view))
    free = [axis for axis in axes if axis not in (*product.contracted, *product.batch)]
    b, i, o = (set(weight.nontrivial_parts(role)) for role in "bio")
    roles = set(weight.parts_of_axes(product.contracted)) - b, set(weight.parts_of_axes(free)) - b
    if not b.issuperset(weight.parts_of_axes(product.batch)) or roles not in ((i, o), (o, i)):
        return None
    return ProductPlan(weight, product, x, free, is_transposed=roles != (i, o))


def as_matrices(
    weight: Weight,
    arrays: Mapping[str, jax.Array],
    b: Sequence[int] = (),
    others: Sequence[int] = (),
) -> dict[str, jax.Array]:
    """Returns kernel [b, others, in, out], lora_a [b, others, in, r], lora_b [b, others, r, out]
    and g [b, others, out].

    Args:
      b, others: the batch parts, divided into two groups, in any order.
    """
    i, o, batch = (weight.parts(role) for role in "iob")

    def size(parts: Sequence[int]) -> int:
        return math.prod(weight.sizes[part] for part in parts)

    lead, rank = (size(b), size(others)), arrays["lora_a"].shape[-1]
    order = tuple(batch.index(part) for part in (*b, *others))

    def ordered(name: str, *shape: int) -> jax.Array:
        array = arrays[name].reshape(*(weight.sizes[part] for part in batch), *shape)
        array = array.transpose((*order, *range(len(order), array.ndim)))
        return array.reshape(*lead, *shape)

    kernel = arrays["kernel"].reshape(weight.sizes).transpose((*b, *others, *i, *o))
    return {
        "kernel": kernel.reshape(*lead, size(i), size(o)),
        "lora_a": ordered("lora_a", size(i), rank),
        "lora_b": ordered("lora_b", rank, size(o)),
        "g": ordered("g", size(o)),
    }
