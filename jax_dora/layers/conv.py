"""DoRA for nnx.Conv and nnx.ConvTranspose."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora import ops
from jax_dora.layers.base_layer import class_attribute
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.dora_projection import DoRAProjection
from jax_dora.layers.rule import DoRARule
from jax_dora.ops.dropout import drop_for


class DoRAConvolution(DoRAProjection):
    """y = conv(x, magnitude ∘ (kernel + s·lora_a lora_b) / ‖kernel + s·lora_a lora_b‖) + bias.

    The norm is taken per output channel, over the window and the input channels of its group. The
    layer computes

        y = base + ((g-1)∘base + g∘(s·lora)) + bias

    where lora is a convolution with lora_a, with the base layer's strides, padding, dilation and
    groups, followed by a product with lora_b. In a grouped convolution each group has its own
    adapter, of rank / groups.

    The arguments are the same as for `DoRALayer`. The rank must be a multiple of the number of
    groups; a depthwise convolution has as many groups as input channels.

    Attributes:
      kernel: [*window, in / groups, out].
      lora_a: [*window, in / groups, rank].
      lora_b: [rank / groups, out].
      magnitude: [out].
    """

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        super().check(base, options)
        groups = _groups(base)
        if options.rank % groups:
            raise ValueError(
                f"rank is {options.rank} and the convolution has {groups} groups, which share the "
                f"rank equally; expected a multiple of {groups}"
            )

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        return "i" * (len(module.kernel_shape) - 1) + "o"

    @classmethod
    def contraction_of(cls, module: Any, rank: int = 1, ndim: int = 0) -> Contraction:
        return Contraction.of_convolution(module.kernel_shape, _groups(module), rank)

    @property
    def _function(self) -> Callable[..., jax.Array]:
        return self._convolution

    def _convolution(
        self,
        x: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None,
        lora_a: jax.Array,
        lora_b: jax.Array,
        g: jax.Array,
        dropout: ops.Dropout | None,
    ) -> jax.Array:
        dropped = x
        if dropout is not None:
            dropped = drop_for(self.implementation)(x, dropout.seed, dropout.rate)
        base = self._convolve(x, kernel)
        lora = self._expand(self._convolve(dropped, lora_a.astype(x.dtype)), lora_b)
        if dropout is None or dropout.mode == "adapter":
            y = ops.compose(base, lora, g, self.scale, implementation=self.implementation)
        else:
            corrected = self._convolve(dropped, kernel)
            y = base + ops.compose_delta(
                corrected, lora, g, self.scale, implementation=self.implementation
            )
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))

    def _convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Returns the base layer's convolution of x with `kernel`, without bias."""
        settings = vars(self) | {"kernel": kernel, "bias": None, "use_bias": False}
        stand_in: Any = SimpleNamespace(**settings)
        base_type: Any = self.base_type
        return base_type.__call__(stand_in, x)

    def _expand(self, z: jax.Array, lora_b: jax.Array) -> jax.Array:
        """Multiplies z [..., rank] by lora_b, group by group; returns [..., out]."""
        contraction, groups = self.contraction, _groups(self)
        lora_b = contraction.lora_b.to_matrices(lora_b).astype(z.dtype)
        if groups == 1:
            return jnp.matmul(z, lora_b[0], precision=self.precision)
        z = z.reshape(*z.shape[:-1], groups, lora_b.shape[1])
        lora = jnp.einsum("...gr,gro->...go", z, lora_b, precision=self.precision)
        return lora.reshape(*z.shape[:-2], groups * lora_b.shape[2])


class DoRAConv(DoRAConvolution, nnx.Conv):
    """`nnx.Conv` with an adapter; see `DoRAConvolution`."""

    base_type = class_attribute(nnx.Conv)
    __call__ = DoRAProjection.__call__  # nnx.capture does not see inherited methods.


class DoRAConvTranspose(DoRAConvolution, nnx.ConvTranspose):
    """`nnx.ConvTranspose` with an adapter; see `DoRAConvolution`.

    Raises:
      NotImplementedError: transpose_kernel is True, which swaps the kernel's input and output axes.
    """

    base_type = class_attribute(nnx.ConvTranspose)
    __call__ = DoRAProjection.__call__

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        super().check(base, options)
        if base.transpose_kernel:
            raise NotImplementedError(
                "transpose_kernel is True, which swaps the kernel's input and output axes; "
                "expected False: leave this layer unadapted"
            )


def _groups(module: Any) -> int:
    return getattr(module, "feature_group_count", 1)
