"""Descriptions of the operations that read a weight, as JAX's primitives define them."""

import dataclasses
from typing import Any

import jax
from jax import lax

from jax_dora.layers.contraction import Contraction


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of an array x and a weight, as in `jax.lax.dot_general`.

    Attributes:
      dimension_numbers: the contracted and the batch axes of the operands.
      weight_first: whether the weight is the left operand.
      precision: the precision of the product.
      dtype: the dtype of the result.
      out_sharding: the sharding of the result, or None.
    """

    dimension_numbers: Any
    weight_first: bool
    precision: Any
    dtype: Any
    out_sharding: Any

    def __call__(self, x: jax.Array, weight: jax.Array, **options: Any) -> jax.Array:
        """Returns the product; `options` are passed to `jax.lax.dot_general`."""
        operands = (weight, x) if self.weight_first else (x, weight)
        return lax.dot_general(*operands, self.dimension_numbers, **options)

    def contraction(self, ndim: int, weight_ndim: int) -> Contraction:
        """Returns the contraction of an x and a weight's array with these numbers of axes."""
        return Contraction.of_dot_general(
            self.dimension_numbers, ndim, weight_ndim, weight_first=self.weight_first
        )


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
