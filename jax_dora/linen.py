"""DoRA for flax.linen: a dense layer with its adapter, and adapters into an existing module."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.ad_checkpoint import checkpoint_name

from jax_dora import ops
from jax_dora.adapt.linen import DoRA as DoRA
from jax_dora.adapt.linen import apply_dora as apply_dora
from jax_dora.adapt.linen import merge_dora as merge_dora
from jax_dora.hyperparameters import (
    ADAPTER_NAMES,
    DropoutMode,
    adapter_scale,
    check_dropout,
    check_inner_name,
)
from jax_dora.ops.check import InnerName
from jax_dora.ops.linear import NORM_NAME
from jax_dora.ops.norm import of_layer

__all__ = [
    "DoRA",
    "DoRADense",
    "adapter_labels",
    "apply_dora",
    "join_adapters",
    "merge_dora",
    "split_adapters",
]

Params = Mapping[str, Any]


class DoRADense(nn.Module):
    """y = magnitude ∘ x(kernel + s·lora_a lora_b) / ‖kernel + s·lora_a lora_b‖ + bias.

    Its `params` are an `nn.Dense`'s, kernel [in, out] and bias [out], and beside them lora_a
    [in, rank], lora_b [rank, out] and magnitude [out]. Whatever of them is missing is made, so that
    a pretrained `nn.Dense` tree is adapted by

        _, adapted = model.apply(
            {"params": pretrained}, x, rngs={"params": key}, mutable=["params"]
        )

    A fresh layer computes x(kernel + s·lora_a lora_b) + bias exactly: its magnitude is its norm.
    The norm is per output feature and constant under differentiation (arXiv 2402.09353, section
    4.3). `adapter_labels`, `split_adapters` and `join_adapters` keep the base frozen.

    Attributes:
      features, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as `nn.Dense`'s.
      rank: of the adapter; it may exceed the numbers of features.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: probability of dropping an input in training.
      dropout_mode: "adapter" drops what lora_a reads, as LoRA does; "input" drops what the whole
        correction reads, as PEFT's DoRA does, at the cost of a second product with the kernel.
      deterministic: True turns dropout off; here or in the call, as for `nn.Dropout`.
      adapter_dtype: of lora_a and lora_b; the magnitude is fp32 at least, since rounded to bf16 it
        would lie further from its norm than training usually takes it. Never changes the dtype of
        the result.
      lora_a_init, lora_b_init: the fresh layer is exact for any.
      implementation, inner_name: of `jax_dora.ops.dora_linear`; see `jax_dora.remat_policy`.

    Sharding: where `kernel_init` is `nn.with_partitioning` or `nn.with_logical_partitioning`, its
    names are given to lora_a (in, None), lora_b (None, out) and magnitude (out), unless the
    initializer brings its own.

    Raises:
      TypeError, ValueError: rank, alpha, dropout or dropout_mode is out of range.
    """

    features: int
    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    dropout_mode: DropoutMode = "adapter"
    deterministic: bool | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    adapter_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    # Uniform in ±1/sqrt(in): PEFT's, which is torch.nn.Linear's own.
    lora_a_init: Initializer = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    lora_b_init: Initializer = nn.initializers.zeros_init()
    implementation: str | None = None
    inner_name: InnerName = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """
        Args:
          inputs: [..., in].
          deterministic: True turns dropout off. Dropout wants a "dropout" rng otherwise.

        Returns:
          [..., out] in the dtype that `nn.Dense` would return.
        """
        scale = adapter_scale(self.rank, self.alpha, self.use_rslora)
        check_dropout(self.dropout, self.dropout_mode)
        check_inner_name(self.inner_name, self.dropout, self.dropout_mode)
        in_features = inputs.shape[-1]
        boxed = self.param(
            "kernel",
            self.kernel_init,
            (in_features, self.features),
            self.param_dtype,
            unbox=False,
        )
        stored = nn.meta.unbox(boxed)
        in_name, out_name = boxed.names if isinstance(boxed, nn.Partitioned) else (None, None)

        def adapter_param(name: str, names: tuple[Any, ...], init: Any, *args: Any) -> jax.Array:
            def boxed_init(*init_args: Any) -> Any:
                value = init(*init_args)
                if isinstance(boxed, nn.Partitioned) and not isinstance(
                    value, nn.meta.AxisMetadata
                ):
                    return boxed.replace(value=value, names=names)
                return value

            return self.param(name, boxed_init, *args)

        lora_a = adapter_param(
            "lora_a",
            (in_name, None),
            self.lora_a_init,
            (in_features, self.rank),
            self.adapter_dtype,
        )
        lora_b = adapter_param(
            "lora_b",
            (None, out_name),
            self.lora_b_init,
            (self.rank, self.features),
            self.adapter_dtype,
        )
        # Of the stored parameters, so that g does not depend on the dtype of the computation.
        by = of_layer(self.implementation)
        norm = ops.factored_norm(stored, lora_a, lora_b, scale, implementation=by)
        magnitude = adapter_param("magnitude", (out_name,), lambda _: norm)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)

        x, kernel, bias = promote_dtype(inputs, stored, bias, dtype=self.dtype)
        options = {
            "bias": bias,
            "norm": checkpoint_name(norm, NORM_NAME),
            "implementation": self.implementation,
            "precision": self.precision,
            "inner_name": self.inner_name,
        }
        if self.dropout:
            off = nn.merge_param("deterministic", self.deterministic, deterministic)
            if not off:
                seed = ops.draw_seed(self.make_rng("dropout"))
                options["dropout"] = ops.Dropout(seed, self.dropout, self.dropout_mode)
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, scale, **options)


def adapter_labels(params: Params) -> Any:
    """Labels every leaf of `params` "adapter" or "frozen", for `optax.multi_transform`:

    optax.multi_transform(
        {"adapter": optax.adamw(1e-4), "frozen": optax.set_to_zero()}, adapter_labels
    )
    """
    return traverse_util.path_aware_map(
        lambda path, _: "adapter" if path[-1] in ADAPTER_NAMES else "frozen", params
    )


def split_adapters(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """(adapters, base): two trees that `join_adapters` makes one again.

    Differentiate with respect to the first alone, and no gradient of a kernel is computed.
    """
    flat = traverse_util.flatten_dict(params)
    adapters = {path: leaf for path, leaf in flat.items() if path[-1] in ADAPTER_NAMES}
    base = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER_NAMES}
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(base)


def join_adapters(adapters: Params, base: Params) -> dict[str, Any]:
    """The tree that `split_adapters` split.

    Raises:
      ValueError: a leaf is in both.
    """
    flat_adapters = traverse_util.flatten_dict(adapters)
    flat_base = traverse_util.flatten_dict(base)
    if both := flat_adapters.keys() & flat_base.keys():
        paths = ", ".join("/".join(path) for path in sorted(both))
        raise ValueError(
            f"adapters and base both hold {paths}; expected the two results of split_adapters"
        )
    return traverse_util.unflatten_dict(flat_base | flat_adapters)
