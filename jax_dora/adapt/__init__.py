"""Adapters into an existing model, out of it, into its weights, and one in another's place."""

from jax_dora.adapt.apply import apply_dora as apply_dora
from jax_dora.adapt.merge import MergedLayer as MergedLayer
from jax_dora.adapt.merge import MergeReport as MergeReport
from jax_dora.adapt.merge import merge_dora as merge_dora
from jax_dora.adapt.remove import remove_dora as remove_dora
from jax_dora.adapt.rule import DoRARule as DoRARule
from jax_dora.adapt.switch import Adapter as Adapter
from jax_dora.adapt.switch import AdapterSet as AdapterSet
from jax_dora.adapt.switch import get_adapter as get_adapter
from jax_dora.adapt.switch import set_adapter as set_adapter
