"""A Flax model as PyTorch has it: by other names, and laid out otherwise."""

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from dora_common.peft.layers import Layer
from jax_dora.adapt.adapter import AdaptedWeight
from jax_dora.adapt.sites import Site
from jax_dora.adapt.stack import stack_of
from jax_dora.adapt.tree import check_model, find_modules, named_in_errors
from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.layout import Layout
from jax_dora.layers.stack import Stack
from jax_dora.peft.layers import torch_layer
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import Index, TorchParameter, parameters_of
from jax_dora.peft.weights import in_order, layer_of, torch_weights

# The names of a head that is None where a model ties it to its embedding.
_TIED_HEADS = ("lm_head", "embed_out")


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
      stacks: by path, how layers are stacked in the module's arrays.
      layers: what can be adapted or is, by name.
      parameters: of the base model, by name: by each name of a module that is shared, and by that
        of a head which is None since it is tied to the embedding.
      names: of every module, and its path.
      tied_heads: by the name of the weight, the paths of such heads.
      weights: those that are no layers of their own, by path.
    """

    modules: Mapping[str, nnx.Module]
    kinds: Mapping[str, type[DoRALayer]]
    stacks: Mapping[str, Stack]
    layers: Mapping[str, TorchLayer]
    parameters: Mapping[str, TorchParameter]
    names: Mapping[str, str]
    tied_heads: Mapping[str, str]
    weights: Mapping[str, Site]

    def variable(self, parameter: TorchParameter) -> nnx.Variable:
        return getattr(self.modules[parameter.path], parameter.attribute)

    def arrays(self) -> dict[str, Hashable]:
        """Returns what identifies the array of every parameter, by name."""
        return {name: (id(self.variable(one)), one.at) for name, one in self.parameters.items()}

    def holder(self, path: str) -> Any:
        """Returns what holds the adapter of the layer or weight at `path`, under the names lora_a,
        lora_b and magnitude."""
        return self.weights[path].adapter if path in self.weights else self.modules[path]

    def layout(self, path: str, rank: int) -> Layout:
        """Returns how one layer at `path` and an adapter of this rank are matrices."""
        if path in self.weights:
            return self.weights[path].layout(rank)
        return self.kinds[path].layout_of(self.modules[path], rank)

    def of_adapter(self, layer: TorchLayer, rank: int) -> dict[str, TorchParameter]:
        """Returns lora_a, lora_b and magnitude of a layer with an adapter of this rank."""
        layout = self.layout(layer.path, rank)
        at = self.stacks[layer.path].at(layer.index)
        return {
            name: TorchParameter(
                layer.path,
                name,
                at,
                shape,
                getattr(layout, name),
                is_transposed=name != "magnitude",
            )
            for role, shape in layer.layer.shapes(rank).items()
            for name in [role.replace("embedding_", "lora_")]
        }


def torch_view(
    model: nnx.Module,
    names: Names,
    held: Iterable[AdaptedWeight] = (),
    stack_axes: Mapping[str, int] | None = None,
) -> TorchView:
    """Returns the model as PyTorch would name and lay it out.

    Args:
      held: as `torch_weights`' of the model.
      stack_axes: along which axes layers are stacked, by path, where that is known.

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
    stacks: dict[str, Stack] = {}
    for path in kinds:
        with named_in_errors(path, "named as in PyTorch"):
            stacks[path] = stack_of(modules[path], (stack_axes or {}).get(path, 0))
    weights = torch_weights(model, held)
    for weight in weights.values():
        stacks.setdefault(weight.found.paths[0], weight.stack)
    stacks |= {path: _stack_around(path, stacks, names) for path in modules if path not in stacks}

    layers, parameters, names_of = {}, {}, {}
    for found in all_found:
        path, module = found.paths[0], found.module
        for other, index in itertools.product(found.paths, stacks[path].indices()):
            name = names.module(_without_sequential(other, modules), index)
            if names_of.get(name, path) != path:
                raise ValueError(
                    f"names calls two modules {name!r}: the one at {names_of[name]!r} and the one "
                    f"at {path!r}; expected a name for each"
                )
            layer, weight = torch_layer(name, module, kinds.get(path))
            if other == path:
                names_of[name] = path
                if layer is not None:
                    layers[name] = TorchLayer(path, index, layer)
            for one in parameters_of(
                path, index, stacks[path], module, kinds.get(path), layer, weight
            ):
                parameters[".".join(filter(None, (name, names.parameter(one.attribute))))] = one
    for path, weight in weights.items():
        stacks[path] = weight.stack
        for index in weight.stack.indices():
            layer = layer_of(weight, names, index)
            layers[layer.name] = TorchLayer(path, index, layer)
            if layer.kind == "linear":
                _as_linear(parameters, weight, layer, index, names)
    layers = in_order(layers, names)
    tied_heads = _tied_heads(modules, names)
    embeddings = [name for name, one in layers.items() if one.layer.kind == "embedding"]
    if len(embeddings) != 1:
        tied_heads = {}
    for head in tied_heads:
        parameters[head] = parameters[f"{embeddings[0]}.{names.parameter('embedding')}"]
    return TorchView(modules, kinds, stacks, layers, parameters, names_of, tied_heads, weights)


def _as_linear(
    parameters: dict[str, TorchParameter],
    site: Site,
    layer: Layer,
    index: Index,
    names: Names,
) -> None:
    """Gives a weight the name and the shape that a Linear's has in PyTorch."""
    module = names.module(site.found.paths[0], index)
    parameters.pop(".".join(filter(None, (module, names.parameter(site.param)))), None)
    parameters[f"{layer.name}.weight"] = TorchParameter(
        site.found.paths[0],
        site.param,
        site.stack.at(index),
        (layer.out_features, layer.in_features),
        site.layout(1).kernel,
        is_transposed=True,
    )


def _tied_heads(modules: Mapping[str, nnx.Module], names: Names) -> dict[str, str]:
    """Returns the paths of the heads that are None, by the name of the weight that they have in
    PyTorch."""
    paths = [
        "/".join(filter(None, (path, attribute)))
        for path, module in modules.items()
        for attribute in _TIED_HEADS
        if getattr(module, attribute, module) is None
    ]
    return {f"{names.module(path)}.{names.parameter('kernel')}": path for path in paths}


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


def _stack_around(path: str, stacks: Mapping[str, Stack], names: Names) -> Stack:
    """Returns the stack that a module which cannot be adapted lies in, such as a norm beside the
    projections: that of the layers and weights that lie in it too."""
    parts = path.split("/")
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1] in names.stacks:
            inside = "/".join(parts[:length]) + "/"
            found = {stack for other, stack in stacks.items() if f"{other}/".startswith(inside)}
            if len(found) == 1:
                return found.pop()
    return Stack()
