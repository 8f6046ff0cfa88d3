"""The parameters of a Flax model as PyTorch lays them out."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from dora_common.peft.layers import Layer, Shape
from jax_dora.adapt.site import Site
from jax_dora.layers.base import Constant
from jax_dora.layers.layout import Axes, convolution_layout
from jax_dora.layers.stack import Stack

Index = tuple[int, ...]


@dataclass(frozen=True)
class TorchParameter:
    """An array, or one layer's part of a stacked one.

    Attributes:
      path: the path of the module that holds it.
      attribute: its name there.
      at: the index of the layer's part in the array, where layers are stacked.
      shape: its shape in PyTorch.
      axes: how the array is a matrix; None where Flax and PyTorch lay it out alike.
      is_transposed: the matrix is [in, out], or [window and in, out], and PyTorch has the output
        axis first, then the input axis, then the window; of packed experts PEFT joins the experts
        with the rank: lora_a is [experts·r, in], lora_b [out, r·experts].
    """

    path: str
    attribute: str
    at: tuple[Any, ...]
    shape: Shape
    axes: Axes | None = None
    is_transposed: bool = False

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns this layer's part of the array, as PyTorch has it."""
        if self.axes is not None:
            array = self.axes.to_matrices(array)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        if self.is_transposed:
            view, order = self._view_and_order()
            array = array.reshape(view).transpose(order)
        return np.ascontiguousarray(array.reshape(self.shape))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Reverses `to_torch`."""
        if self.axes is None:
            return array.reshape(self.shape)
        if self.is_transposed:
            view, order = self._view_and_order()
            array = array.reshape([view[axis] for axis in order]).transpose(np.argsort(order))
        matrices: Any = array.reshape(self.axes.matrices)
        return self.axes.from_matrices(matrices)  # pyright: ignore[reportReturnType]

    def _view_and_order(self) -> tuple[Shape, Shape]:
        """Returns the matrices' shape with the window apart, (experts, *window, in, out), and the
        order of these axes in PyTorch: (out, in, experts, *window), or of lora_a (experts, out, in,
        *window); of all but packed experts there is one."""
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
    """One layer that can be adapted or is: one layer's part of the weight at `site`."""

    site: Site
    index: Index
    layer: Layer

    @property
    def path(self) -> str:
        return self.site.names[0]

    @property
    def at(self) -> tuple[Any, ...]:
        """The index, in an array of the site's, of the layer's part."""
        return self.site.stack.at(self.index)

    def weight(self) -> TorchParameter:
        """Returns the weight of a Linear or a convolution."""
        module: Any = self.site.found.module
        if self.layer.kind == "conv":
            # Groups lie alike in both, so that the window is all there is to move.
            axes = convolution_layout(tuple(module.kernel_shape), 1, 1).kernel
        else:
            axes = self.site.layout(1).kernel
        window = self.layer.kernel_size
        shape = (self.layer.out_features, axes.matrices[1] // math.prod(window), *window)
        path, param = self.site.found.paths[0], self.site.param
        return TorchParameter(path, param, self.at, shape, axes, is_transposed=True)

    def of_adapter(self, rank: int) -> dict[str, TorchParameter]:
        """Returns lora_a, lora_b and magnitude of an adapter of this rank."""
        layout = self.site.layout(rank)
        return {
            name: TorchParameter(
                self.path,
                name,
                self.at,
                shape,
                getattr(layout, name),
                is_transposed=name != "magnitude",
            )
            for role, shape in self.layer.shapes(rank).items()
            for name in [role.replace("embedding_", "lora_")]
        }


def parameters_of(
    path: str, index: Index, stack: Stack, module: nnx.Module, layers: Mapping[str, TorchLayer]
) -> Iterator[TorchParameter]:
    """Yields the base model's parameters of one module, or of one layer of a stack.

    Args:
      path: of the module.
      index: of the layer in `stack`.
      layers: what PyTorch would have in the place of the module's weights, by their names here.
    """
    own_layer = next((one.layer for one in layers.values() if one.site.is_layer), None)
    for attribute, value in vars(module).items():
        if not isinstance(value, nnx.Param | nnx.BatchStat):
            continue
        if isinstance(value, nnx.LoRAParam | Constant) or not hasattr(value, "shape"):
            continue  # an adapter's, or several arrays, for which PyTorch has no name
        own_stack: Stack | None = stack
        if isinstance(value, nnx.BatchStat):
            own_stack = _stack_of_statistics(value, stack)
        if own_stack is None:
            continue
        at, shape = own_stack.at(index), own_stack.layer_part(value.get_value().shape)
        if attribute in layers and layers[attribute].layer.kind in ("linear", "conv"):
            yield layers[attribute].weight()
        elif attribute in layers or own_layer is None:
            yield TorchParameter(path, attribute, at, shape)
        else:
            yield TorchParameter(path, attribute, at, (own_layer.out_features,))


def _stack_of_statistics(variable: nnx.BatchStat, stack: Stack) -> Stack | None:
    """Returns how statistics beside parameters of this stack are stacked: as these, or along the
    leading axis, which transforms can keep them apart by; None where their shape does not tell."""
    shape = variable.get_value().shape
    possible = {stack, Stack(stack.shape)}
    found = [one for one in possible if one.stack_part(shape) == stack.shape]
    return found[0] if len(found) == 1 else None
