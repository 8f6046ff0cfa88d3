"""Adds adapters to an existing model, removes them, merges them into its weights, and exchanges
them.

`apply_dora(model, rules)` takes these steps:

1. `find_weights` lists the model's weights as `AdaptableWeight`s: layers that have a DoRA class,
   registered parameters and, with `example=`, all parameters that a product or lookup reads.
   `record_reads` calls the model abstractly for that.
2. `assign_rules` finds the rule of each weight.
3. `adapt_weight` creates the DoRA layer that replaces a layer, or the adapter of a weight that is
   not in such a layer (`WeightAdapter`).
4. `replace_modules` puts the DoRA layers into a copy of the model.
"""

from jax_dora.adapt.adapter import Adapter as Adapter
from jax_dora.adapt.adapter import get_adapter as get_adapter
from jax_dora.adapt.adapter import set_adapter as set_adapter
from jax_dora.adapt.apply import apply_dora as apply_dora
from jax_dora.adapt.coverage import coverage as coverage
from jax_dora.adapt.lora import to_lora as to_lora
from jax_dora.adapt.merge import merge_dora as merge_dora
from jax_dora.adapt.quantize import quantize as quantize
from jax_dora.adapt.tree import remove_dora as remove_dora
from jax_dora.layers.rule import DoRARule as DoRARule
