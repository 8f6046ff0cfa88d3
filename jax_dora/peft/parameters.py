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
        axis first, then the input axis, then the window.
      of_experts: "lora_a", "lora_b" or "magnitude" of packed experts; else "".
    """

    path: str
    attribute: str
    at: tuple[Any, ...]
    shape: Shape
    axes: Axes | None = None
    is_transposed: bool = False
    of_experts: str = ""

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Returns this layer's part of the array, as PyTorch has it."""
        if self.axes is None:
            return array.reshape(self.shape)
        matrix: Any = self.axes.to_matrices(array)  # pyright: ignore[reportArgumentType]
        if self.of_experts:
            return experts_to_torch(self.of_experts, matrix)
        if not self.is_transposed:
            return matrix.reshape(self.shape)
        order = _flax_order(self.shape)
        matrix = matrix.reshape(tuple(self.shape[axis] for axis in order))
        return np.ascontiguousarray(matrix.transpose(tuple(np.argsort(order).tolist())))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Reverses `to_torch`."""
        if self.axes is None:
            return array.reshape(self.shape)
        if self.of_experts:
            matrices = experts_from_torch(self.of_experts, array, self.axes.matrices)
            return self.axes.from_matrices(matrices)  # pyright: ignore[reportReturnType, reportArgumentType]
        array = array.reshape(self.shape)
        if self.is_transposed:
            array = array.transpose(_flax_order(self.shape))
        matrices: Any = array.reshape(self.axes.matrices)
        return self.axes.from_matrices(matrices)  # pyright: ignore[reportReturnType]


def _flax_order(shape: Shape) -> tuple[int, ...]:
    """Returns the order that turns PyTorch's axes (out, in, *window) into Flax's (*window, in,
    out)."""
    return (*range(2, len(shape)), 1, 0)


def experts_to_torch(name: str, matrices: np.ndarray) -> np.ndarray:
    """Returns lora_a [experts, in, r], lora_b [experts, r, out] or magnitude [experts, 1, out] as
    PEFT has it: [experts·r, in], [out, r·experts] or [experts, out]."""
    experts, rows, columns = matrices.shape
    if name == "lora_a":
        return matrices.transpose(0, 2, 1).reshape(experts * columns, rows)
    if name == "lora_b":
        return matrices.transpose(2, 1, 0).reshape(columns, rows * experts)
    return matrices.reshape(experts, columns)


def experts_from_torch(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reverses `experts_to_torch`.

    Args:
      shape: of the matrices.
    """
    experts, rows, columns = shape
    if name == "lora_a":
        return array.reshape(experts, columns, rows).transpose(0, 2, 1)
    if name == "lora_b":
        return array.reshape(columns, rows, experts).transpose(2, 1, 0)
    return array.reshape(shape)


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
