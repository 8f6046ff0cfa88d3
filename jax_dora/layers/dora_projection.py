"""The base class of the DoRA layers that multiply their input by their kernel, and their product.

The parts of a call are functions rather than methods because `nnx.tabulate` lists and compiles
every public method that a call reaches.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx

from jax_dora import ops
from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.magnitude import g_of_call, norm_with_codes
from jax_dora.layers.out_sharding import with_out_sharding
from jax_dora.layers.quantised_kernel import formats_of
from jax_dora.layers.seeds import dropout_of_call
from jax_dora.ops.linear import scaled_linear


class DoRAProjection(DoRALayer):
    """A DoRA layer over a projection or a convolution.

    Class attributes:
      joins_g: whether its function is `scaled_linear`, which can compute g, too.
    """

    joins_g: ClassVar[bool] = False

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
        dropout = dropout_of_call(self, deterministic, rngs)
        later = self.joins_g and out_sharding is None
        operands = operands_of_call(self, inputs, dropout, later)
        if out_sharding is None:
            return self._function(**operands)
        function = self._function
        return with_out_sharding(out_sharding, lambda arrays: function(**arrays), operands)

    @property
    def _function(self) -> Callable[..., jax.Array]:
        """Returns the function of the arrays of a call that computes its result."""
        return projection_of(self)


def operands_of_call(
    layer: Any, inputs: jax.Array, dropout: ops.Dropout | None = None, later: bool = False
) -> dict[str, Any]:
    """Returns the arrays of a call by name: x, kernel and bias as the base layer promotes them,
    lora_a, lora_b, the dropout, g, which is computed from the parameters as stored
    (`later`: see `g_of_call`), and perhaps the transposed codes of the kernel."""
    bias = None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)
    norm, codes = norm_with_codes(layer)
    made = {} if codes is None else {"codes": codes}
    return {
        "x": x,
        "kernel": kernel,
        "bias": bias,
        "lora_a": layer.lora_a[...],
        "lora_b": layer.lora_b[...],
        "g": g_of_call(layer, x.dtype, norm=norm, later=later),
        "dropout": dropout,
        **made,
    }


def projection_of(layer: Any) -> Callable[..., jax.Array]:
    """Returns g ∘ x (kernel + s·lora_a lora_b) + bias as a function of the arrays of
    `operands_of_call`, which are matrices, with the layer's settings."""
    return functools.partial(
        scaled_linear,
        scale=layer.scale,
        implementation=layer.implementation,
        precision=layer.precision,
        keep_inner=layer.keep_inner,
        **formats_of(layer),
    )
