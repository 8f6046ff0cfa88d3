"""The parameters of a Flax model as PyTorch lays them out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from dora_common.peft.layers import Layer, Shape
from jax_dora.layers import DoRALayer
from jax_dora.layers.base import Constant
from jax_dora.layers.layout import Axes
from jax_dora.layers.stack import Stack

Index = tuple[int, ...]


@dataclass(frozen=True)
class TorchParameter:
    """An array, or one layer's part of a stacked one.

    Attributes:
      path: of the module that holds it.
      attribute: its name there.
      at: what to index the array with for the layer's part, where layers are stacked.
      shape: in PyTorch.
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


def parameters_of(
    path: str,
    index: Index,
    stack: Stack,
    module: nnx.Module,
    kind: type[DoRALayer] | None,
    layer: Layer | None,
    weight: Axes | None,
) -> Iterator[TorchParameter]:
    """Yields the base model's parameters of one module, or of one layer of a stack.

    Args:
      path: of the module.
      index: of the layer in `stack`.
      kind: the class that adapts the module, or None.
      layer: what PyTorch would have in its place, or None.
      weight: how the kernel is a matrix then.
    """
    for attribute, value in vars(module).items():
        if not isinstance(value, nnx.Param | nnx.BatchStat):
            continue
        if isinstance(value, nnx.LoRAParam | Constant):
            continue
        its = _stack_of_statistics(value, stack) if isinstance(value, nnx.BatchStat) else stack
        if its is None:
            continue
        at, shape = its.at(index), its.without(value.get_value().shape)
        if layer is None or kind is None:
            yield TorchParameter(path, attribute, at, shape)
        elif attribute != kind.kernel_name:
            yield TorchParameter(path, attribute, at, (layer.out_features,))
        elif layer.kind == "embedding":
            yield TorchParameter(path, attribute, at, (layer.in_features, layer.out_features))
        else:
            assert weight is not None
            window_and_in = weight.matrices[1]
            features = window_and_in // math.prod(layer.kernel_size)
            shape = (layer.out_features, features, *layer.kernel_size)
            yield TorchParameter(path, attribute, at, shape, weight, is_transposed=True)


def _stack_of_statistics(variable: nnx.BatchStat, stack: Stack) -> Stack | None:
    """Returns how statistics beside parameters of this stack are stacked: as these, or along the
    leading axis, which transforms can keep them apart by; None where their shape does not tell."""
    shape = variable.get_value().shape
    ways = {stack, Stack(stack.shape)}
    fits = [one for one in ways if one.of_stack(shape) == stack.shape]
    return fits[0] if len(fits) == 1 else None
