"""`AdaptableWeight`: a weight of a model, and whether and how it can be adapted."""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
from flax import nnx

from dora_common.rules import assign, listing
from jax_dora.layers import DoRALayer, dora_class_of, kind_of
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.quantised_kernel import check_kernel
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import (
    STACK_LETTERS,
    Stack,
    innermost,
    stack_axes_of,
    stacked_axes,
    without_stack_axes,
)
from jax_dora.ops import quantised
from jax_dora.tracing.registry import class_name, scan_axis

_LOG = logging.getLogger("jax_dora")


@dataclasses.dataclass(frozen=True)
class AdaptableWeight:
    """A weight of a model, or a module without weights.

    It compares equal to the same weight of another model with the same structure.

    Attributes:
      paths: the paths by which a rule can match the weight; the first is its own path.
      module_paths: the paths of the module that owns the weight.
      param: the parameter's name in that module; "" for a module without weights. For a parameter
        inside a list, tuple or dict, the path from the module to it.
      shape: the weight's shape; () for a module without weights.
      axes: one letter for each axis, as in `jax_dora.register`; "" if they are not known. Those of
        a layer are known if something other than the layer shows how layers are stacked in it.
      is_layer: whether a `DoRALayer` replaces the module. Otherwise the module keeps its class and
        gets the adapter's arrays as further attributes.
      reader: the path of the module whose methods read the weight, and the path from there to the
        owner.
      is_linear: whether "all-linear" selects the weight.
      is_lookup: if `is_layer` is False, whether the weight is an embedding.
      is_adapted: whether the weight has an adapter.
      refusal: why the weight cannot be adapted, or "".
      how: what adapts the weight, or what is known about it, in a few words.
      merged: how many operations get the merged weight W', a temporary of the weight's size.
      is_matched: whether rules may match the weight.
      is_leading: whether unknown stack axes are assumed to be the leading ones; see `infer_stack`.
      rule: the rule that matches the weight, if rules were assigned.
      modules: the modules of the model by all their paths; empty in a description without a model.
      variable: the parameter, if it is no attribute of the module: that of a linen module, or one
        inside a list, tuple or dict, which is an attribute of the module or the value of one of its
        parameters.
    """

    paths: tuple[str, ...]
    module_paths: tuple[str, ...]
    param: str
    shape: tuple[int, ...] = ()
    axes: str = ""
    is_layer: bool = False
    reader: tuple[str, tuple[str, ...]] | None = None
    is_linear: bool = False
    is_lookup: bool = False
    is_adapted: bool = False
    refusal: str = ""
    how: str = dataclasses.field(default="", compare=False)
    merged: int = dataclasses.field(default=0, compare=False)
    is_matched: bool = True
    is_leading: bool = False
    rule: DoRARule | None = None
    modules: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    variable: nnx.Param | None = dataclasses.field(default=None, compare=False, repr=False)

    def replace(self, **changes: Any) -> Self:
        """Returns the weight with some attributes replaced."""
        return dataclasses.replace(self, **changes)

    def in_model(self, modules: Mapping[str, Any]) -> Self | None:
        """Returns the weight of a model with these modules by path, or None if it has none."""
        owner, (reader, _) = modules.get(self.module_paths[0]), self.reader or ("", ())
        shape = getattr(getattr(owner, self.param, None), "shape", ())
        if reader not in modules or len(shape) < len(self.axes):
            return None
        return self.replace(shape=tuple(shape), modules=modules, is_adapted=False)

    @property
    def path(self) -> str:
        """The weight's own path."""
        return self.paths[0]

    @property
    def status(self) -> str:
        """The weight's status in `jax_dora.coverage`."""
        if self.is_adapted:
            return "adapted"
        return "not adaptable" if self.refusal else "adaptable"

    @property
    def merged_bytes(self) -> int:
        """The size of all temporaries W' of one call, in fp32."""
        return 4 * math.prod(self.shape) * self.merged

    @property
    def module(self) -> Any:
        """The module that owns the weight."""
        return self.modules[self.module_paths[0]]

    @property
    def parameter(self) -> nnx.Param:
        """The weight's parameter."""
        return getattr(self.module, self.param) if self.variable is None else self.variable

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter, unlike a `WithAux` of `qwix.quantize_model`."""
        return isinstance(self.parameter, nnx.Variable)

    def check(self) -> None:
        """Raises the errors of `DoRALayer.check`, `check_kernel` and `infer_stack` if the weight
        cannot be adapted, by what `refusal` does not tell; TypeError also if it is no parameter, or
        is quantised and its module's own code reads it."""
        if not self.is_parameter:
            raise TypeError(self.why_no_parameter())
        self.check_rule()
        module, value = self.module, self.parameter.get_value()
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
        check_kernel(value, self.contraction(1), self.stack)

    def check_rule(self) -> None:
        """Raises ValueError if the weight's rule has an option that only layers have."""
        if not self.is_layer and self.rule and self.rule.adapt_attend is not None:
            raise ValueError(
                f"adapt_attend is {self.rule.adapt_attend!r} for a weight that its module's own "
                "code reads; expected None, since this adapter applies wherever the weight is read"
            )

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
            known = stack_axes_of(self.axes)
            return infer_stack(self.module, known or (() if self.is_leading else None))
        return stack_of_weight(self.shape, self.axes)

    def contraction(self, rank: int) -> Contraction:
        """Returns how to view a single layer's weight, and an adapter of this rank, as matrices."""
        if self.is_layer:
            return kind_of(self.module).contraction_of(self.module, rank)
        return contraction_of_weight(self.shape, self.axes, rank)

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """The sizes (in, out) of a single layer's weight as a matrix."""
        _, in_features, out = self.contraction(1).kernel.matrices
        return in_features, out

    @property
    def result_dtype(self) -> Any:
        """The dtype of the result for an input of the weight's dtype."""
        return getattr(self.module, "dtype", None) or self.parameter.dtype

    def abstract(self) -> Self:
        """Returns the kernel of a layer without the model: in a copy of the layer whose arrays are
        `jax.ShapeDtypeStruct`s, with the axes that `stack` has found."""
        graphdef, state = nnx.split(self.module)
        arrays = jax.tree.map(_abstract_array, state)
        axes = self.stack.combine(STACK_LETTERS, kind_of(self.module).kernel_axes(self.module))
        layer = nnx.merge(graphdef, arrays)
        return self.replace(axes="".join(axes), modules=dict.fromkeys(self.module_paths, layer))

    def attribute(self, name: str) -> str:
        """Returns the name of the attribute that stores the adapter's `name`, such as "lora_a", in
        the weight's module."""
        return name if self.is_layer or self.param == "kernel" else f"{self.param}_{name}"

    def described(self) -> str:
        """Returns the path, the class and the refusal, for an error message."""
        kind = class_name(type(self.module))
        if self.is_adapted:
            kind = type(self.module).__name__
        return f"{self.path} ({kind}){': ' if self.refusal else ''}{self.refusal}"


def _abstract_array(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def stack_of_weight(shape: tuple[int, ...], axes: str) -> Stack:
    """Returns how layers are stacked in a weight with these axes. `nnx.vmap` may have stacked whole
    models after they were adapted; their axes come first."""
    count = len(shape) - len(without_stack_axes(axes))
    return Stack.of_kernel(
        shape, innermost(stack_axes_of(axes), count), sum(role in "bo" for role in axes)
    )


def contraction_of_weight(shape: tuple[int, ...], axes: str, rank: int) -> Contraction:
    """Returns how to view a single layer of a weight, and an adapter of `rank`, as matrices."""
    return Contraction.of_weight(
        stack_of_weight(shape, axes).layer_part(shape), without_stack_axes(axes), rank
    )


def infer_stack(layer: Any, axes: tuple[int, ...] | None = None) -> Stack:
    """Returns how the parameters of a base layer or a DoRA layer are stacked.

    `axes` is the known `Stack.axes`; with () leading axes are assumed, with a warning, if the
    shapes allow several and the kernel has no `param_scan_axis`, MaxText's metadata; None raises
    ValueError then. Raises NotImplementedError if the kernel's shape is not a stack of such layers.
    """
    if isinstance(layer, DoRALayer):
        return layer.stack
    cls = dora_class_of(layer)
    assert cls is not None
    kernel = getattr(layer, cls.kernel_name)
    shape, single = tuple(kernel.shape), tuple(cls.unstacked_shape(layer))
    found = stacked_axes(shape, single)
    if not found:
        raise NotImplementedError(
            f"its {cls.kernel_name} has shape {shape}; expected {single}, with an additional axis "
            "for each stack of such layers that nnx.vmap has made"
        )
    count = len(found[0])
    if (bias := getattr(layer, "bias", None)) is not None:
        # The bias is stacked along the same axes, or along its last one.
        found = [one for one in found if _fits(shape, one, bias.shape)] or found
    # MaxText stacks along the same axis at every level, and its metadata name the outermost.
    by_metadata = (scan_axis(kernel) or 0,) * count
    if axes and (known := _among(found, innermost(axes, count), len(shape))):
        found = [known]
    elif scan_axis(kernel) is not None and by_metadata in found:
        found = [by_metadata]
    if len(found) > 1:
        listed = " or ".join(_positions_text(one, len(shape)) for one in found)
        problem = (
            f"its {cls.kernel_name} has shape {shape}, and a single layer's has shape {single}, so "
            f"it may be stacked along axis {listed}"
        )
        leading = (0,) * count
        if axes is None or leading not in found:
            raise ValueError(
                f"{problem}; expected a shape with only one possible axis: pass inputs for the "
                "model as example= of apply_dora, or set param_scan_axis in the metadata of the "
                f"{cls.kernel_name}"
            )
        assumed = _positions_text(leading, len(shape))
        _LOG.warning("%s: %s. Axis %s is assumed", cls.__name__, problem, assumed)
        found = [leading]
    return Stack.of_kernel(shape, found[0], len(cls.contraction_of(layer).magnitude.stored))


def _fits(shape: tuple[int, ...], axes: tuple[int, ...], bias_shape: tuple[int, ...]) -> bool:
    """Returns whether a kernel and a bias may be stacked along the same axes."""
    try:
        stack = Stack.of_kernel(shape, axes, len(bias_shape) - len(axes))
    except NotImplementedError:
        return False
    return stack.stack_part(bias_shape) == stack.shape


def _among(
    found: list[tuple[int, ...]], axes: tuple[int, ...], ndim: int
) -> tuple[int, ...] | None:
    """Returns `axes`, without negative ones, if a kernel of `ndim` axes may be stacked along them;
    else None. In `found`, outer stack axes come before inner ones."""
    positions = [sorted(_positions(one, ndim)) for one in found]
    if sorted(_positions(axes, ndim)) not in positions:
        return None
    return tuple(axis % (ndim - number) for number, axis in enumerate(axes))


def _positions(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Returns the stack axes of a kernel of `ndim` axes, outermost first."""
    return Stack((0,) * len(axes), axes).stack_part(range(ndim))


def _positions_text(axes: tuple[int, ...], ndim: int) -> str:
    return " and ".join(map(str, _positions(axes, ndim)))


def assign_rules(
    weights: Iterable[AdaptableWeight], rules: Sequence[DoRARule]
) -> list[AdaptableWeight]:
    """Returns each weight that a rule matches, with its rule."""
    matchable = [weight for weight in weights if weight.is_matched]
    chosen = assign(
        rules, [weight.paths for weight in matchable], [weight.is_linear for weight in matchable]
    )
    return [
        weight.replace(rule=rule) for weight, rule in zip(matchable, chosen, strict=True) if rule
    ]


def raise_for(weights: Iterable[AdaptableWeight], error: type[Exception], message: str) -> None:
    """Raises `error` with the message and the list of weights, if there are any."""
    if described := [weight.described() for weight in weights]:
        raise error(f"{message}:{listing(described)}")


def raise_for_no_parameters(weights: Iterable[AdaptableWeight], message: str) -> None:
    """Raises TypeError with the message and the weights that are no parameter, if any."""
    found = [weight for weight in weights if weight.param and not weight.is_parameter]
    raise_for(found, TypeError, message)
