"""A weight, what it is multiplied by and the result as matrices, whichever axes they have."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax

from jax_dora.layers.call import dropout_of_each
from jax_dora.ops.dropout import Dropout
from jax_dora.weights.operations import Product
from jax_dora.weights.weight import Weight


class Plan:
    """Lays out x, the weight and the result of one product as matrices."""

    def __init__(
        self,
        weight: Weight,
        product: Product,
        x: jax.Array,
        free: list[int],
        *,
        is_transposed: bool,
    ) -> None:
        """
        Args:
          free: the axes of the weight's array that are not contracted and no batch axes.
        """
        self.weight, self.is_transposed = weight, is_transposed
        view, batch = weight.view, weight.parts("b")
        contracted, of_free = sorted(weight.viewed(product.contracted)), sorted(weight.viewed(free))
        summed = [axis for axis in contracted if axis in batch]
        inner = [axis for axis in contracted if axis not in batch]
        self.both = sorted([*summed, *weight.viewed(product.batch)])
        lone = [axis for axis in of_free if axis in batch]
        outer = [axis for axis in of_free if axis not in batch]
        # Parts by their numbers, and x's axes that are rows by -1, -2, ….
        mine = (*product.x_contracted, *product.x_batch)
        its = dict(zip(mine, (*product.contracted, *product.batch), strict=True))
        rows = [~axis for axis in range(x.ndim) if axis not in its]
        size = dict(enumerate(weight.sizes)) | {row: x.shape[~row] for row in rows}
        labels = [one for a in range(x.ndim) for one in (view[its[a]] if a in its else (~a,))]
        self.x_split = tuple(size[label] for label in labels)
        self.x_order = tuple(labels.index(label) for label in (*self.both, *rows, *inner))
        count, features = (math.prod(size[label] for label in part) for part in (self.both, inner))
        self.x_shape = (count, *(size[row] for row in rows), features)
        # y: [both, lone, *rows, outer] to what the product gives.
        of_y = [*self.both, *lone, *rows, *outer]
        self.y_split = tuple(size[label] for label in of_y)
        self.y_sum = tuple(axis for axis, label in enumerate(of_y) if label in summed)
        left = [label for label in of_y if label not in summed]
        of_rows, of_features = [(row,) for row in rows], [view[axis] for axis in free]
        parts = [view[axis] for axis in product.batch]
        parts += [*of_features, *of_rows] if product.weight_first else [*of_rows, *of_features]
        self.y_order = tuple(left.index(label) for part in parts for label in part)
        self.y_shape = tuple(math.prod(size[label] for label in part) for part in parts)

    def __call__(
        self,
        x: jax.Array,
        arrays: dict[str, jax.Array],
        multiply: Callable[..., jax.Array],
        dropout: Dropout | None,
    ) -> jax.Array:
        weight = self.weight
        x = x.reshape(self.x_split).transpose(self.x_order).reshape(self.x_shape)
        others = [part for part in weight.parts("b") if part not in self.both]
        parts = matrices(weight, arrays, self.both, others)
        lone = parts["kernel"].shape[1]
        each = dropout_of_each(dropout, x.shape[0], lone)
        if lone == 1 and x.shape[0] == 1:
            one, dropout = jax.tree.map(lambda array: array[0, 0], (parts, each))
            y = multiply(x[0], one, dropout)[None, None]
        else:
            y = jax.vmap(jax.vmap(multiply, in_axes=(None, 0, 0)))(x, parts, each)
        y = y.reshape(self.y_split)
        if self.y_sum:
            y = y.sum(self.y_sum)
        return y.transpose(self.y_order).reshape(self.y_shape)


def made_plan(weight: Weight, product: Product, x: jax.Array) -> Plan | None:
    """Returns how to compute the product with matrices; None where its contracted axes are neither
    all of the weight's contracted ones nor all of its features."""
    axes = range(len(weight.view))
    free = [axis for axis in axes if axis not in (*product.contracted, *product.batch)]
    b, i, o = (set(weight.long_parts(role)) for role in "bio")
    ends = set(weight.viewed(product.contracted)) - b, set(weight.viewed(free)) - b
    if not b.issuperset(weight.viewed(product.batch)) or ends not in ((i, o), (o, i)):
        return None
    return Plan(weight, product, x, free, is_transposed=ends != (i, o))


def matrices(
    weight: Weight,
    arrays: Mapping[str, jax.Array],
    b: Sequence[int] = (),
    others: Sequence[int] = (),
) -> dict[str, jax.Array]:
    """Returns kernel [b, others, in, out], lora_a [b, others, in, r], lora_b [b, others, r, out],
    g [b, others, out].

    Args:
      b, others: all parts of axes that matrices lie along, in any order.
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
