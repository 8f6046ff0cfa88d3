"""Unties weights that are tied in a model, if a PEFT folder stores or adapts only one of them."""

from typing import Any

from flax import nnx

from dora_common.peft.config import AdapterConfig
from dora_common.peft.destinations import Destinations
from jax_dora.adapt.tied_heads import UntiedEmbed, has_own_head, untie_head
from jax_dora.adapt.tree import replace_modules
from jax_dora.peft.named_model import NamedModel


def untie(model: Any, named: NamedModel, destinations: Destinations, config: AdapterConfig) -> Any:
    """Gives the parameters in `destinations.untied` arrays of their own, in place. A head that is
    None becomes an `nnx.Linear`; an embedding whose `attend` may be the head, an `UntiedEmbed`.
    Raises NotImplementedError if one belongs to one module with several names."""
    for name in destinations.untied:
        parameter = named.parameters[name]
        heads = [one for one in named.tied_heads if named.parameters[one] == parameter]
        for head in heads:
            untie_head(named.modules, named.tied_heads[head], named.modules[parameter.path])
        same = [one for one, other in named.parameters.items() if other == parameter]
        if len(same) > 1 and not heads:
            raise NotImplementedError(
                f"modules_to_save has {name}, and the module is {' and '.join(same)} at once; "
                "expected a model that does not share the module, since PEFT unties it"
            )
        if not heads:
            variable = named.variable(parameter)
            setattr(named.modules[parameter.path], parameter.attribute, variable.copy())
    untied = {id(one): UntiedEmbed(one) for one in _possible_heads(named, config).values()}
    return replace_modules(model, untied)


def untie_adapted_heads(named: NamedModel, destinations: Destinations) -> None:
    """Makes an `nnx.Linear` of every head that is None and gets an adapter."""
    for name, path in named.tied_heads.items():
        if name.removesuffix(".weight") in destinations.adapters:
            untie_head(named.modules, path, named.modules[named.parameters[name].path])


def check_no_possible_heads(named: NamedModel, config: AdapterConfig) -> None:
    """Raises ValueError if modules_to_save has an embedding that may also be the output head."""
    if names := list(_possible_heads(named, config)):
        raise ValueError(
            f"modules_to_save has {', '.join(names)}, and the model has no head, so that the "
            "embedding's attend may be the head, but PEFT would untie them; expected an embedding "
            "that is not the head: replace it with jax_dora.peft.UntiedEmbed(embedding)"
        )


def _possible_heads(named: NamedModel, config: AdapterConfig) -> dict[str, Any]:
    """Returns the embeddings in modules_to_save that may also be the output head; none if the model
    has a head of its own or the configuration keeps ties."""
    if named.tied_heads or has_own_head(named.modules) or config.keeps_ties:
        return {}
    return {
        name: one.weight.module
        for name, one in named.layers.items()
        if config.saves(f"{name}.weight") and type(one.weight.module) is nnx.Embed
    }
