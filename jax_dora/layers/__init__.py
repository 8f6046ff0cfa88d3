"""DoRA layers: a Flax layer with an adapter on its kernel, and what they have in common."""

from jax_dora.layers.adapter import DoRAParam as DoRAParam
from jax_dora.layers.base import DoRALayer as DoRALayer
from jax_dora.layers.conv import DoRAConv as DoRAConv
from jax_dora.layers.conv import DoRAConvTranspose as DoRAConvTranspose
from jax_dora.layers.embed import DoRAEmbed as DoRAEmbed
from jax_dora.layers.linear import DoRALinear as DoRALinear
from jax_dora.layers.projection import DoRAEinsum as DoRAEinsum
from jax_dora.layers.projection import DoRALinearGeneral as DoRALinearGeneral
from jax_dora.layers.registry import DORA_CLASSES as DORA_CLASSES
from jax_dora.layers.registry import dora_class_of as dora_class_of
from jax_dora.layers.rule import DoRARule as DoRARule
from jax_dora.layers.swiglu import swiglu as swiglu
