"""DoRA for flax.linen: `DoRADense`, and `apply_dora` for existing modules.

`apply_dora(model, rules)` returns a `DoRA` module. A call of it takes these steps:

1. `DoRA.call_logged` (module.py) calls `model` under `nn.intercept_methods`. The interceptor
   replaces the call of each layer that a rule matches by the call of a DoRA layer (layer.py), which
   is the nnx layer of `jax_dora.layers` with the same settings and parameters.
2. With `example=`, `apply_dora` has found parameters that products read outside such layers
   (inventory.py). These parameters are traced as in `jax_dora.tracing` (weights.py).
3. `CallLog` (call_log.py) records the layers that were called, for `merge_dora` and for the check
   that every rule adapts something.

Tracing alone, without the interceptor, would have to call the model abstractly before every call: a
linen module has its parameters only while it is called, so without `example=` only the call shows
what a rule matches. A trace also sees the reads of a weight and no layers, but some options of a
rule belong to a layer's call: adapt_attend tells `attend` from a lookup of the same embedding, and
the dropout of a convolution is that of its input. So the layers' own adapted forms are called,
which compute convolutions too, rather than written a second time for the trace.

| file | content |
| --- | --- |
| apply.py | `apply_dora` |
| module.py | `DoRA`: the module that calls a model with adapters |
| layer.py | the DoRA layer of a linen layer, and its nnx counterpart |
| dense.py | `DoRADense` |
| weights.py | adapted parameters outside such layers |
| inventory.py | lists the weights of a linen model |
| coverage.py | `coverage`: the table of a model's weights |
| magnitudes.py | `reset_magnitudes` |
| merge.py | `merge_dora` |
| call_log.py | records the layers that a call reaches, and their stack axes |
| params.py | `split_adapters`, `join_adapters`, `adapter_labels`: adapters in a tree of params |
"""

from jax_dora.linen.apply import apply_dora as apply_dora
from jax_dora.linen.coverage import coverage as coverage
from jax_dora.linen.dense import DoRADense as DoRADense
from jax_dora.linen.magnitudes import reset_magnitudes as reset_magnitudes
from jax_dora.linen.merge import merge_dora as merge_dora
from jax_dora.linen.module import DoRA as DoRA
from jax_dora.linen.params import adapter_labels as adapter_labels
from jax_dora.linen.params import join_adapters as join_adapters
from jax_dora.linen.params import split_adapters as split_adapters
