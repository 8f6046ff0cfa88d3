"""Walks an nnx model by paths, replaces modules in it, and removes adapters."""

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen, nnx

from dora_common.peft.replaced_parameters import replaced_parameters, warn_of
from dora_common.rules import listing
from jax_dora.adapt.adapted_class import adapters_of, has_dora_type, restore_plain_class
from jax_dora.adapt.bridge import LinenModule, close_linen_module, is_adapter, open_linen_module
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import is_node
from jax_dora.ops import quantised

type Modules = dict[tuple[str, ...], Any]
"""Modules by all their paths, since a shared module has several."""


@contextlib.contextmanager
def named_in_errors(path: str, done: str) -> Iterator[None]:
    """Prefixes errors with the layer's path and what is `done` to it: "'a/b' cannot be adapted:
    …"."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{path!r} cannot be {done}: {error}") from error


def check_model(model: Any, *, for_linen: str | None = None) -> None:
    """Raises TypeError if `model` is not an nnx module. `for_linen` is the full name of the
    function that does the same for a linen module."""
    if isinstance(model, nnx.Module):
        return
    message = f"model is a {type(model).__name__}; expected an nnx.Module"
    if any(kind.__module__.split(".")[0] == "torch" for kind in type(model).__mro__):
        message += ": torch_dora has the functions of these names for PyTorch models"
    elif for_linen is not None:
        message += f": for Flax linen there is {for_linen}"
    elif isinstance(model, linen.Module):
        message += (
            ": this function has no counterpart for Flax linen; jax_dora.linen has apply_dora, "
            "coverage, merge_dora, split_adapters and join_adapters. Write the model in nnx to use "
            "this one"
        )
    raise TypeError(message)


def find_dora_layers(model: nnx.Module | Modules) -> Modules:
    """Returns every DoRA layer and adapted weight of a model, or among its modules, in the order of
    the paths. Raises NotImplementedError if a linen module with adapters would be left out."""
    modules = model if isinstance(model, dict) else find_modules(model)
    if linen_modules := [paths[0] for paths, one in modules.items() if _has_linen_adapters(one)]:
        raise NotImplementedError(
            "the model holds linen modules with adapters in nnx.bridge.ToNNX, whose arrays are no "
            "nnx.LoRAParams: they would be neither trained, saved nor merged here; expected "
            "adapters by jax_dora.apply_dora alone: put the linen module itself into ToNNX, and "
            "pass inputs for the model as example= of jax_dora.apply_dora. These are:"
            f"{listing(linen_modules)}"
        )
    layers: Modules = {}
    for paths, module in modules.items():
        if isinstance(module, DoRALayer):
            layers[paths] = module
        for adapter in adapters_of(module):
            layers[tuple(map(adapter.path, paths))] = adapter
    return layers


def _has_linen_adapters(module: Any) -> bool:
    """Returns whether `module` is a linen module in `ToNNX` with adapters by `jax_dora.linen`."""
    if not isinstance(module, nnx.bridge.ToNNX) or isinstance(module, LinenModule):
        return False
    return bool(linen_adapters(module))


def linen_adapters(module: Any) -> set[str]:
    """Returns the paths of the arrays of adapters by `jax_dora.linen` in a `ToNNX`."""
    paths = {
        (name, *keys)
        for name, value in vars(module).items()
        for keys, _ in [((), value), *nested_leaves(value)]
    }
    return {"/".join(path) for path in paths if is_adapter(path, paths)}


def find_modules(model: nnx.Module, *, opens_linen: bool = False) -> Modules:
    """Returns every module of `model`, itself included, in the order of the paths. `opens_linen`
    makes each `ToNNX` a `LinenModule`, in place, unless it has adapters by `jax_dora.linen`."""
    modules: dict[int, Any] = {}
    paths: dict[int, list[str]] = {}

    def visit(node: Any, path: tuple[str, ...], above: tuple[int, ...]) -> None:
        if id(node) in above:  # The module refers back to a parent.
            return
        if isinstance(node, nnx.Module):
            modules[id(node)] = node
            paths.setdefault(id(node), []).append("/".join(path))
        if opens_linen and type(node) is nnx.bridge.ToNNX and not _has_linen_adapters(node):
            open_linen_module(node)
        for key, child in _children(node):
            visit(child, (*path, *key), (*above, id(node)))

    visit(model, (), ())
    return {tuple(paths[identity]): module for identity, module in modules.items()}


def by_path(modules: Modules) -> dict[str, Any]:
    """Returns each module under each of its paths."""
    return {path: module for paths, module in modules.items() for path in paths}


def shared_variables(modules: Modules) -> set[int]:
    """Returns the `id` of every variable that occurs in more than one place in `modules`."""
    counts = collections.Counter(
        id(leaf)
        for module in modules.values()
        for _, value in _attributes(module)
        for leaf in jax.tree.leaves(value, is_leaf=is_node)
        if isinstance(leaf, nnx.Variable)
    )
    return {identity for identity, count in counts.items() if count > 1}


def replace_modules(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> Any:
    """Replaces modules in `model`, in place, by their `id`. Returns `model`, or the replacement of
    `model` itself."""
    done: set[int] = set()

    def visit(value: Any) -> Any:
        if id(value) in replacements:
            return replacements[id(value)]
        if isinstance(value, nnx.Pytree):
            if id(value) not in done:
                done.add(id(value))
                for name, child in _attributes(value):
                    new = visit(child)
                    if new is not child:
                        setattr(value, name, nnx.data(new))
        elif isinstance(value, list | tuple | dict):
            leaves, structure = jax.tree.flatten(value, is_leaf=is_node)
            new_leaves = [visit(leaf) if is_node(leaf) else leaf for leaf in leaves]
            if any(new is not old for new, old in zip(new_leaves, leaves, strict=True)):
                return jax.tree.unflatten(structure, new_leaves)
        return value

    return visit(model)


def close_linen_modules[Model: nnx.Module](model: Model) -> Model:
    """Makes every `LinenModule` in `model`, a model without adapters, a `ToNNX` again, in place.
    Returns `model`."""
    for module in find_modules(model).values():
        if type(module) is LinenModule:
            close_linen_module(module)
    return model


def remove_dora[Model: nnx.Module](model: Model) -> Model:
    """Returns a copy of `model` without adapters: exactly the base model, on the same arrays.

    A model without adapters is copied unchanged. A quantised weight that the code of its module
    reads is dequantised, since that code cannot. Other parameters that a PEFT folder has replaced
    stay; a warning lists them.

    Raises:
      TypeError: `model` is not an nnx module.
      NotImplementedError: `model` holds a linen module with adapters.
    """
    base, modules = without_adapters(model)
    owners = by_path(modules)
    for paths, layer in find_dora_layers(model).items():
        kernel = layer.kernel_param.get_value()
        if quantised.is_quantised(kernel) and not isinstance(layer, DoRALayer):
            parameter = getattr(owners[layer.module_path(paths[0])], layer.kernel_name)
            parameter.set_value(quantised.dense(kernel, kernel.scale.dtype))
    warn_of(replaced_parameters(model), "without its adapters, ")
    return close_linen_modules(base)


def without_adapters[Model: nnx.Module](model: Model) -> tuple[Model, Modules]:
    """Returns a copy of `model` as `remove_dora` does, with linen modules as `LinenModule`s, and
    the modules of the copy."""
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    copy = nnx.clone(model)
    modules = find_modules(copy, opens_linen=True)
    find_dora_layers(modules)  # raises for adapters that would stay
    for module in modules.values():
        if has_dora_type(module):
            restore_plain_class(module)
    plain = {id(one): one.base_layer() for one in modules.values() if isinstance(one, DoRALayer)}
    if not plain:
        return copy, modules
    copy = replace_modules(copy, plain)
    return copy, find_modules(copy)


def _children(node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys, child) for each module in an attribute of `node`, or in a container in one."""
    if not isinstance(node, nnx.Pytree):
        return
    for name, value in _attributes(node):
        for keys, leaf in [((), value)] if isinstance(value, nnx.Pytree) else nested_leaves(value):
            if isinstance(leaf, nnx.Pytree):
                yield (name, *keys), leaf


def nested_leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys, leaf) for everything inside a plain list, tuple or dict, if `value` is one."""
    if isinstance(value, list | tuple | dict) and not is_node(value):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_node):
            yield tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), leaf


def _attributes(node: nnx.Pytree) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]
