"""The base class of all DoRA layers: a Flax layer with an adapter on its kernel."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from flax.typing import Initializer

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode
from jax_dora.layers.adapter import (
    DoRAParam,
    default_lora_a_init,
    default_lora_b_init,
    make_adapter,
)
from jax_dora.layers.base_layer import bare, check_base, copy_attributes
from jax_dora.layers.call import layer_norm
from jax_dora.layers.layout import Layout, projection_layout
from jax_dora.layers.rule import OPTIONS, DoRARule, layer_rule
from jax_dora.layers.stack import Stack

# The attributes that a DoRA layer has and its base has not.
_OF_ADAPTER = frozenset((*ADAPTER_NAMES, *OPTIONS)) - {"lora_a_init", "lora_b_init"}
_OF_ADAPTER |= {"scale", "given_norm", "given_g", "plain_type", "stack_axis"}


class Constant(nnx.Variable):
    """A given norm or g, or an array of a frozen adapter: no `nnx.Param`, so nothing trains it."""


class DoRALayer(nnx.Module):
    """A Flax layer with an adapter, whose kernel and other parameters are the base layer's own.

    A fresh layer computes what the base would with kernel + s·lora_a lora_b: its magnitude is its
    norm, and g exactly 1. The norm is per output feature and constant under differentiation
    (arXiv 2402.09353, section 4.3). The base's parameters stay `nnx.Param`s, lora_a and lora_b are
    `nnx.LoRAParam`s and magnitude is a `DoRAParam`, which is one, so that this trains the adapter
    alone:

        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, grads)

    Every layer is also an instance of its base's class. `base_type`, `kernel_name`, `takes`,
    `default_inits`, `unstacked_shape`, `kernel_axes` and `__call__` are what a subclass says of
    itself.

    Class attributes:
      base_type: the class of the layers that it adapts.
      kernel_name: the name of the parameter that is adapted.
      takes: the options, of those that not every layer has, that this one has.
      default_inits: the initializers of lora_a and lora_b.

    Attributes:
      magnitude: in fp32 even beside bf16 adapters: rounded to bf16 it would lie further from its
        norm than training usually takes it.
      dropout: an `nnx.Dropout`, or None at rate 0; `model.train()` and `model.eval()` reach it.
      given_norm: the norm that calls use instead of computing it (see `jax_dora.with_norms`), or
        None.
      given_g: g = magnitude / norm of a frozen layer, in magnitude's shape, or None.
      plain_type: the class of the layer that it was made of, `base_type` or a subclass.
      stack_axis: of a stack of layers the axis along which the kernel is one, -1 for the last.
      rank, alpha, use_rslora, keep_inner, dropout_mode, adapter_dtype, implementation: as
        `jax_dora.DoRARule`'s.
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
        stack_axis: int = 0,
        **options: Any,
    ) -> None:
        """
        Args:
          base: the layer to adapt. Its parameters (the very `nnx.Param`s) and settings are shared.
          rngs: its `params` stream makes parameters, its `dropout` stream masks.
          arrays: lora_a, lora_b and magnitude in this layer's shapes; None draws a fresh adapter.
          stack_axis: of a stack of layers the axis along which the kernel is one, -1 for the last.
          **options: rank, alpha and the other attributes of `jax_dora.DoRARule`.

        Sharding: the axis names in the kernel's `out_sharding` metadata are given to the adapter's
        axes that correspond to them, unless an initializer brings its own.

        Raises:
          TypeError: `base` is of another type, or of a subclass that computes something else.
          TypeError, ValueError: an option is unknown or out of range, or an array of another shape.
          ValueError: `base` has an attribute by the name of one of the adapter's.
          NotImplementedError: `base` has a setting that the adapter would not honour.
        """
        chosen = layer_rule(**options)
        self.check(base, chosen)
        copy_attributes(base, self)
        self.plain_type = type(base)
        self.stack_axis = stack_axis
        self.rank, self.alpha, self.use_rslora = chosen.rank, chosen.alpha, chosen.use_rslora
        self.scale = chosen.scale
        self.keep_inner = chosen.keep_inner
        self.dropout_mode: DropoutMode = chosen.dropout_mode
        self.adapter_dtype = chosen.adapter_dtype
        self.implementation = chosen.implementation
        if "adapt_attend" in self.takes:
            self.adapt_attend = chosen.adapt_attend is not False
        self.given_norm, self.given_g = nnx.data(None), nnx.data(None)
        dropouts = make_adapter(self, chosen, rngs, self.default_inits, arrays)
        self.dropout = dropouts[0] if dropouts else nnx.data(None)
        if dropouts and (shape := self.stack.shape):
            # The streams of dropout are numbers, which have no axis but the leading one.
            states, leading = (nnx.state(one, nnx.RngState) for one in dropouts), Stack(shape)
            nnx.update(self.dropout, jax.tree.map(lambda *one: leading.join(one), *states))

    @classmethod
    def from_base(cls, base: Any, *, rngs: nnx.Rngs, **options: Any) -> Self:
        """Returns the DoRA layer over `base`; arguments as the constructor's of `DoRALayer`."""
        return cls(base, rngs=rngs, **options)

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        """Raises as the constructor unless `base` can be adapted by this class so."""
        for name, default in (("keep_inner", False), ("adapt_attend", None)):
            if getattr(options, name) is not default and name not in cls.takes:
                raise ValueError(
                    f"{name} is {getattr(options, name)!r} for an nnx.{cls.base_type.__name__}, "
                    f"which takes none; expected {default}: give such layers a rule of their own"
                )
        check_base(base, cls.base_type)
        if taken := sorted(vars(base).keys() & _OF_ADAPTER):
            raise ValueError(
                f"the layer is a {type(base).__name__} and has an attribute {taken[0]!r}, which is "
                "a name of the adapter's; expected another name: rename it in the class"
            )

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        """Returns whether "all-linear" means a layer of `base_type` such as `module`."""
        return False

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        """Returns the kernel's shape in one layer of a base or DoRA layer that may be a stack."""
        raise NotImplementedError

    @classmethod
    def kernel_axes(cls, module: Any) -> str:
        """Returns a letter for each axis of the kernel in one layer of a stack: "i" for one that is
        contracted, "o" for one of features, "b" for one that matrices lie along."""
        return "io"

    @classmethod
    def layout_of(cls, module: Any, rank: int) -> Layout:
        """Returns how the kernel of a base or DoRA layer and an adapter of `rank` are matrices."""
        return projection_layout(cls.unstacked_shape(module), cls.kernel_axes(module), rank)

    @property
    def layout(self) -> Layout:
        """Returns how kernel, lora_a, lora_b and magnitude are matrices."""
        return self.layout_of(self, self.rank)

    @property
    def kernel_param(self) -> nnx.Param:
        """Returns the parameter that is adapted."""
        return getattr(self, self.kernel_name)

    @property
    def result_dtype(self) -> Any:
        """Returns the dtype of the result for an input of the kernel's dtype."""
        return getattr(self, "dtype", None) or self.kernel_param.dtype

    def rule(self, path: str = "") -> DoRARule:
        """Returns the rule that makes such a layer; its initializers are not remembered."""
        names = (name for name in OPTIONS if not name.endswith("_init"))
        options: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        options["dropout"] = 0.0 if self.dropout is None else self.dropout.rate
        return DoRARule(path, **options)

    def base_layer(self) -> Any:
        """Returns the layer that this one was made of: its class, with all its attributes, over
        the very same parameters."""
        plain = bare(self.plain_type)
        copy_attributes(self, plain, leave_out=_OF_ADAPTER)
        return plain

    @property
    def stack(self) -> Stack:
        """Returns how layers are stacked in the parameters."""
        shape = self.kernel_param.shape
        lead = len(shape) - len(self.unstacked_shape(self))
        axis = self.stack_axis
        return Stack((shape[axis],), axis) if lead == 1 else Stack(shape[:lead])

    def norm(self) -> jax.Array:
        """Returns ‖kernel + s·lora_a lora_b‖ of the parameters as stored, in the magnitude's shape,
        in fp32. It is computed, whatever `given_norm` is."""
        arrays = (self.kernel_param[...], self.lora_a[...], self.lora_b[...])
        return self.stack.map(functools.partial(layer_norm, self), arrays)
