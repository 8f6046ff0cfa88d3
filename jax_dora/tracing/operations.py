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
    """A product of groups of rows, each with its own matrix: the `contracted` axes of the weight's
    array, its `group` axis, and the number of rows in each group, i32[groups]; else as `Product`.
    """

    contracted: tuple[int, ...]
    group: int
    sizes: jax.Array
    precision: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows along `axis` of the weight's array; `offset_dims` are the axes of the result
    that are its other axes; mode and fill_value as in `jax.lax.gather`."""

    axis: int
    offset_dims: tuple[int, ...]
    mode: Any
    fill_value: Any
