"""DoRA for nnx.Linear."""

from typing import Any, Self

from flax import nnx

from jax_dora.layers.base_layer import check_base, class_attribute
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.dora_projection import DoRAProjection
from jax_dora.layers.rule import OPTIONS, layer_rule


class DoRALinear(DoRAProjection, nnx.Linear):
    """y = magnitude ∘ x(kernel + s·lora_a lora_b) / ‖kernel + s·lora_a lora_b‖ + bias.

    A fresh layer computes x(kernel + s·lora_a lora_b) + bias exactly; see `DoRALayer`.

    Attributes:
      kernel: [in, out].
      bias: [out], or None.
      lora_a: [in, rank].
      lora_b: [rank, out].
      magnitude: [out].
    """

    base_type = class_attribute(nnx.Linear)
    __call__ = DoRAProjection.__call__  # nnx.capture does not see inherited methods.
    joins_g = True
    takes = frozenset({"keep_inner"})
    can_take_codes = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        rngs: nnx.Rngs,
        base: nnx.Linear | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
          in_features, out_features: see `nnx.Linear`.
          rank: the adapter's rank; it may exceed in_features and out_features.
          alpha: the scale s is alpha / rank.
          rngs: its `params` stream draws the parameters, its `dropout` stream the dropout masks.
          base: the layer to adapt, as in `from_linear`; None creates one.
          **options: the adapter's options, which are the other attributes of `jax_dora.DoRARule`
            (use_rslora, dropout, dropout_mode, keep_inner, adapter_dtype, lora_a_init, lora_b_init,
            implementation), and those of `nnx.Linear` (use_bias, dtype, param_dtype, precision,
            kernel_init, bias_init, kernel_metadata, bias_metadata).

        Raises:
          TypeError, ValueError: rank, alpha or another option is out of range.
          NotImplementedError: an option replaces `nnx.Linear`'s arithmetic (dot_general,
            promote_dtype, preferred_element_type), which the adapter would ignore.
        """
        names = {"arrays", "stack_axes", *OPTIONS}
        adapter = {name: options.pop(name) for name in names & options.keys()}
        adapter |= {"rank": rank, "alpha": alpha}
        layer_rule(**{name: adapter[name] for name in adapter if name in OPTIONS})
        if base is None:
            base = nnx.Linear(in_features, out_features, rngs=rngs, **options)
        elif options:
            raise TypeError(
                f"{sorted(options)} are options of the base layer or unknown; expected some of "
                f"{OPTIONS}"
            )
        super().__init__(base, rngs=rngs, **adapter)

    @classmethod
    def from_linear(cls, linear: nnx.Linear, *, rngs: nnx.Rngs, **options: Any) -> Self:
        """Returns a DoRA layer over `linear`. It shares the layer's kernel and bias (the same
        `nnx.Param` objects).

        Args:
          linear: the layer to adapt; its dtype, precision and metadata are kept.
          rngs, **options: as in the constructor, without the options of `nnx.Linear`.

        Raises:
          TypeError: `linear` is not an `nnx.Linear`, or is a subclass with its own `__call__`.
          TypeError, ValueError, NotImplementedError: see the constructor.
        """
        check_base(linear, nnx.Linear)
        return cls(linear.in_features, linear.out_features, base=linear, rngs=rngs, **options)

    @classmethod
    def from_base(cls, base: Any, *, rngs: nnx.Rngs, **options: Any) -> Self:
        return cls.from_linear(base, rngs=rngs, **options)

    @classmethod
    def is_linear(cls, module: Any) -> bool:
        return True

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        return module.in_features, module.out_features

    @classmethod
    def contraction_of(cls, module: Any, rank: int = 1, ndim: int = 0) -> Contraction:
        contraction = Contraction.of_einsum("...i,io->...o", ndim)
        return contraction.with_sizes(cls.unstacked_shape(module), rank)
