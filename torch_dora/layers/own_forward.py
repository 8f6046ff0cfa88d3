"""Modules that somebody has given a forward of their own, as accelerate's hooks do: of a copy, that
forward has to call the copy."""

import functools
from collections.abc import Collection, Mapping
from types import MethodType
from typing import Any

from torch import nn

from dora_common.rules import listing
from torch_dora.layers.names import named_modules

_NAMES = ("forward", "_old_forward")  # the second is what accelerate's calls


def rebind(module: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Makes the forward that a copied module has of its own call the copies.

    Args:
        module: the copy.
        copies: of modules, by the ids of the originals.
    """
    for name in _NAMES:
        if (function := vars(module).get(name)) is not None:
            vars(module)[name] = _of_copy(function, copies) or function


def _of_copy(function: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Returns a bound method or a partial function with the copies of its modules; None where it
    has none."""
    if isinstance(function, MethodType):
        owner = copies.get(id(function.__self__))
        return None if owner is None else MethodType(function.__func__, owner)
    if not isinstance(function, functools.partial):
        return None
    inner = _of_copy(function.func, copies)
    if inner is None and not any(id(one) in copies for one in function.args):
        return None
    arguments = [copies.get(id(one), one) for one in function.args]
    copied = functools.partial(inner or function.func, *arguments, **function.keywords)
    return functools.update_wrapper(copied, function)


def refuse_shared(model: nn.Module, copied: nn.Module, changed: Collection[int]) -> None:
    """Raises NotImplementedError that lists those modules of a copy whose forward is the very
    function that the original has, and calls the original's layers.

    Args:
        model: the original.
        copied: the copy.
        changed: the ids of its layers that differ; others may be called in either.
    """
    functions = {id(vars(one)["forward"]) for one in model.modules() if "forward" in vars(one)}
    shared = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in named_modules(copied)
        if id(vars(module).get("forward")) in functions
        and id(module) not in changed
        and any(id(one) in changed for one in module.modules())
    ]
    if shared:
        raise NotImplementedError(
            "the forward of these modules was replaced by a function that is bound to none of the "
            "model's modules, and would call the model's own layers from a copy too; delete that "
            f"attribute, or make it a method of its module by types.MethodType:{listing(shared)}"
        )
