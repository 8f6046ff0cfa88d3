"""The layers and parameters of a Flax model as PyTorch has them, and their conversion."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from dora_common.peft.layers import Layer, Shape, convolution_refusals
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import DoRALayer, kind_of
from jax_dora.layers.contraction import Contraction, MatrixAxes
from jax_dora.layers.dora_layer import Constant
from jax_dora.layers.stack import Stack
from jax_dora.peft.names import Names

Index = tuple[int, ...]


@dataclass(frozen=True)
class TorchParameter:
    """A PyTorch parameter of `shape` that corresponds to an array, or to one layer's part of a
    stacked array: `attribute` of the module at `path`, at index `at`. `axes` view the array as a
    matrix; None if Flax and PyTorch use the same layout.

    `is_transposed` if the order of axes differs: [in, out], or [window and in, out], here, and the
    output axis first, then the input axis, then the window in PyTorch. For packed experts PEFT also
    merges the expert axis with the rank axis: lora_a is [experts·r, in], lora_b [out, r·experts].
    """

    path: str
    attribute: str
    at: tuple[Any, ...]
    shape: Shape
    axes: MatrixAxes | None = None
    is_transposed: bool = False

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns this layer's part of the array in PyTorch's layout."""
        if self.axes is not None:
            array = self.axes.to_matrices(array)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        if self.is_transposed:
            view, order = self._view_and_order()
            array = array.reshape(view).transpose(order)
        return np.ascontiguousarray(array.reshape(self.shape))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns an array in PyTorch's layout in Flax's layout: the inverse of `to_torch`."""
        if self.axes is None:
            return array.reshape(self.shape)
        if self.is_transposed:
            view, order = self._view_and_order()
            array = array.reshape([view[axis] for axis in order]).transpose(np.argsort(order))
        matrices: Any = array.reshape(self.axes.matrices)
        return self.axes.from_matrices(matrices)  # pyright: ignore[reportReturnType]

    def _view_and_order(self) -> tuple[Shape, Shape]:
        """Returns the shape (experts, *window, in, out) of the matrices, with one expert for other
        layers, and PyTorch's order of these axes: (out, in, experts, *window), or (experts, out,
        in, *window) for lora_a."""
        assert self.axes is not None
        experts, rows, columns = self.axes.matrices
        window = self.shape[2:]
        count = len(window)
        order = (count + 2, count + 1, 0)
        if self.attribute == "lora_a":
            order = (0, *order[:2])
        view = (experts, *window, rows // math.prod(window), columns)
        return view, (*order, *range(1, count + 1))


@dataclass(frozen=True)
class TorchLayer:
    """The part of a weight with index `index`, with PEFT's record of it: a folder stores each layer
    of a stack apart, and this finds the layer's place in the stack's arrays."""

    weight: AdaptableWeight
    index: Index
    layer: Layer

    @property
    def path(self) -> str:
        return self.weight.path

    @property
    def at(self) -> tuple[Any, ...]:
        """The index of the layer's part in the weight's array, and in its adapter's."""
        return self.weight.stack.at(self.index)

    def parameter(self) -> TorchParameter:
        """Returns the weight of a Linear or a convolution."""
        module: Any = self.weight.module
        if self.layer.kind == "conv":
            # Both layouts order the groups alike, so that only the window axes have to move.
            axes = Contraction.of_convolution(tuple(module.kernel_shape), 1, 1).kernel
        else:
            axes = self.weight.contraction(1).kernel
        window = self.layer.kernel_size
        shape = (self.layer.out_features, axes.matrices[1] // math.prod(window), *window)
        path, param = self.weight.module_paths[0], self.weight.param
        return TorchParameter(path, param, self.at, shape, axes, is_transposed=True)

    def adapter_parameters(self, rank: int) -> dict[str, TorchParameter]:
        """Returns lora_a, lora_b and magnitude of an adapter of rank `rank`, by name."""
        contraction = self.weight.contraction(rank)
        return {
            name: TorchParameter(
                self.path,
                name,
                self.at,
                shape,
                getattr(contraction, name),
                is_transposed=name != "magnitude",
            )
            for role, shape in self.layer.shapes(rank).items()
            for name in [role.replace("embedding_", "lora_")]
        }


def parameters_of(
    path: str, index: Index, stack: Stack, module: nnx.Module, layers: Mapping[str, TorchLayer]
) -> Iterator[TorchParameter]:
    """Yields the base model's parameters in the module at `path`, or in one layer, `index`, of its
    stack. `layers` are those of the module's weights, by the weights' names in it."""
    own_layer = next((one.layer for one in layers.values() if one.weight.is_layer), None)
    for attribute, value in vars(module).items():
        if not isinstance(value, nnx.Param | nnx.BatchStat):
            continue
        if isinstance(value, nnx.LoRAParam | Constant) or not hasattr(value, "shape"):
            continue  # part of an adapter, or several arrays, which have no name in PyTorch
        own_stack: Stack | None = stack
        if isinstance(value, nnx.BatchStat):
            own_stack = _stack_of_statistics(value, stack)
        if own_stack is None:
            continue
        at, shape = own_stack.at(index), own_stack.layer_part(value.get_value().shape)
        if attribute in layers and layers[attribute].layer.kind in ("linear", "conv"):
            yield layers[attribute].parameter()
        elif attribute in layers or own_layer is None:
            yield TorchParameter(path, attribute, at, shape)
        else:
            yield TorchParameter(path, attribute, at, (own_layer.out_features,))


def _stack_of_statistics(variable: nnx.BatchStat, stack: Stack) -> Stack | None:
    """Returns how the statistics in a module with stacked parameters are stacked: along the
    parameters' axis or the leading one; None if the shape does not show which."""
    shape = variable.get_value().shape
    candidates = {stack, Stack(stack.shape)}
    found = [one for one in candidates if one.stack_part(shape) == stack.shape]
    return found[0] if len(found) == 1 else None


def torch_layer(
    weight: AdaptableWeight, names: Names, name_of: Callable[[str], str]
) -> Layer | None:
    """Returns the PyTorch layer for a weight, or for one layer's part of a stacked one; None if
    there is none that PEFT can adapt. `name_of` translates a path to the name of the PyTorch
    module."""
    if weight.is_layer:
        return _layer(name_of(weight.path), weight.module, kind_of(weight.module))
    kernel = weight.contraction(1).kernel
    experts, features, width = kernel.matrices
    if not kernel.batch:
        return Layer(name_of(weight.path), "linear", features, width)
    param = names.parameter(weight.param)
    return Layer(
        f"{name_of(weight.module_paths[0])}.{param}".lstrip("."),
        "experts",
        features,
        width,
        experts=experts,
        is_in_order=param in names.experts,
    )


def _layer(name: str, module: Any, kind: type[DoRALayer]) -> Layer | None:
    if kind.base_type is nnx.Embed:
        features, width = kind.unstacked_shape(module)
        return Layer(name, "embedding", features, width)
    if kind.base_type is nnx.Conv:
        *window, _, width = module.kernel_shape
        refusals = convolution_refusals(
            module.feature_group_count,
            window,
            _each(module.kernel_dilation, len(window)),
            _padding_mode(module.padding, window),
        )
        if any(step != 1 for step in _each(module.input_dilation, len(window))):
            refusals = (*refusals, "has input dilation")
        return Layer(name, "conv", module.in_features, width, tuple(window), refusals)
    # PEFT does not support transposed convolutions.
    if kind.base_type is nnx.ConvTranspose or not _is_linear(module, kind):
        return None
    _, features, width = kind.contraction_of(module).kernel.matrices
    return Layer(name, "linear", features, width)


def _each(steps: int | Sequence[int] | None, axes: int) -> Sequence[int]:
    return (steps or 1,) * axes if steps is None or isinstance(steps, int) else steps


def _padding_mode(padding: Any, window: Sequence[int]) -> str:
    """Returns PyTorch's padding_mode: "zeros" also for "CAUSAL" padding and padding that differs
    between both sides, since PyTorch models then pad the input with zeros themselves."""
    if padding in ("CIRCULAR", "REFLECT") and any(size > 1 for size in window):
        return padding.lower()
    return "zeros"


def _is_linear(module: Any, kind: type[DoRALayer]) -> bool:
    """Returns whether a projection corresponds to a PyTorch Linear: its kernel has no batch axes,
    and the output has its axes in the kernel's order."""
    if kind.base_type is nnx.Einsum and not module.einsum_str:
        return False
    contraction = kind.contraction_of(module)
    out, axes = contraction.labels("o"), len(kind.unstacked_shape(module))
    has_matrix = set(contraction.roles) == {"i", "o"} and len(set(contraction.weight)) == axes
    return has_matrix and out == tuple(label for label in contraction.y if label in out)
