"""DoRA for flax.linen: a dense layer with its adapter, and adapters into an existing module."""

from jax_dora.linen.apply import apply_dora as apply_dora
from jax_dora.linen.coverage import coverage as coverage
from jax_dora.linen.dense import DoRADense as DoRADense
from jax_dora.linen.merge import merge_dora as merge_dora
from jax_dora.linen.module import DoRA as DoRA
from jax_dora.linen.params import adapter_labels as adapter_labels
from jax_dora.linen.params import join_adapters as join_adapters
from jax_dora.linen.params import split_adapters as split_adapters
