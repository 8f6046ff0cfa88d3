"""What the DoRA layers over an existing Flax layer have in common."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jax_dora import ops
from jax_dora.beneath import axis_names, check_base, sharded_like
from jax_dora.hyperparameters import DropoutMode, adapter_scale, check_dropout
from jax_dora.layers.layout import Layout
from jax_dora.nnx import DoRAParam, default_lora_a_init, default_lora_b_init
from jax_dora.ops import dispatch
from jax_dora.ops.norm import of_layer


class DoRALayer(nnx.Module):
    """A Flax layer with an adapter beside it, whose parameters are the base layer's own.

    A fresh layer computes what the base would with kernel + s·lora_a lora_b: its magnitude is its
    norm, and g exactly 1. The norm is per output feature and constant under differentiation
    (arXiv 2402.09353, section 4.3).

    Args:
      base: the layer to adapt. Its parameters (the very `nnx.Param`s) and settings are taken over.
      rank: of the adapter.
      alpha: the scale s is alpha / rank,
      use_rslora: or alpha / sqrt(rank).
      dropout: probability of dropping an input in training.
      dropout_mode: "adapter" drops what lora_a reads; "input" what the whole correction reads.
      adapter_dtype: of lora_a and lora_b. Never changes the dtype of the result.
      lora_a_init, lora_b_init: called with the shape of one matrix, [in, rank] and [rank, out].
      implementation: of the compose, as in `jax_dora.ops.dora_linear`.
      rngs: its `params` stream makes parameters, its `dropout` stream masks.

    Raises:
      TypeError: `base` is of another type, or of a subclass that computes something else.
      ValueError: rank, alpha, dropout or dropout_mode is out of range.
      NotImplementedError: `base` has a setting that the adapter would not honour.
    """

    base_type: ClassVar[type[nnx.Module]]
    kernel_name: ClassVar[str] = "kernel"
    default_inits: ClassVar[Mapping[str, Initializer]] = {
        "lora_a": default_lora_a_init,
        "lora_b": default_lora_b_init,
    }

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    magnitude: DoRAParam

    def __init__(
        self,
        base: Any,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        adapter_dtype: Dtype = jnp.float32,
        lora_a_init: Initializer | None = None,
        lora_b_init: Initializer | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.scale = adapter_scale(rank, alpha, use_rslora)
        dispatch.check_name(implementation)
        check_dropout(dropout, dropout_mode)
        check_base(base, self.base_type)
        for name, value in vars(base).items():
            if not name.startswith("_pytree__"):
                setattr(self, name, nnx.data(None) if name == "bias" and value is None else value)
        self.rank = rank
        self.alpha = alpha
        self.use_rslora = use_rslora
        self.adapter_dtype = adapter_dtype
        self.dropout_mode: DropoutMode = dropout_mode
        self.implementation = implementation
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else nnx.data(None)

        layout = self.layout()
        kernel = self._kernel()
        axes = self.adapter_axes(axis_names(kernel, kernel.ndim))
        for name, init in (("lora_a", lora_a_init), ("lora_b", lora_b_init)):
            place = getattr(layout, name)
            init = init or self.default_inits[name]
            value = _initialize(init, rngs.params(), place.matrices, adapter_dtype)
            value = place.from_matrices(value)
            setattr(self, name, sharded_like(kernel, nnx.LoRAParam, value, axes[name]))
        self.magnitude = sharded_like(kernel, DoRAParam, self.norm(), axes["magnitude"])

    def layout(self) -> Layout:
        """How kernel, lora_a, lora_b and magnitude are matrices."""
        raise NotImplementedError

    def adapter_axes(self, axes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
        """For lora_a, lora_b and magnitude what `axes` says of the kernel's axes: a name each."""
        raise NotImplementedError

    def norm(self) -> jax.Array:
        """‖kernel + s·lora_a lora_b‖ per output feature, of the parameters as stored, in fp32."""
        layout = self.layout()
        norm = matrix_norm(
            layout.kernel.to_matrices(self._kernel()[...]),
            layout.lora_a.to_matrices(self.lora_a[...]),
            layout.lora_b.to_matrices(self.lora_b[...]),
            self.scale,
            of_layer(self.implementation),
        )
        return layout.magnitude.from_matrices(norm[:, None])

    def _kernel(self) -> nnx.Param:
        return getattr(self, self.kernel_name)


def matrix_norm(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """‖kernel + scale·lora_a lora_b‖ of every column: f32[n, out] of [n, in, out] and so on."""
    norm = functools.partial(ops.factored_norm, scale=scale, implementation=implementation)
    if kernel.shape[0] == 1:
        return norm(kernel[0], lora_a[0], lora_b[0])[None]
    return jax.vmap(norm)(kernel, lora_a, lora_b)


def no_out_sharding(out_sharding: Any) -> None:
    """Raises NotImplementedError where a call asks for a sharding of the result."""
    if out_sharding is not None:
        raise NotImplementedError(
            f"out_sharding is {out_sharding}; a DoRA layer takes none: use jax.sharding.reshard or "
            "jax.lax.with_sharding_constraint on its result"
        )


def _initialize(init: Any, key: jax.Array, shape: tuple[int, int, int], dtype: Any) -> jax.Array:
    n, *matrix = shape
    if n == 1:
        return init(key, tuple(matrix), dtype)[None]
    return jax.vmap(lambda one: init(one, tuple(matrix), dtype))(jax.random.split(key, n))
