"""The layers that can be adapted: each Flax layer, its DoRA layer, and how they correspond."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from jax_dora.adapt.rule import DoRARule
from jax_dora.layers import DoRAConv, DoRAEinsum, DoRAEmbed, DoRALinearGeneral
from jax_dora.layers.layout import Layout, matrix_layout
from jax_dora.nnx import DoRALinear


@dataclasses.dataclass(frozen=True)
class Kind:
    """One Flax layer that can be adapted.

    Attributes:
      base: its type.
      adapted: the type of its DoRA layer.
      adapt: base layer and `DoRALinear.from_linear`'s options to DoRA layer.
      kernel_shape: of a base or DoRA layer, the shape that its kernel has unless layers are
        stacked.
      layout: of a DoRA layer, how its (unstacked) parameters are matrices.
      adapter_axes: of a DoRA layer and something for each axis of its (unstacked) kernel, the same
        for the axes of lora_a, lora_b and magnitude; None for the rank.
      kernel: the name of the adapted parameter.
    """

    base: type[nnx.Module]
    adapted: type[nnx.Module]
    adapt: Callable[..., Any]
    kernel_shape: Callable[[Any], tuple[int, ...]]
    layout: Callable[[Any], Layout]
    adapter_axes: Callable[[Any, tuple[Any, ...]], dict[str, tuple[Any, ...]]]
    kernel: str = "kernel"

    def adapted_by(self, layer: Any, rule: DoRARule, rngs: nnx.Rngs) -> Any:
        """The DoRA layer over `layer` that `rule` asks for.

        Raises:
          TypeError, ValueError, NotImplementedError: as the DoRA layer; the rule asks for what the
            layer does not have.
        """
        options = rule.options()
        if "adapt_attend" in options and self.base is not nnx.Embed:
            raise ValueError(
                f"adapt_attend is {rule.adapt_attend} for an nnx.{self.base.__name__}, which has "
                "no attend; expected None: give embeddings a rule of their own"
            )
        if "inner_name" in options and self.base in (nnx.Embed, nnx.Conv):
            raise ValueError(
                f"inner_name is {rule.inner_name!r} for an nnx.{self.base.__name__}, which "
                "takes none; expected None: give linear layers a rule of their own"
            )
        return self.adapt(layer, **options, rngs=rngs)


def _kind(adapted: Any, kernel_shape: Callable[[Any], tuple[int, ...]]) -> Kind:
    return Kind(
        base=adapted.base_type,
        adapted=adapted,
        adapt=adapted,
        kernel_shape=kernel_shape,
        layout=adapted.layout,
        adapter_axes=adapted.adapter_axes,
        kernel=adapted.kernel_name,
    )


KINDS = (
    Kind(
        base=nnx.Linear,
        adapted=DoRALinear,
        adapt=DoRALinear.from_linear,
        kernel_shape=lambda layer: (layer.in_features, layer.out_features),
        layout=lambda layer: matrix_layout(layer.in_features, layer.out_features, layer.rank),
        adapter_axes=lambda layer, axes: {
            "lora_a": (axes[0], None),
            "lora_b": (None, axes[1]),
            "magnitude": (axes[1],),
        },
    ),
    _kind(
        DoRALinearGeneral,
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
    ),
    _kind(DoRAEinsum, lambda layer: layer.kernel_shape),
    _kind(DoRAEmbed, lambda layer: (layer.num_embeddings, layer.features)),
    _kind(DoRAConv, lambda layer: layer.kernel_shape),
)


def kind_of_base(module: nnx.Module) -> Kind | None:
    """The kind of which `module` is an unadapted layer, if any."""
    for kind in KINDS:
        if isinstance(module, kind.base) and not isinstance(module, kind.adapted):
            return kind
    return None


def kind_of_adapted(module: nnx.Module) -> Kind | None:
    """The kind of which `module` is a DoRA layer, if any."""
    for kind in KINDS:
        if isinstance(module, kind.adapted):
            return kind
    return None
