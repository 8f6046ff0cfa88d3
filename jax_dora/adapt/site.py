"""`Site`: a weight of a model, with whether and how it can be adapted."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx

from dora_common.rules import assign, listing
from jax_dora.adapt.infer_stack import infer_stack
from jax_dora.adapt.tree import FoundModule
from jax_dora.layers import DoRALayer
from jax_dora.layers.classes import kind_of
from jax_dora.layers.layout import Layout
from jax_dora.layers.quantised_kernel import check_kernel
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import Stack
from jax_dora.ops import quantised
from jax_dora.tracing.adapted_class import adapters_of
from jax_dora.tracing.registry import class_name
from jax_dora.tracing.weight_adapter import WeightAdapter, layout_of_weight, stack_of_weight


@dataclasses.dataclass(eq=False)
class Site:
    """A weight of a model, or a module without weights.

    Attributes:
      names: the paths by which a rule can match the weight; the first is its own path.
      found: the module that owns the weight.
      param: the parameter's name in that module; "" for a module without weights.
      is_layer: whether a `DoRALayer` replaces the module. Otherwise the module keeps its class and
        gets the adapter's arrays as further attributes.
      axes: if `is_layer` is False, the weight's axes as in `AdapterSpec.axes`.
      stack_axes: if `is_layer` is True, the `Stack.axes` of the kernels, or None if these are
        unknown; see `infer_stack`.
      reader: the module whose methods read the weight, and the path from that module to the owner.
      is_linear: whether "all-linear" selects the weight.
      is_lookup: if `is_layer` is False, whether the weight is an embedding.
      is_adapted: whether the weight has an adapter.
      refusal: why the weight cannot be adapted, or "".
      how: what adapts the weight, or what is known about it, in a few words.
      merged: how many operations get the merged weight W', a temporary of the weight's size.
      is_matched: whether rules may match the weight.
      nested_param: a parameter that is inside a list, tuple or dict, rather than an attribute of
        the module. The container is an attribute of the module or the value of one of its
        parameters, and `param` is the path to the parameter.
    """

    names: tuple[str, ...]
    found: FoundModule
    param: str
    is_layer: bool = False
    axes: str = ""
    stack_axes: tuple[int, ...] | None = None
    reader: tuple[Any, tuple[str, ...]] | None = None
    is_linear: bool = False
    is_lookup: bool = False
    is_adapted: bool = False
    refusal: str = ""
    how: str = ""
    merged: int = 0
    is_matched: bool = True
    nested_param: nnx.Param | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape; () for a module without weights."""
        return tuple(self.parameter.shape) if self.param else ()

    @property
    def parameter(self) -> nnx.Param:
        """The weight's parameter."""
        if self.nested_param is not None:
            return self.nested_param
        return getattr(self.found.module, self.param)

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter, unlike a `WithAux` of `qwix.quantize_model`."""
        return isinstance(self.parameter, nnx.Variable)

    def check(self) -> None:
        """Checks that the weight can be adapted, by what `refusal` does not tell.

        Raises:
          TypeError: it is no parameter, is not of floats, or is quantised and its module does not
            compute with a quantised array.
          TypeError, ValueError, NotImplementedError: see `DoRALayer.check`, `check_kernel` and
            `infer_stack`.
        """
        if not self.is_parameter:
            raise TypeError(self.why_no_parameter())
        module, value = self.found.module, self.parameter.get_value()
        if self.is_layer:
            if (kind := kind_of(module)) is None:
                return  # a linen layer, which is checked when the model is called
            # The groups of a convolution divide the rank.
            rank = getattr(module, "feature_group_count", 1)
            kind.check(module, DoRARule("", rank, 1.0))
        elif quantised.is_quantised(value):
            raise TypeError(
                f"its {self.param} is quantised as {quantised.describe(value)}, but its module's "
                "own code reads it; expected a float array: dequantise it with qwix.dequantize"
            )
        check_kernel(value, self.layout(1), self.stack)

    def why_no_parameter(self) -> str:
        """Returns what a weight is that is no parameter, and what to do, for an error message."""
        return (
            f"its {self.param} is a {type(self.parameter).__name__}; expected an nnx.Param: "
            "quantise the float model with jax_dora.quantize instead of qwix.quantize_model"
        )

    @functools.cached_property
    def stack(self) -> Stack:
        """The axes along which layers are stacked in the weight."""
        if self.is_layer:
            return infer_stack(self.found.module, self.stack_axes)
        return stack_of_weight(self.shape, self.axes)

    def layout(self, rank: int) -> Layout:
        """Returns how to view a single layer's weight, and an adapter of this rank, as matrices."""
        if self.is_layer:
            return kind_of(self.found.module).layout_of(self.found.module, rank)
        return layout_of_weight(self.shape, self.axes, rank)

    @property
    def adapter(self) -> DoRALayer | WeightAdapter | None:
        """The DoRA layer or `WeightAdapter` with the weight's adapter; None if there is none."""
        if isinstance(self.found.module, DoRALayer):
            return self.found.module
        adapters = adapters_of(self.found.module)
        return next((adapter for adapter in adapters if adapter.spec.param == self.param), None)

    def described(self) -> str:
        """Returns the path, the class and the refusal, for an error message."""
        kind = class_name(type(self.found.module))
        if self.is_adapted:
            kind = type(self.found.module).__name__
        return f"{self.names[0]} ({kind}){': ' if self.refusal else ''}{self.refusal}"


def assign_rules(sites: Iterable[Site], rules: Sequence[DoRARule]) -> list[tuple[Site, DoRARule]]:
    """Returns each site that a rule matches, with its rule."""
    matchable = [site for site in sites if site.is_matched]
    chosen = assign(
        rules, [site.names for site in matchable], [site.is_linear for site in matchable]
    )
    return [(site, rule) for site, rule in zip(matchable, chosen, strict=True) if rule]


def raise_for_sites(sites: Iterable[Site], error: type[Exception], message: str) -> None:
    """Raises `error` with the message and the list of sites, if there are any."""
    if described := [site.described() for site in sites]:
        raise error(f"{message}:{listing(described)}")


def raise_for_no_parameters(sites: Iterable[Site], message: str) -> None:
    """Raises TypeError with the message and the sites whose weight is no parameter, if any."""
    found = [site for site in sites if site.param and not site.is_parameter]
    raise_for_sites(found, TypeError, message)
