"""The base class of the DoRA layers that multiply their input by their kernel."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_dora.layers.base import DoRALayer
from jax_dora.layers.call import dropout_of_call, operands_of_call, with_out_sharding


class DoRAProduct(DoRALayer):
    """A DoRA layer over a projection or a convolution. A subclass defines `_result`."""

    kernel: nnx.Param
    bias: nnx.Param | None
    dtype: Any
    precision: Any
    promote_dtype: Any

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """
        Args:
          inputs: as for the base layer.
          out_sharding: the sharding of the result, as for `nnx.Linear.__call__`: a PartitionSpec or
            NamedSharding over explicit mesh axes. It is required if explicit axes shard a
            contracted axis of the kernel.
          deterministic, rngs: see `nnx.Dropout.__call__`.

        Returns:
          An array with the shape and dtype of the base layer's result.

        Raises:
          ValueError: out_sharding names an axis that is not explicit.
        """
        operands = operands_of_call(self, inputs, dropout_of_call(self, deterministic, rngs))
        if out_sharding is None:
            return self._result(operands)
        return with_out_sharding(out_sharding, self._result, operands)

    def _result(self, operands: Mapping[str, Any]) -> jax.Array:
        """Computes the result of a call from its arrays, which `operands_of_call` returns."""
        raise NotImplementedError
