"""DoRA for flax.linen: `DoRADense`, and `apply_dora` for existing modules.

`apply_dora(model, rules)` returns a `DoRA` module. A call of it takes these steps:

1. `DoRA.call_logged` (module.py) calls `model` under `nn.intercept_methods`. The interceptor
   replaces the call of each layer that a rule matches by the call of a DoRA layer (layer.py), which
   is the nnx layer of `jax_dora.layers` with the same settings and parameters.
2. With `example=`, `apply_dora` has found parameters that products read outside such layers
   (param_inventory.py). These parameters are traced as in `jax_dora.tracing` (weights.py).
3. `CallLog` (call_log.py) records the layers that were called, for `merge_dora` and for the check
   that every rule adapts something.

Tracing alone cannot do without the interceptor. The parameters of a linen module are there only
while it is called, so each call would need an abstract call before it; a trace sees no layers, to
which some options of a rule belong; and `nn.vmap` rewrites convolutions as grouped ones of a joined
kernel before a trace sees them.
"""

from jax_dora.linen.adaptation import apply_dora as apply_dora
from jax_dora.linen.adaptation import coverage as coverage
from jax_dora.linen.dense import DoRADense as DoRADense
from jax_dora.linen.module import DoRA as DoRA
from jax_dora.linen.params import adapter_labels as adapter_labels
from jax_dora.linen.params import join_adapters as join_adapters
from jax_dora.linen.params import split_adapters as split_adapters
from jax_dora.linen.variables import merge_dora as merge_dora
from jax_dora.linen.variables import reset_magnitudes as reset_magnitudes
