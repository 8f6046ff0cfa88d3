"""The base class of the DoRA layers that multiply what they are called with by their kernel."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_dora.layers.base import DoRALayer
from jax_dora.layers.call import dropout_of_call, operands_of_call, sharded_as


class DoRAProduct(DoRALayer):
    """A DoRA layer over a projection or a convolution, whose `_result` a subclass computes."""

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
          inputs: as the base layer's.
          out_sharding: the sharding of the result, as `nnx.Linear.__call__`'s: a PartitionSpec or
            NamedSharding over explicit axes of the mesh, which is needed where they shard an axis
            of the kernel that is contracted.
          deterministic, rngs: as `nnx.Dropout.__call__`'s.

        Returns:
          What the base layer would return, in shape and dtype.

        Raises:
          ValueError: out_sharding names an axis that is not explicit.
        """
        operands = operands_of_call(self, inputs, dropout_of_call(self, deterministic, rngs))
        if out_sharding is None:
            return self._result(operands)
        return sharded_as(out_sharding, self._result, operands)

    def _result(self, operands: Mapping[str, Any]) -> jax.Array:
        """Returns the result of a call from its arrays, as `operands_of_call` has them."""
        raise NotImplementedError
