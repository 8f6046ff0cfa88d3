"""DoRA for flax.nnx: a linear layer with its adapter."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.sharding import AxisType

from jax_dora import ops
from jax_dora.beneath import axis_names, check_base, sharded_like, sharding_metadata
from jax_dora.dropout import drawn
from jax_dora.hyperparameters import DropoutMode, adapter_scale, check_dropout, check_inner_name
from jax_dora.ops import dispatch
from jax_dora.ops.check import InnerName
from jax_dora.ops.mesh import left_to_xla
from jax_dora.ops.norm import of_layer
from jax_dora.reuse import current_norm

default_kernel_init = nnx.initializers.lecun_normal()
default_bias_init = nnx.initializers.zeros_init()
# Uniform in ±1/sqrt(in): PEFT's, which is torch.nn.Linear's own.
default_lora_a_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
default_lora_b_init = nnx.initializers.zeros_init()


class DoRAParam(nnx.LoRAParam):
    """The magnitude of a DoRA layer; whatever filters for `nnx.LoRAParam` finds it too."""


class DoRALinear(nnx.Module):
    """y = magnitude ∘ x(kernel + s·lora_a lora_b) / ‖kernel + s·lora_a lora_b‖ + bias.

    A fresh layer computes x(kernel + s·lora_a lora_b) + bias exactly: its magnitude is its norm.
    The norm is per output feature and constant under differentiation (arXiv 2402.09353, section
    4.3). Kernel and bias are `nnx.Param`; lora_a, lora_b are `nnx.LoRAParam` and magnitude is a
    `DoRAParam`, which is one, so this trains the adapter alone:

        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, grads)

    Attributes:
      kernel: [in, out].
      bias: [out], or None.
      lora_a: [in, rank].
      lora_b: [rank, out].
      magnitude: [out], in fp32 even beside bf16 adapters: rounded to bf16 it would lie further
        from its norm than training usually takes it.
      dropout: an `nnx.Dropout`, or None at rate 0; `model.train()` and `model.eval()` reach it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        adapter_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        lora_a_init: Initializer = default_lora_a_init,
        lora_b_init: Initializer = default_lora_b_init,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        inner_name: InnerName = None,
        rngs: nnx.Rngs,
    ) -> None:
        """
        Args:
          in_features, out_features: as `nnx.Linear`'s, like use_bias, dtype, param_dtype,
            precision, kernel_init, bias_init, kernel_metadata and bias_metadata.
          rank: of the adapter; it may exceed in_features and out_features.
          alpha: the scale s is alpha / rank,
          use_rslora: or alpha / sqrt(rank).
          dropout: probability of dropping an input in training.
          dropout_mode: "adapter" drops what lora_a reads, as LoRA does; "input" drops what the
            whole correction reads, as PEFT's DoRA does, at the cost of a second product with the
            kernel.
          adapter_dtype: of lora_a and lora_b. Never changes the dtype of the result.
          lora_a_init, lora_b_init: the fresh layer is exact for any.
          implementation, inner_name: of `jax_dora.ops.dora_linear`; see `jax_dora.remat_policy`.
          rngs: its `params` stream makes parameters, its `dropout` stream masks.

        Sharding: the axis names in kernel's `out_sharding` metadata are given to lora_a (in, None),
        lora_b (None, out) and magnitude (out), unless the initializer brings its own.

        Raises:
          TypeError, ValueError: rank, alpha, dropout or dropout_mode is out of range.
        """
        self.scale = adapter_scale(rank, alpha, use_rslora)
        dispatch.check_name(implementation)
        self.implementation = implementation
        self.inner_name = inner_name
        check_dropout(dropout, dropout_mode)
        check_inner_name(inner_name, dropout, dropout_mode)
        base = nnx.Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            rngs=rngs,
        )
        self.kernel = base.kernel
        self.bias = base.bias if use_bias else nnx.data(None)

        in_name, out_name = axis_names(self.kernel, 2)
        self.lora_a = sharded_like(
            self.kernel,
            nnx.LoRAParam,
            lora_a_init(rngs.params(), (in_features, rank), adapter_dtype),
            (in_name, None),
        )
        self.lora_b = sharded_like(
            self.kernel,
            nnx.LoRAParam,
            lora_b_init(rngs.params(), (rank, out_features), adapter_dtype),
            (None, out_name),
        )
        self.magnitude = sharded_like(self.kernel, DoRAParam, self.norm(), (out_name,))

        self.in_features = in_features
        self.out_features = out_features
        self.rank = rank
        self.alpha = alpha
        self.use_rslora = use_rslora
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.adapter_dtype = adapter_dtype
        self.precision = precision
        self.dropout_mode: DropoutMode = dropout_mode
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else nnx.data(None)

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        dropout: float = 0.0,
        dropout_mode: DropoutMode = "adapter",
        adapter_dtype: Dtype = jnp.float32,
        lora_a_init: Initializer = default_lora_a_init,
        lora_b_init: Initializer = default_lora_b_init,
        implementation: str | None = None,
        inner_name: InnerName = None,
        rngs: nnx.Rngs,
    ) -> Self:
        """A DoRA layer over `linear`, whose kernel and bias it shares (the very `nnx.Param`s).

        Arguments as the constructor's; dtype, precision and metadata are the linear's.

        Raises:
          TypeError: `linear` is no `nnx.Linear`, or a subclass with a `__call__` of its own.
          NotImplementedError: `linear` has its own `dot_general`, `promote_dtype` or
            `preferred_element_type`, which the adapted layer would not honour.
          TypeError, ValueError: as the constructor.
        """
        check_base(linear, nnx.Linear)
        kernel, bias = linear.kernel, linear.bias
        layer = cls(
            linear.in_features,
            linear.out_features,
            rank=rank,
            alpha=alpha,
            use_rslora=use_rslora,
            dropout=dropout,
            dropout_mode=dropout_mode,
            use_bias=bias is not None,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            adapter_dtype=adapter_dtype,
            precision=linear.precision,
            kernel_init=_given(kernel),
            bias_init=_given(bias),
            lora_a_init=lora_a_init,
            lora_b_init=lora_b_init,
            kernel_metadata=sharding_metadata(kernel),
            implementation=implementation,
            inner_name=inner_name,
            rngs=rngs,
        )
        layer.kernel = kernel
        if bias is not None:
            layer.bias = bias
        return layer

    def norm(self) -> jax.Array:
        """‖kernel + s·lora_a lora_b‖ per output feature, of the parameters as stored: f32[out]."""
        return ops.factored_norm(
            *(self.kernel[...], self.lora_a[...], self.lora_b[...], self.scale),
            implementation=of_layer(self.implementation),
        )

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
          inputs: [..., in].
          out_sharding: of the result, as `nnx.Linear.__call__`'s: a PartitionSpec or NamedSharding
            over explicit axes of the mesh, which is wanted where they shard kernel's input axis.
          deterministic, rngs: as `nnx.Dropout.__call__`'s.

        Returns:
          [..., out] in the dtype that `nnx.Linear` would return.

        Raises:
          ValueError: out_sharding names an axis that is not explicit.
        """
        x, kernel, bias, norm, dropout = self.operands(inputs, deterministic, rngs)
        adapter = (self.lora_a[...], self.lora_b[...], self.magnitude[...])
        seed = None if dropout is None else dropout.seed
        operands = (x, seed, kernel, *adapter, norm, bias)
        if out_sharding is None:
            return self._project(*operands)
        return _partitioned_by_xla(self._project, out_sharding, kernel)(*operands)

    def operands(self, inputs: jax.Array, deterministic, rngs) -> tuple[Any, ...]:
        """What a call computes with: x, kernel and bias as `nnx.Linear` promotes them, the norm of
        the stored parameters, so that g does not depend on the dtype of the computation, and this
        call's dropout."""
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = dtypes.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        norm = current_norm(self)
        return x, kernel, bias, norm, drawn(self.dropout, self.dropout_mode, deterministic, rngs)

    def _project(self, x, seed, kernel, lora_a, lora_b, magnitude, norm, bias) -> jax.Array:
        dropout = None
        if seed is not None and self.dropout is not None:
            dropout = ops.Dropout(seed, self.dropout.rate, self.dropout_mode)
        return ops.dora_linear(
            *(x, kernel, lora_a, lora_b, magnitude, self.scale),
            bias=bias,
            norm=norm,
            implementation=self.implementation,
            precision=self.precision,
            dropout=dropout,
            inner_name=self.inner_name,
        )


def _partitioned_by_xla(
    function: Callable[..., jax.Array], out_sharding: Any, kernel: jax.Array
) -> Any:
    """`function` for operands on a mesh with explicit axes, which XLA takes over inside of it; its
    result is sharded as `out_sharding` says."""
    mesh = jax.typeof(kernel).sharding.mesh
    spec = getattr(out_sharding, "spec", out_sharding)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    named = jax.tree.leaves(tuple(spec))
    if others := [name for name in named if types.get(name) is not AxisType.Explicit]:
        raise ValueError(
            f"out_sharding is {spec}; expected explicit axes of the kernel's mesh, which "
            f"{', '.join(others)} is not among {types}: use jax.lax.with_sharding_constraint on "
            "the result for an axis that is left to XLA"
        )
    if AxisType.Explicit not in mesh.axis_types:
        return function
    return left_to_xla(function, mesh, jax.P(*spec))


def _given(param: nnx.Param | None) -> Callable[..., Any]:
    """An initializer that returns the array of `param` itself."""
    return lambda *_: None if param is None else param[...]
