"""Walking an nnx model by paths, replacing modules in it, and taking adapters out."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen, nnx

from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import is_node
from jax_dora.weights.module import adapters_of, has_dora_type, restore_plain_class


@dataclasses.dataclass
class Found:
    """A module and every path that leads to it: more than one where it is shared."""

    module: Any
    paths: tuple[str, ...]


@contextlib.contextmanager
def named_in_errors(path: str, done: str) -> Iterator[None]:
    """Names a layer in the errors that say why it cannot be `done`: adapted, or quantised."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{path!r} cannot be {done}: {error}") from error


def check_model(model: Any, *, for_linen: str | None = None) -> None:
    """Raises TypeError unless `model` is an nnx module.

    Args:
      for_linen: what does the same for a linen model, by its full name; None where nothing does.
    """
    if isinstance(model, nnx.Module):
        return
    message = f"model is a {type(model).__name__}; expected an nnx.Module"
    if for_linen is not None:
        message += f": for Flax linen there is {for_linen}"
    elif isinstance(model, linen.Module):
        message += (
            ": this has no counterpart for Flax linen, for which there are apply_dora, merge_dora, "
            "split_adapters and join_adapters in jax_dora.linen; write the model in nnx for it"
        )
    raise TypeError(message)


def find_dora_layers(model: nnx.Module) -> list[Found]:
    """Returns every DoRA layer and adapted weight of `model`, in the order of the paths."""
    layers = []
    for found in find_modules(model):
        if isinstance(found.module, DoRALayer):
            layers.append(found)
        for adapter in adapters_of(found.module):
            layers.append(Found(adapter, tuple(map(adapter.path, found.paths))))
    return layers


def find_modules(model: nnx.Module) -> list[Found]:
    """Returns every module of `model`, itself included, in the order of the paths."""
    found: dict[int, Found] = {}

    def visit(node: Any, path: tuple[str, ...], above: tuple[int, ...]) -> None:
        if id(node) in above:  # a module that refers back to its parent
            return
        if isinstance(node, nnx.Module):
            name = "/".join(path)
            entry = found.setdefault(id(node), Found(node, ()))
            entry.paths = (*entry.paths, name)
        for key, child in _children(node):
            visit(child, (*path, *key), (*above, id(node)))

    visit(model, (), ())
    return list(found.values())


def shared_variables(model: nnx.Module) -> set[int]:
    """Returns the `id` of every variable that stands in more than one place in `model`."""
    counts = collections.Counter(
        id(leaf)
        for found in find_modules(model)
        for _, value in _attributes(found.module)
        for leaf in jax.tree.leaves(value, is_leaf=is_node)
        if isinstance(leaf, nnx.Variable)
    )
    return {one for one, count in counts.items() if count > 1}


def replace_modules(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> Any:
    """Replaces the module of each `id` in `model`, in place, and returns `model`, or what replaces
    it itself."""
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


def remove_dora[Model: nnx.Module](model: Model) -> Model:
    """Returns `model` without its adapters: the base model exactly, on its own arrays.

    The result is a model of its own, as `apply_dora`'s; one without adapters is copied as it is.

    Raises:
      TypeError: `model` is no nnx module.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    copy = nnx.clone(model)
    modules = [found.module for found in find_modules(copy)]
    for module in modules:
        if has_dora_type(module):
            restore_plain_class(module)
    return replace_modules(
        copy, {id(one): one.base_layer() for one in modules if isinstance(one, DoRALayer)}
    )


def _children(node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys, child) of a module, with two keys or more for a module in a container."""
    if not isinstance(node, nnx.Pytree):
        return
    for name, value in _attributes(node):
        for keys, leaf in [((), value)] if isinstance(value, nnx.Pytree) else nested_leaves(value):
            if isinstance(leaf, nnx.Pytree):
                yield (name, *keys), leaf


def nested_leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (keys, leaf) of all that stands in a plain list, tuple or dict; nothing of others."""
    if isinstance(value, list | tuple | dict) and not is_node(value):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_node):
            yield tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), leaf


def _attributes(node: nnx.Pytree) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]
