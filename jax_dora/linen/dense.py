"""`DoRADense`: a dense linen layer with an adapter."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer, PrecisionLike

from dora_common.hyperparameters import DropoutMode
from jax_dora.layers import DoRALinear
from jax_dora.layers.rule import OPTIONS, layer_rule
from jax_dora.linen.layer import counterpart, dora_layer


class DoRADense(nn.Module):
    """y = magnitude ∘ x(kernel + s·lora_a lora_b) / ‖kernel + s·lora_a lora_b‖ + bias.

    Its `params` are those of an `nn.Dense`, kernel [in, out] and bias [out], and lora_a [in, rank],
    lora_b [rank, out] and magnitude [out]. If these three are missing, they are created, so this
    adapts the parameters of a pretrained `nn.Dense`:

        _, adapted = model.apply(
            {"params": pretrained}, x, rngs={"params": key}, mutable=["params"]
        )

    A fresh layer computes x(kernel + s·lora_a lora_b) + bias exactly; see `jax_dora.DoRALayer`.
    `adapter_labels`, `split_adapters` and `join_adapters` keep the base layer frozen. To adapt an
    existing module, see `apply_dora`.

    Attributes:
      features, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see `nn.Dense`.
      rank: the adapter's rank; it may exceed the numbers of features.
      alpha: the scale s is alpha / rank.
      use_rslora: makes the scale s alpha / sqrt(rank) instead.
      dropout, keep_inner, dropout_mode, adapter_dtype, lora_a_init, lora_b_init, implementation:
        see `jax_dora.DoRARule`.
      deterministic: True turns dropout off. Set it here or in the call, as for `nn.Dropout`.

    Sharding: if `kernel_init` is `nn.with_partitioning` or `nn.with_logical_partitioning`, lora_a
    gets its names (in, None), lora_b (None, out) and magnitude (out), unless an initializer sets
    its own names.

    Raises:
      TypeError, ValueError: rank, alpha, dropout or dropout_mode is out of range.
    """

    features: int
    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    keep_inner: bool | None = None
    dropout_mode: DropoutMode = "adapter"
    deterministic: bool | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    adapter_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    lora_a_init: Initializer | None = None
    lora_b_init: Initializer | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """
        Args:
          inputs: [..., in].
          deterministic: True turns dropout off; otherwise dropout needs a "dropout" rng.

        Returns:
          [..., out], with the dtype of `nn.Dense`'s result.
        """
        names = set(OPTIONS) & vars(self).keys()
        options = layer_rule(**{name: getattr(self, name) for name in names})
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype, unbox=False)
        if self.use_bias:
            self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        base = counterpart(self, inputs, kernel, kind=nn.Dense)
        layer = dora_layer(self, DoRALinear, base, options, kernel)
        if layer.dropout is None:
            return layer(inputs)
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        rngs = None if deterministic else self.make_rng("dropout")
        return layer(inputs, deterministic=deterministic, rngs=rngs)
