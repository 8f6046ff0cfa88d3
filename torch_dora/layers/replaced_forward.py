"""Modules with a ``forward`` that was set on the instance, as accelerate's hooks do.

In a copy of the model, this function must call the copied modules.
"""

import functools
from collections.abc import Collection, Mapping
from types import MethodType
from typing import Any

from torch import nn

from dora_common.rules import listing
from torch_dora.layers.names import named_modules

# accelerate's forward calls _old_forward; save_pretrained is that of torch_dora.adapt.whole_saves.
_NAMES = ("forward", "_old_forward", "save_pretrained")


def rebind(module: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Makes a copied module's own methods, such as ``forward``, call the copies (by the originals'
    ids)."""
    for name in _NAMES:
        if (function := vars(module).get(name)) is not None:
            vars(module)[name] = _rebound(function, copies) or function


def _rebound(function: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Returns a bound method or a partial function that refers to the copied modules; None if
    ``function`` refers to no module in ``copies``."""
    if isinstance(function, MethodType):
        owner = copies.get(id(function.__self__))
        return None if owner is None else MethodType(function.__func__, owner)
    if not isinstance(function, functools.partial):
        return None
    inner = _rebound(function.func, copies)
    if inner is None and not any(id(argument) in copies for argument in function.args):
        return None
    arguments = [copies.get(id(argument), argument) for argument in function.args]
    copied = functools.partial(inner or function.func, *arguments, **function.keywords)
    return functools.update_wrapper(copied, function)


def refuse_shared(model: nn.Module, copied: nn.Module, changed: Collection[int]) -> None:
    """Raises NotImplementedError that lists the modules of a copy with the same ``forward``
    function as the original, which would call the original's layers; ``changed`` are the ids of the
    copy's layers that differ."""
    functions = {
        id(vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)
    }
    shared = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in named_modules(copied)
        if id(vars(module).get("forward")) in functions
        and id(module) not in changed
        and any(id(child) in changed for child in module.modules())
    ]
    if shared:
        raise NotImplementedError(
            "the forward of these modules was replaced by a function that is not bound to a module "
            "of the model, so a copy would call the original model's layers; delete that "
            f"attribute, or bind it to its module with types.MethodType:{listing(shared)}"
        )
