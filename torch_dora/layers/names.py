"""Lists the modules of a model by name."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_dora.layers.base import DoRALayer
from torch_dora.layers.experts import SUFFIX, DoRAExperts

# torch.distributed's checkpoint_wrapper and offload_wrapper give the inner module this name.
_WRAPPED = "_checkpoint_wrapped_module"


def named_modules(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the items of ``model.named_modules()``, with names as in the base model's
    ``state_dict()``: without torch's wrappers for activation checkpointing, and packed experts by
    their parameter's name."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        path = ".".join(part for part in name.split(".") if part != _WRAPPED)
        yield path.removesuffix(SUFFIX) if isinstance(module, DoRAExperts) else path, module


def dora_layers(model: nn.Module) -> Iterator[tuple[str, DoRALayer]]:
    """Yields the name and the layer of every DoRA layer of ``model``; a shared layer only once."""
    for name, module in named_modules(model):
        if isinstance(module, DoRALayer):
            yield name, module


def check_is_module(model: Any) -> None:
    """Raises TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        is_flax = any(kind.__module__.split(".")[0] == "flax" for kind in type(model).__mro__)
        hint = ": jax_dora has the functions of these names for Flax models" if is_flax else ""
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module{hint}")


def adapted_layers(model: nn.Module) -> dict[str, DoRALayer]:
    """Returns the DoRA layers of ``model`` by name.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no DoRA layer.
    """
    check_is_module(model)
    layers = dict(dora_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; build it with one, or call apply_dora first"
        )
    return layers


def tied_modules(model: nn.Module) -> dict[str, list[str]]:
    """Returns, for every DoRA layer that shares its weight, the names of the other modules that
    have it."""
    owners: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    others = {
        name: [owner for owner in owners.get(id(layer.weight), ()) if owner != name]
        for name, layer in dora_layers(model)
    }
    return {name: found for name, found in others.items() if found}


def record_untied(model: Any) -> None:
    """Makes a transformers model, some of whose tied weights no longer are, one that its folder
    can describe.

    If no weights are tied any more, ``config.tie_word_embeddings`` becomes False. Otherwise
    ``tie_weights()``, or a program that loads the saved model, would tie them again. Weights that
    are tied to each other, but no longer to the one that they would be loaded from, become copies.
    """
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not pairs or not parameters.keys() >= {*pairs, *pairs.values()}:
        return
    seen = set()
    for target, source in pairs.items():
        one = parameters[target]
        if one is not parameters[source] and id(one) in seen:
            path, _, attribute = target.rpartition(".")
            parameters[target] = nn.Parameter(one.detach().clone(), one.requires_grad)
            setattr(model.get_submodule(path), attribute, parameters[target])
        seen.add(id(one))
    if all(parameters[target] is not parameters[source] for target, source in pairs.items()):
        model.all_tied_weights_keys = {}
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
