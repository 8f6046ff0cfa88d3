"""The operations that read a weight, as JAX's primitives describe them."""

import dataclasses
from typing import Any

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of an array x and a weight, as `jax.lax.dot_general` describes it.

    Attributes:
      contracted, batch: axes of the weight's array.
      x_contracted, x_batch: the axes of x that belong to them.
      weight_first: whether the weight is the left operand.
      precision: of the product.
      dtype: of the result.
      out_sharding: of the result, or None.
    """

    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    x_contracted: tuple[int, ...]
    x_batch: tuple[int, ...]
    weight_first: bool
    precision: Any
    dtype: Any
    out_sharding: Any

    def __call__(self, x: jax.Array, weight: jax.Array, **options: Any) -> jax.Array:
        """Returns the product; options as `jax.lax.dot_general`'s."""
        numbers: Any = (self.x_contracted, self.contracted), (self.x_batch, self.batch)
        if self.weight_first:
            x, weight, numbers = weight, x, tuple(pair[::-1] for pair in numbers)
        return lax.dot_general(x, weight, numbers, **options)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A product of groups of rows, each with a matrix of its own.

    Attributes:
      contracted: the axes of the weight's array that are contracted with x's last.
      group: the axis of the weight's array that the matrices lie along.
      sizes: i32[groups], the rows of each group.
      precision, dtype: as `Product`'s.
    """

    contracted: tuple[int, ...]
    group: int
    sizes: jax.Array
    precision: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows taken out of a weight.

    Attributes:
      axis: of the weight's array, that is indexed.
      offset_dims: the axes of the result that are the array's other axes.
      mode, fill_value: what an index outside of the array gives, as `jax.lax.gather`'s.
    """

    axis: int
    offset_dims: tuple[int, ...]
    mode: Any
    fill_value: Any
