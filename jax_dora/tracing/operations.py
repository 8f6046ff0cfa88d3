"""Descriptions of the operations that read a weight, as JAX's primitives define them."""

import dataclasses
from typing import Any

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of an array x and a weight, as in `jax.lax.dot_general`.

    Attributes:
      contracted, batch: the contracted axes and the batch axes of the weight's array.
      x_contracted, x_batch: the corresponding axes of x.
      weight_first: whether the weight is the left operand.
      precision: the precision of the product.
      dtype: the dtype of the result.
      out_sharding: the sharding of the result, or None.
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
        """Returns the product; `options` are passed to `jax.lax.dot_general`."""
        numbers: Any = (self.x_contracted, self.contracted), (self.x_batch, self.batch)
        if self.weight_first:
            x, weight, numbers = weight, x, tuple(pair[::-1] for pair in numbers)
        return lax.dot_general(x, weight, numbers, **options)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A product of groups of rows, where each group has its own matrix.

    Attributes:
      contracted: the axes of the weight's array that are contracted with the last axis of x.
      group: the axis of the weight's array with one matrix for each index.
      sizes: i32[groups], the number of rows in each group.
      precision, dtype: see `Product`.
    """

    contracted: tuple[int, ...]
    group: int
    sizes: jax.Array
    precision: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a weight.

    Attributes:
      axis: the indexed axis of the weight's array.
      offset_dims: the axes of the result that are the array's other axes.
      mode, fill_value: the behaviour for indices out of bounds, as in `jax.lax.gather`.
    """

    axis: int
    offset_dims: tuple[int, ...]
    mode: Any
    fill_value: Any
