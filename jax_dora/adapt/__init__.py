"""Adapters into an existing model, out of it, into its weights, and one in another's place."""

from jax_dora.adapt.apply import apply_dora as apply_dora
from jax_dora.adapt.rule import DoRARule as DoRARule
