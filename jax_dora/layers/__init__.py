"""DoRA layers over existing Flax layers other than nnx.Linear."""

from jax_dora.layers.conv import DoRAConv as DoRAConv
from jax_dora.layers.embed import DoRAEmbed as DoRAEmbed
from jax_dora.layers.projection import DoRAEinsum as DoRAEinsum
from jax_dora.layers.projection import DoRALinearGeneral as DoRALinearGeneral
