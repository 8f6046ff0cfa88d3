"""A Flax model under PyTorch's names."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flax import nnx

from dora_common.peft.layers import Architecture, Layer
from jax_dora.adapt.inventory import LINEN_REFUSAL, find_weights
from jax_dora.adapt.tied_heads import tied_heads
from jax_dora.adapt.tree import by_path, check_model, find_modules, named_in_errors
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import kind_of
from jax_dora.layers.stack import Stack
from jax_dora.ops import quantised
from jax_dora.peft.names import Names
from jax_dora.peft.parameters import Index, TorchLayer, TorchParameter, parameters_of, torch_layer
from jax_dora.tracing.registry import why_unknown

_REMEDY = (
    "register its class with jax_dora.register, or pass load_adapter example=, inputs to call the "
    "model with"
)


@dataclass(frozen=True)
class NamedModel:
    """A model under PyTorch's names.

    Attributes:
      modules: the module at every path.
      stacks: how layers are stacked in the module's arrays, by path.
      layers: the layers that are adapted or can be adapted, by name.
      parameters: the base model's parameters by name. A shared module's parameters are included
        under each of its names, and the embedding also under the name of a head that is None
        since it is tied.
      names: the path of every module, by name.
      tied_heads: the paths of heads that are None, by the name of their weight.
      refusals: why weights of unknown modules cannot be adapted in this model, and the remedy, by
        the name that the weight would have.
    """

    modules: Mapping[str, nnx.Module]
    stacks: Mapping[str, Stack]
    layers: Mapping[str, TorchLayer]
    parameters: Mapping[str, TorchParameter]
    names: Mapping[str, str]
    tied_heads: Mapping[str, str]
    refusals: Mapping[str, str]

    def variable(self, parameter: TorchParameter) -> nnx.Variable:
        return getattr(self.modules[parameter.path], parameter.attribute)

    def check_not_quantised(self, names: Iterable[str]) -> None:
        """Raises ValueError if a folder cannot store one of these parameters, since it is
        quantised."""
        for name in names:
            one = self.parameters[name]
            value = self.variable(one).get_value()
            if quantised.is_quantised(value):
                raise ValueError(
                    f"modules_to_save or trainable_token_indices has {name}, whose layer "
                    f"{one.path!r} is quantised as {quantised.describe(value)}; expected a float "
                    "array, the only one that PEFT's format stores: leave the layer out of them, "
                    "or use the base in 16 bits"
                )

    def architecture(self) -> Architecture:
        """Returns what a folder is matched to. Its layers include heads that are None,
        which `jax_dora.peft.untie` makes layers of the model."""
        heads = [
            Layer(name.removesuffix(".weight"), "linear", features, vocabulary)
            for name in self.tied_heads
            for vocabulary, features in [self.parameters[name].shape]
        ]
        return Architecture(
            [*(one.layer for one in self.layers.values()), *heads],
            {name: one.shape for name, one in self.parameters.items()},
            {name: (id(self.variable(one)), one.at) for name, one in self.parameters.items()},
            self.refusals,
        )


def named_model(
    model: nnx.Module, names: Names, known: Iterable[AdaptableWeight] = ()
) -> NamedModel:
    """Returns the model under PyTorch's names, by `names`. `known` are weights that are known
    otherwise: they had adapters before these were removed, or a call has shown them. Raises
    ValueError if two modules get the same name, or the layers of a stack cannot be named."""
    check_model(model)
    if not isinstance(names, Names):
        raise TypeError(
            f"names is a {type(names).__name__}; expected jax_dora.peft.Names, such as "
            'Names(rules=[("^blocks", "transformer/h")])'
        )
    # The members of an nnx.List have names of their own, and the list itself needs none.
    found = find_modules(model)
    every = find_weights(found, is_leading=True)
    found = {paths: one for paths, one in found.items() if not isinstance(one, nnx.List)}
    modules = {paths[0]: module for paths, module in found.items()}
    named = [*_layers(every, known), *_weights_in_code(every, known, by_path(found))]
    stacks: dict[str, Stack] = {}
    for weight in named:
        path = weight.module_paths[0]
        with named_in_errors(path, "named as in PyTorch"):
            stacks.setdefault(path, weight.stack)
    stacks |= {
        path: _enclosing_stack(path, stacks, names) for path in modules if path not in stacks
    }

    def name_of(path: str, index: Index) -> str:
        return names.module(_without_sequential(path, modules), index)

    adaptable = {one.module_paths[0] for one in every if one.is_layer}
    layers: dict[str, TorchLayer] = {}
    # By the module's path and the layer's index in its stack, then by the weight's name.
    weights: dict[tuple[str, Index], dict[str, TorchLayer]] = {}
    for weight in named:
        path = weight.module_paths[0]
        for index in weight.stack.indices():
            layer = torch_layer(weight, names, lambda path, index=index: name_of(path, index))
            if layer is not None:
                part = TorchLayer(weight, index, layer)
                weights.setdefault((path, index), {})[weight.param] = part
                if not weight.is_layer or path in adaptable:
                    layers[layer.name] = part
    layers = _in_registration_order(layers, names)
    parameters: dict[str, TorchParameter] = {}
    paths_by_name: dict[str, str] = {}
    for paths, module in found.items():
        path = paths[0]
        for alias, index in itertools.product(paths, stacks[path].indices()):
            name = name_of(alias, index)
            if paths_by_name.get(name, path) != path:
                raise ValueError(
                    f"names calls two modules {name!r}: the one at {paths_by_name[name]!r} and the "
                    f"one at {path!r}; expected different names"
                )
            if alias == path:
                paths_by_name[name] = path
            of_module = weights.get((path, index), {})
            for one in parameters_of(path, index, stacks[path], module, of_module):
                parameter = ".".join(filter(None, (name, names.parameter(one.attribute))))
                part = of_module.get(one.attribute)
                if part and not part.weight.is_layer and part.layer.kind == "linear":
                    parameter = f"{name_of(alias + part.path.removeprefix(path), index)}.weight"
                parameters[parameter] = one
    embeddings = [name for name, one in layers.items() if one.layer.kind == "embedding"]
    heads = {
        f"{names.module(path)}.{names.parameter('kernel')}": path
        for path in (tied_heads(modules) if len(embeddings) == 1 else ())
    }
    for head in heads:
        parameters[head] = parameters[f"{embeddings[0]}.{names.parameter('embedding')}"]
    refusals = {
        name_of(weight.path, ()): f"{weight.refusal}: {_REMEDY}"
        for weight in every
        if weight.param and weight.refusal in (why_unknown(weight.module), LINEN_REFUSAL)
    }
    return NamedModel(modules, stacks, layers, parameters, paths_by_name, heads, refusals)


def _layers(
    every: Iterable[AdaptableWeight], known: Iterable[AdaptableWeight]
) -> list[AdaptableWeight]:
    """Returns the kernels of the layers with a DoRA class, even if their model's own code reads
    them: they have names in PyTorch too."""
    axes = {one.path: one.axes for one in known if one.is_layer}
    return [
        one.replace(
            paths=one.module_paths,
            is_layer=True,
            axes=axes.get(one.module_paths[0], one.axes if one.is_layer else ""),
        )
        for one in every
        if (kind := kind_of(one.module)) and one.param == kind.kernel_name
    ]


def _weights_in_code(
    every: Iterable[AdaptableWeight],
    known: Iterable[AdaptableWeight],
    modules: Mapping[str, nnx.Module],
) -> list[AdaptableWeight]:
    """Returns the weights that modules' own code reads and that PEFT's format can express: all that
    are registered or adapted, except embeddings."""
    found = {
        one.path: one
        for one in every
        if one.param and not one.is_layer and one.axes and not one.refusal
    }
    others = (one.in_model(modules) for one in known if not one.is_layer)
    found |= {one.path: one for one in others if one is not None}
    return [one for one in found.values() if not one.is_lookup and one.axes.count("b") <= 1]


def _in_registration_order(layers: Mapping[str, TorchLayer], names: Names) -> dict[str, TorchLayer]:
    """Returns the layers by name, with packed experts in the order of PyTorch's registration."""

    def position(name: str) -> int:
        param = name.rpartition(".")[2]
        is_packed = layers[name].layer.kind == "experts" and param in names.experts
        return list(names.experts).index(param) if is_packed else 0

    return {name: layers[name] for name in sorted(layers, key=position)}


def _without_sequential(path: str, modules: Mapping[str, nnx.Module]) -> str:
    """Returns the path without the "layers" of each nnx.Sequential: a list that PyTorch's
    Sequential does not have."""
    parts = path.split("/")
    return "/".join(
        part
        for position, part in enumerate(parts)
        if not (
            part == "layers" and isinstance(modules.get("/".join(parts[:position])), nnx.Sequential)
        )
    )


def _enclosing_stack(path: str, stacks: Mapping[str, Stack], names: Names) -> Stack:
    """Returns the stack of a module that cannot be adapted, such as a norm: that of the layers and
    weights in the same stacked module."""
    parts = path.split("/")
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1] in names.stacks:
            inside = "/".join(parts[:length]) + "/"
            found = {stack for other, stack in stacks.items() if f"{other}/".startswith(inside)}
            if len(found) == 1:
                return found.pop()
    return Stack()
