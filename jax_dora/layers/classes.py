"""The table from Flax layers to the DoRA layers that adapt them."""

from typing import Any

from flax import nnx

from jax_dora.layers.conv import DoRAConv, DoRAConvTranspose
from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.einsum import DoRAEinsum, DoRALinearGeneral
from jax_dora.layers.embed import DoRAEmbed
from jax_dora.layers.linear import DoRALinear

# The DoRA layer by the class of the base layer, for all code that adapts, merges, loads or saves.
DORA_CLASSES: dict[type[nnx.Module], type[DoRALayer]] = {
    cls.base_type: cls
    for cls in (
        DoRALinear,
        DoRALinearGeneral,
        DoRAEinsum,
        DoRAEmbed,
        DoRAConv,
        DoRAConvTranspose,
    )
}


def dora_class_of(module: nnx.Module) -> type[DoRALayer] | None:
    """Returns the class that adapts a base layer; None for a DoRA layer and for a module that no
    class adapts."""
    if isinstance(module, DoRALayer):
        return None
    return next((DORA_CLASSES[cls] for cls in type(module).__mro__ if cls in DORA_CLASSES), None)


def kind_of(module: Any) -> Any:
    """Returns the class of a DoRA layer, or the class that adapts a base layer; None for any other
    module."""
    return type(module) if isinstance(module, DoRALayer) else dora_class_of(module)
