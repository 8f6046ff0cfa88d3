"""A weight of a model, whether and how it can be adapted, and which rule does it."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx

from dora_common.rules import assign, listing
from jax_dora.adapt.infer_stack import infer_stack
from jax_dora.adapt.tree import Found
from jax_dora.layers import DoRALayer
from jax_dora.layers.layout import Layout
from jax_dora.layers.registry import kind_of
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import Stack
from jax_dora.weights.module import adapters_of
from jax_dora.weights.registry import class_name
from jax_dora.weights.weight_adapter import WeightAdapter, layout_of_weight, stack_of_weight


@dataclasses.dataclass(eq=False)
class Site:
    """A weight, or a module without one.

    Attributes:
      names: the paths that a rule can match it by; the first is its own.
      found: the module that owns it.
      param: its name there; "" for a module without weights.
      is_layer: whether a `DoRALayer` takes the module's place, rather than an adapter the place
        beside the weight.
      axes: of a weight that is no layer, as `AdapterSpec.axes`.
      stack_axis: of a layer the axis along which its kernel is a stack, where that is known, as by
        a traced call; as `stack_of`'s.
      reader: the module whose methods read it, and the path from there to the owner.
      is_linear: whether "all-linear" means it.
      is_lookup: of a weight that is no layer, whether it is an embedding.
      is_adapted: whether it holds an adapter.
      refusal: why it cannot be adapted, or "".
      how: what is known of it, in a few words.
      merged: how many readers are given the merged weight W', which is a temporary of its size.
      is_matched: whether rules may match it.
      contained: the parameter where it is no attribute of the module, but stands in a list, tuple
        or dict that is one, or that a parameter holds; `param` is the path to it then.
    """

    names: tuple[str, ...]
    found: Found
    param: str
    is_layer: bool = False
    axes: str = ""
    stack_axis: int | None = None
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
        """The weight's shape; () for a module without one."""
        return tuple(self.parameter.shape) if self.param else ()

    @property
    def parameter(self) -> nnx.Param:
        """The weight, where there is one."""
        held = self.nested_param
        return getattr(self.found.module, self.param) if held is None else held

    @functools.cached_property
    def stack(self) -> Stack:
        """The axes along which layers are stacked in the weight."""
        if self.is_layer:
            return infer_stack(self.found.module, self.stack_axis)
        return stack_of_weight(self.shape, self.axes)

    def layout(self, rank: int) -> Layout:
        """Returns how one layer of the weight and an adapter of this rank are matrices."""
        if self.is_layer:
            return kind_of(self.found.module).layout_of(self.found.module, rank)
        return layout_of_weight(self.shape, self.axes, rank)

    @property
    def adapter(self) -> DoRALayer | WeightAdapter | None:
        """The DoRA layer or `WeightAdapter` that holds the weight's adapter; None where there is
        none."""
        if isinstance(self.found.module, DoRALayer):
            return self.found.module
        found = adapters_of(self.found.module)
        return next((one for one in found if one.spec.param == self.param), None)

    def described(self) -> str:
        """Returns its path, its class and why it cannot be adapted, for a message."""
        kind = class_name(type(self.found.module))
        if self.is_adapted:
            kind = type(self.found.module).__name__
        return f"{self.names[0]} ({kind}){': ' if self.refusal else ''}{self.refusal}"


def assign_rules(found: Iterable[Site], rules: Sequence[DoRARule]) -> list[tuple[Site, DoRARule]]:
    """Returns the sites that rules match, each with its rule."""
    matchable = [site for site in found if site.is_matched]
    chosen = assign(
        rules, [site.names for site in matchable], [site.is_linear for site in matchable]
    )
    return [(site, rule) for site, rule in zip(matchable, chosen, strict=True) if rule]


def raise_for_sites(found: Iterable[Site], error: type[Exception], message: str) -> None:
    """Raises an error that lists these sites behind its message, if there are any."""
    if told := [site.described() for site in found]:
        raise error(f"{message}:{listing(told)}")
