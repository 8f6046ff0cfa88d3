"""DoRA layers: Flax layers with an adapter on their kernel.

A call of `DoRALinear` takes these steps. Other projections and convolutions differ in step 2;
`DoRAEmbed` looks up rows instead.

1. `DoRAProjection.__call__` (dora_projection.py) collects the operands. `operands_of_call` promotes
   x, kernel and bias as the base layer does, and computes g = magnitude / norm.
   `seeds.dropout_of_call` draws the dropout seed.
2. `projection_of` computes y = g ∘ x (kernel + s·lora_a lora_b) + bias from the operands, by
   `jax_dora.ops`.
3. `out_sharding.with_out_sharding` shards the result if the caller asks for it.
"""

from typing import Any

from flax import nnx

from jax_dora.layers.adapter_arrays import DoRAParam as DoRAParam
from jax_dora.layers.conv import DoRAConv as DoRAConv
from jax_dora.layers.conv import DoRAConvTranspose as DoRAConvTranspose
from jax_dora.layers.dora_layer import DoRALayer as DoRALayer
from jax_dora.layers.dora_linear import DoRALinear as DoRALinear
from jax_dora.layers.einsum import DoRAEinsum as DoRAEinsum
from jax_dora.layers.einsum import DoRALinearGeneral as DoRALinearGeneral
from jax_dora.layers.embed import DoRAEmbed as DoRAEmbed
from jax_dora.layers.gate_up import swiglu as swiglu
from jax_dora.layers.rule import DoRARule as DoRARule
from jax_dora.layers.together import apply_layers as apply_layers
from jax_dora.layers.together import layer_inputs as layer_inputs

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
