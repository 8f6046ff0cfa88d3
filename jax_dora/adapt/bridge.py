"""Linen modules inside an nnx model, which `nnx.bridge.ToNNX` holds."""

from collections.abc import Container
from typing import Any

from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.adapt.adapted_class import added_attributes
from jax_dora.layers.base_layer import new_instance


class LinenModule(nnx.bridge.ToNNX):
    """A `ToNNX` that keeps the variables of each linen module in an `nnx.Dict` instead of a dict,
    under the same paths. So each linen module has a path, and adapters can be stored next to its
    weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the linen module."""
        # ToNNX takes every attribute for a variable of the linen module. If the call updates
        # variables, ToNNX sets a dict of all of them, without adapters.
        added = added_attributes(self)
        held = {name: value for name, value in vars(self).items() if name not in added}
        plain = new_instance(nnx.bridge.ToNNX)
        vars(plain).update(held)
        result = plain(*args, **kwargs)
        _update(self, vars(plain))
        return result


def open_linen_module(module: Any) -> None:
    """Makes a `ToNNX` a `LinenModule`, in place."""
    module.__class__ = LinenModule
    for name, value in list(vars(module).items()):
        if not name.startswith(("to_nnx__", "_pytree__")):
            setattr(module, name, nnx.data(_opened(value)))


def close_linen_module(module: Any) -> None:
    """Reverses `open_linen_module` for a module without adapters."""
    module.__class__ = nnx.bridge.ToNNX
    for name, value in list(vars(module).items()):
        if isinstance(value, nnx.Dict):
            setattr(module, name, nnx.data(_closed(value)))


def _opened(value: Any) -> Any:
    """Returns the variables of a linen module, a dict, as an `nnx.Dict`; a dict with a key that is
    the name of one of its methods stays as it is."""
    if not isinstance(value, dict) or any(hasattr(nnx.Dict, key) for key in value):
        return value
    return nnx.Dict({key: nnx.data(_opened(child)) for key, child in value.items()})


def _closed(value: Any) -> Any:
    if not isinstance(value, nnx.Dict):
        return value
    return {key: _closed(child) for key, child in value.items()}


def _update(held: Any, new: dict[str, Any]) -> None:
    """Sets the attributes of `held` to new variables, those of an `nnx.Dict` one by one."""
    for key, value in new.items():
        child = vars(held).get(key)
        if isinstance(child, nnx.Dict) and isinstance(value, dict):
            _update(child, value)
        elif value is not child and not key.startswith("_pytree__"):
            setattr(held, key, nnx.data(_opened(value)))


def is_adapter(path: tuple[Any, ...], paths: Container[tuple[Any, ...]]) -> bool:
    """Returns whether the leaf of params at `path` belongs to an adapter: lora_a, lora_b and
    magnitude side by side among `paths`, or w_lora_a, w_lora_b and w_magnitude. A model's own LoRA
    has no magnitude, and `apply_dora` puts no adapter next to parameters with these names."""
    for name in ADAPTER_NAMES:
        prefix = path[-1].removesuffix(name)
        if prefix != path[-1] and (not prefix or prefix.endswith("_")):
            return all((*path[:-1], prefix + other) in paths for other in ADAPTER_NAMES)
    return False
