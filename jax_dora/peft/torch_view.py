"""A Flax model as PyTorch has it: by other names, and laid out otherwise."""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from dora_common.peft.layers import Layer, Shape, convolution_refusals
from jax_dora.adapt.stack import stack_shape
from jax_dora.adapt.tree import check_model, find_modules, named
from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.layout import Axes, convolution_layout, matrix_layout, projection_layout
from jax_dora.layers.stack import indices
from jax_dora.peft.names import Names

Index = tuple[int, ...]
# The names of a head that is None where a model ties it to its embedding.
_TIED_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class TorchParameter:
    """An array, or one layer's part of a stacked one.

    Attributes:
      path: of the module that holds it.
      attribute: its name there.
      index: of the layer, where layers are stacked.
      shape: in PyTorch.
      axes: how the array is a matrix; None where Flax and PyTorch lay it out alike.
      is_transposed: the matrix is [in, out], or [window and in, out], and PyTorch has the output
        axis first, then the input axis, then the window.
    """

    path: str
    attribute: str
    index: Index
    shape: Shape
    axes: Axes | None = None
    is_transposed: bool = False

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """This layer's part of the array, as PyTorch has it."""
        if self.axes is None:
            return array.reshape(self.shape)
        matrix: Any = self.axes.to_matrices(array)  # pyright: ignore[reportArgumentType]
        if not self.is_transposed:
            return matrix.reshape(self.shape)
        order = _flax_order(self.shape)
        matrix = matrix.reshape(tuple(self.shape[axis] for axis in order))
        return np.ascontiguousarray(matrix.transpose(tuple(np.argsort(order).tolist())))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """The reverse of `to_torch`."""
        if self.axes is None:
            return array.reshape(self.shape)
        array = array.reshape(self.shape)
        if self.is_transposed:
            array = array.transpose(_flax_order(self.shape))
        matrices: Any = array.reshape(self.axes.matrices)
        return self.axes.from_matrices(matrices)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class TorchLayer:
    """One layer that can be adapted or is."""

    path: str
    index: Index
    layer: Layer


@dataclass(frozen=True)
class TorchView:
    """A model by PyTorch's names.

    Attributes:
      modules: the module at every path.
      kinds: of the modules that can be adapted or are, by path.
      stacks: by path, the leading axes that stacking gave to the module's arrays.
      layers: what can be adapted or is, by name.
      parameters: of the base model, by name: by each name of a module that is shared, and by that
        of a head which is None since it is tied to the embedding.
      names: of every module, and its path.
      tied_heads: by the name of the weight, the paths of such heads.
    """

    modules: Mapping[str, nnx.Module]
    kinds: Mapping[str, type[DoRALayer]]
    stacks: Mapping[str, Shape]
    layers: Mapping[str, TorchLayer]
    parameters: Mapping[str, TorchParameter]
    names: Mapping[str, str]
    tied_heads: Mapping[str, str]

    def variable(self, parameter: TorchParameter) -> nnx.Variable:
        return getattr(self.modules[parameter.path], parameter.attribute)

    def arrays(self) -> dict[str, Hashable]:
        """What identifies the array of every parameter."""
        return {name: (id(self.variable(one)), one.index) for name, one in self.parameters.items()}

    def adapted_paths(self) -> list[str]:
        return [path for path in self.kinds if isinstance(self.modules[path], DoRALayer)]

    def of_adapter(self, layer: TorchLayer, rank: int) -> dict[str, TorchParameter]:
        """lora_a, lora_b and magnitude of a layer that is adapted."""
        module: Any = self.modules[layer.path]
        layout = module.layout
        return {
            name: TorchParameter(
                layer.path,
                name,
                layer.index,
                shape,
                getattr(layout, name),
                is_transposed=name != "magnitude",
            )
            for role, shape in layer.layer.shapes(rank).items()
            for name in [role.replace("embedding_", "lora_")]
        }


def torch_view(model: nnx.Module, names: Names) -> TorchView:
    """
    Raises:
      TypeError: `model` is no nnx module.
      ValueError: two modules get the same name, or the layers of a stack get none.
    """
    check_model(model)
    # The members of a List are what has names; that of a Sequential has none of its own in PyTorch.
    all_found = [one for one in find_modules(model) if not isinstance(one.module, nnx.List)]
    modules = {found.paths[0]: found.module for found in all_found}
    kinds: dict[str, type[DoRALayer]] = {
        path: kind
        for path, module in modules.items()
        if (kind := type(module) if isinstance(module, DoRALayer) else dora_class_of(module))
    }
    stacks = {}
    for path in kinds:
        with named(path, "named as in PyTorch"):
            stacks[path] = stack_shape(modules[path])
    stacks |= {path: _stack_around(path, stacks, names) for path in modules if path not in stacks}

    layers, parameters, names_of = {}, {}, {}
    for found in all_found:
        path, module = found.paths[0], found.module
        for other, index in itertools.product(found.paths, indices(stacks[path])):
            name = names.module(_without_sequential(other, modules), index)
            if names_of.get(name, path) != path:
                raise ValueError(
                    f"names calls two modules {name!r}: the one at {names_of[name]!r} and the one "
                    f"at {path!r}; expected a name for each"
                )
            layer, weight = _layer(name, module, kinds.get(path))
            if other == path:
                names_of[name] = path
                if layer is not None:
                    layers[name] = TorchLayer(path, index, layer)
            for one in _parameters(path, index, module, kinds.get(path), layer, weight):
                parameters[".".join(filter(None, (name, names.parameter(one.attribute))))] = one
    tied_heads = _tied_heads(modules, names)
    embeddings = [name for name, one in layers.items() if one.layer.kind == "embedding"]
    if len(embeddings) != 1:
        tied_heads = {}
    for head in tied_heads:
        parameters[head] = parameters[f"{embeddings[0]}.{names.parameter('embedding')}"]
    return TorchView(modules, kinds, stacks, layers, parameters, names_of, tied_heads)


def _tied_heads(modules: Mapping[str, nnx.Module], names: Names) -> dict[str, str]:
    """The paths of the heads that are None, by the name of the weight that they have in PyTorch."""
    paths = [
        "/".join(filter(None, (path, attribute)))
        for path, module in modules.items()
        for attribute in _TIED_HEADS
        if getattr(module, attribute, module) is None
    ]
    return {f"{names.module(path)}.{names.parameter('kernel')}": path for path in paths}


def to_matrix(array: np.ndarray) -> np.ndarray:
    """PyTorch's [out, in, *window] as the matrix [*window and in, out]."""
    flax = array.transpose(_flax_order(array.shape))
    return flax.reshape(-1, flax.shape[-1])


def _flax_order(shape: Shape) -> tuple[int, ...]:
    """Returns the order that turns PyTorch's axes (out, in, *window) into Flax's (*window, in,
    out)."""
    return (*range(2, len(shape)), 1, 0)


def _without_sequential(path: str, modules: Mapping[str, nnx.Module]) -> str:
    """PyTorch's Sequential holds its members itself, Flax's in a list called layers."""
    parts = path.split("/")
    return "/".join(
        part
        for position, part in enumerate(parts)
        if not (
            part == "layers" and isinstance(modules.get("/".join(parts[:position])), nnx.Sequential)
        )
    )


def _stack_around(path: str, stacks: Mapping[str, Shape], names: Names) -> Shape:
    """The axes of the stack that a module which cannot be adapted lies in, such as a norm beside
    the projections: those of the layers that lie in it too."""
    parts = path.split("/")
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1] in names.stacks:
            inside = "/".join(parts[:length]) + "/"
            shapes = {shape for other, shape in stacks.items() if other.startswith(inside)}
            if len(shapes) == 1:
                return shapes.pop()
    return ()


def _layer(
    name: str, module: Any, kind: type[DoRALayer] | None
) -> tuple[Layer | None, Axes | None]:
    """What PyTorch would have, and how the weight is a matrix; no layer where it has no such."""
    if kind is None:
        return None, None
    if kind.base_type is nnx.Embed:
        features, width = module.num_embeddings, module.features
        return Layer(name, "embedding", features, width), matrix_layout(features, width, 1).kernel
    if kind.base_type is nnx.Linear:
        features, width = module.in_features, module.out_features
        return Layer(name, "linear", features, width), matrix_layout(features, width, 1).kernel
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
        layer = Layer(name, "conv", module.in_features, width, tuple(window), refusals)
        # Groups lie alike in both, so that the window is all there is to move.
        return layer, convolution_layout(tuple(module.kernel_shape), 1, 1).kernel
    return _projection(name, module, kind)


def _each(steps: int | Sequence[int] | None, axes: int) -> Sequence[int]:
    return (steps or 1,) * axes if steps is None or isinstance(steps, int) else steps


def _padding_mode(padding: Any, window: Sequence[int]) -> str:
    """PyTorch's padding_mode. It has none for "CAUSAL", whose zeros a PyTorch model puts before the
    input itself, as for what is padded differently on both sides."""
    if padding in ("CIRCULAR", "REFLECT") and any(size > 1 for size in window):
        return padding.lower()
    return "zeros"


def _projection(name: str, module: Any, kind: type[DoRALayer]) -> tuple[Layer | None, Axes | None]:
    """LinearGeneral and Einsum, as the Linear that they are where they have no batch axes."""
    if kind.base_type is nnx.Einsum and not module.einsum_str:
        return None, None
    equation = kind.equation(module)  # pyright: ignore[reportAttributeAccessIssue]
    order = "".join(map(equation.sort, equation.kernel))
    shape = kind.unstacked_shape(module)
    out = equation.kernel_letters("o")
    is_linear = set(order) == {"i", "o"} and len(set(equation.kernel)) == len(shape)
    if not is_linear or out != "".join(letter for letter in equation.y if letter in out):
        return None, None
    sizes = {
        sort: tuple(size for size, one in zip(shape, order, strict=True) if one == sort)
        for sort in "io"
    }
    axes = projection_layout((), sizes["i"], sizes["o"], order, 1).kernel
    _, features, width = axes.matrices
    return Layer(name, "linear", features, width), axes


def _parameters(
    path: str,
    index: Index,
    module: nnx.Module,
    kind: type[DoRALayer] | None,
    layer: Layer | None,
    weight: Axes | None,
) -> Iterator[TorchParameter]:
    for attribute, value in vars(module).items():
        if not isinstance(value, nnx.Param | nnx.BatchStat) or isinstance(value, nnx.LoRAParam):
            continue
        shape = tuple(value.get_value().shape)[len(index) :]
        if layer is None or kind is None:
            yield TorchParameter(path, attribute, index, shape)
        elif attribute != kind.kernel_name:
            yield TorchParameter(path, attribute, index, (layer.out_features,))
        elif layer.kind == "embedding":
            yield TorchParameter(path, attribute, index, (layer.in_features, layer.out_features))
        else:
            assert weight is not None
            window_and_in = weight.matrices[1]
            features = window_and_in // math.prod(layer.kernel_size)
            shape = (layer.out_features, features, *layer.kernel_size)
            yield TorchParameter(path, attribute, index, shape, weight, is_transposed=True)
