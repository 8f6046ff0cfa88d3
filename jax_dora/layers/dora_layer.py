"""The base class of all DoRA layers: a Flax layer with an adapter on its kernel."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from flax.typing import Initializer

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode, adapter_scale
from jax_dora.layers.adapter_arrays import (
    DoRAParam,
    default_lora_a_init,
    default_lora_b_init,
    make_adapter,
)
from jax_dora.layers.base_layer import check_base, check_has_values, copy_attributes, new_instance
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.magnitude import check_rank, layer_norm, reads_codes
from jax_dora.layers.quantised_kernel import LAYERS, compute_as_stored
from jax_dora.layers.rule import OPTIONS, DoRARule, layer_rule
from jax_dora.layers.stack import Stack, innermost
from jax_dora.ops import check, quantised

# The attributes of a DoRA layer that its base layer does not have.
_ADAPTER_ATTRIBUTES = frozenset((*ADAPTER_NAMES, *OPTIONS)) - {"lora_a_init", "lora_b_init"}
_ADAPTER_ATTRIBUTES |= {"scale", "given_norm", "given_g", "plain_type", "stack_axes"}


class Constant(nnx.Variable):
    """A given norm, a given g, or an array of a frozen adapter. It is not an `nnx.Param`, so no
    optimizer trains it."""


class DoRALayer(nnx.Module):
    """A Flax layer with an adapter. It shares the kernel and the other parameters of its base
    layer.

    A fresh layer computes what the base layer would compute with the weight kernel + s·lora_a
    lora_b: its magnitude equals its norm, so g is exactly 1. The norm is taken per output feature,
    and no gradient flows through it (arXiv 2402.09353, section 4.3).

    The base layer's parameters stay `nnx.Param`s. lora_a and lora_b are `nnx.LoRAParam`s, and
    magnitude is a `DoRAParam`, a subclass of `nnx.LoRAParam`. This trains the adapter alone:

        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, grads)

    Every DoRA layer is also an instance of its base layer's class. A subclass defines `base_type`,
    `kernel_name`, `takes`, `default_inits`, `unstacked_shape`, `kernel_axes` and `__call__`.

    Class attributes:
      base_type: the class of the layers that it adapts.
      kernel_name: the name of the adapted parameter.
      takes: the options that this layer supports and some other layers do not.
      default_inits: the initializers of lora_a and lora_b.

    Attributes:
      magnitude: fp32 even if lora_a and lora_b are bf16. Rounding it to bf16 would move it further
        from its norm than training usually does.
      dropout: an `nnx.Dropout`, or None at rate 0; `model.train()` and `model.eval()` switch it.
      given_norm: the norm that calls use instead of computing it (see `jax_dora.with_norms`), or
        None.
      given_g: g = magnitude / norm of a frozen layer, in magnitude's shape, or None.
      plain_type: the class of the base layer: `base_type` or a subclass.
      stack_axes: see `Stack.axes`; () if the layer is not stacked, or along leading axes.
      act_qtype: the format of quantised activations; only in a layer that quantises them.
      rank, alpha, use_rslora, keep_inner, dropout_mode, adapter_dtype, implementation: see
        `jax_dora.DoRARule`.
    """

    base_type: ClassVar[type[nnx.Module]]
    kernel_name: ClassVar[str] = "kernel"
    takes: ClassVar[frozenset[str]] = frozenset()
    default_inits: ClassVar[Mapping[str, Initializer]] = {
        "lora_a": default_lora_a_init,
        "lora_b": default_lora_b_init,
    }

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    magnitude: DoRAParam
    dropout: nnx.Dropout | None
    given_norm: Constant | None
    given_g: Constant | None

    def __init__(
        self,
        base: Any,
        *,
        rngs: nnx.Rngs,
        arrays: Mapping[str, jax.Array] | None = None,
        stack_axes: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        """
        Args:
          base: the layer to adapt. The new layer shares its parameters (the same `nnx.Param`
            objects) and its settings.
          rngs: its `params` stream draws the parameters, its `dropout` stream the dropout masks.
          arrays: lora_a, lora_b and magnitude in this layer's shapes; None draws a fresh adapter.
          stack_axes: for a stack of layers, see `Stack.axes`; () for leading axes.
          **options: rank, alpha and the other attributes of `jax_dora.DoRARule`.

        Sharding: if the kernel has `out_sharding` metadata, each axis of the adapter gets the mesh
        axis name of the corresponding kernel axis, unless an initializer sets its own metadata.

        Raises:
          TypeError: `base` has another type, or is a subclass with its own `__call__` or `attend`.
          TypeError, ValueError: an option is unknown or out of range, or an array has the wrong
            shape.
          ValueError: `base` already has an attribute that the adapter needs to set, or it is
            abstract.
          NotImplementedError: `base` has a setting that the adapter would ignore.
        """
        rule = layer_rule(**options)
        self.check(base, rule)
        check_has_values(base, f"jax_dora.{type(self).__name__}")
        copy_attributes(base, self)
        compute_as_stored(self)
        self.plain_type = type(base)
        self.stack_axes = stack_axes
        self.rank, self.alpha, self.use_rslora = rule.rank, rule.alpha, rule.use_rslora
        self.keep_inner = rule.keep_inner
        self.dropout_mode: DropoutMode = rule.dropout_mode
        self.adapter_dtype = rule.adapter_dtype
        self.implementation = rule.implementation
        if "adapt_attend" in self.takes:
            self.adapt_attend = rule.adapt_attend is not False
        self.given_norm, self.given_g = nnx.data(None), nnx.data(None)
        dropouts = make_adapter(self, rule, rngs, self.default_inits, arrays)
        self.dropout = dropouts[0] if dropouts else nnx.data(None)
        if dropouts and (shape := self.stack.shape):
            # A dropout's RNG state is scalar, so it can only be stacked along a leading axis.
            states, leading = (
                (nnx.state(dropout, nnx.RngState) for dropout in dropouts),
                Stack(shape),
            )
            nnx.update(self.dropout, jax.tree.map(lambda *layers: leading.join(layers), *states))

    @classmethod
    def from_base(cls, base: Any, *, rngs: nnx.Rngs, **options: Any) -> Self:
        """Returns the DoRA layer over `base`. The arguments are the same as for `DoRALayer`'s
        constructor."""
        return cls(base, rngs=rngs, **options)

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        """Raises the constructor's errors if this class cannot adapt `base` with these options."""
        asked = {"keep_inner": options.keep_inner, "adapt_attend": options.adapt_attend is not None}
        for name in (name for name in asked if asked[name] and name not in cls.takes):
            raise ValueError(
                f"{name} is {getattr(options, name)!r} for an nnx.{cls.base_type.__name__}, "
                "which has no such option; expected None: use a separate rule for these layers"
            )
        check_base(base, cls.base_type)
        kernel = getattr(base, cls.kernel_name).get_value()
        if quantised.is_quantised(kernel):
            if not issubclass(cls.base_type, LAYERS):
                raise TypeError(
                    f"its {cls.kernel_name} is quantised as {quantised.describe(kernel)}, with "
                    f"which no nnx.{cls.base_type.__name__} computes; expected a float array: "
                    "dequantise it with qwix.dequantize"
                )
            check.quantised_array("its kernel", kernel)
        if taken := sorted(vars(base).keys() & _ADAPTER_ATTRIBUTES):
            raise ValueError(
                f"the layer is a {type(base).__name__} and has an attribute {taken[0]!r}, a name "
                "that the adapter needs; expected another name: rename the attribute in the class"
            )

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        """Returns whether the path "all-linear" selects `module`, a layer of `base_type`."""
        return False

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        """Returns the kernel's shape in a single layer, even if `module` is a stack of layers.
        `module` is a base layer or a DoRA layer."""
        return tuple(module.kernel_shape)

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        """Returns the role of each kernel axis of a single layer, as one letter:

        - "i": an input axis, which the product contracts.
        - "o": an output axis.
        - "b": a batch axis; each index has its own matrix.
        """
        return "io"

    @classmethod
    def contraction_of(cls, module: Any, rank: int = 1, ndim: int = 0) -> Contraction:
        """Returns the contraction of a base or DoRA layer with an adapter of `rank`.

        Args:
          ndim: the number of axes of the input; 0 for the smallest possible number. Only
            projections have the axes of input and result.
        """
        return Contraction.of_weight(cls.unstacked_shape(module), cls.kernel_axes(module), rank)

    @property
    def contraction(self) -> Contraction:
        """Returns how to view kernel, lora_a, lora_b and magnitude as matrices."""
        return self.contraction_of(self, self.rank)

    @property
    def scale(self) -> float:
        """The scale s of the adapter, by its rank and alpha."""
        return adapter_scale(self.rank, self.alpha, self.use_rslora)

    @property
    def kernel_param(self) -> nnx.Param:
        """Returns the adapted parameter."""
        return getattr(self, self.kernel_name)

    @property
    def result_dtype(self) -> Any:
        """Returns the dtype of the result for an input of the kernel's dtype."""
        return getattr(self, "dtype", None) or self.kernel_param.dtype

    def rule(self, path: str = "") -> DoRARule:
        """Returns a rule that creates a layer with the same options. The initializers are not
        stored, so the rule has none."""
        check_rank(self)
        names = (name for name in OPTIONS if not name.endswith("_init"))
        options: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        options["dropout"] = 0.0 if self.dropout is None else self.dropout.rate
        return DoRARule(path, **options)

    def base_layer(self) -> Any:
        """Returns the base layer: an instance of its class, with all its attributes and the same
        parameter objects."""
        plain = new_instance(self.plain_type)
        copy_attributes(self, plain, leave_out=_ADAPTER_ATTRIBUTES)
        return plain

    @property
    def stack(self) -> Stack:
        """Returns the axes along which layers are stacked in the parameters."""
        shape = self.kernel_param.shape
        count = len(shape) - len(self.unstacked_shape(self))
        return Stack.of(shape, innermost(self.stack_axes, count))

    def norm(self) -> jax.Array:
        """Computes ‖kernel + s·lora_a lora_b‖ of the stored parameters, even if `given_norm` is
        set. Returns it in the magnitude's shape, in fp32."""
        check_rank(self)
        arrays = (self.kernel_param[...], self.lora_a[...], self.lora_b[...])
        settings = self.contraction, self.scale, self.implementation, reads_codes(self)
        return self.stack.map(layer_norm, arrays, *settings)
