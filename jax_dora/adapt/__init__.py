"""Adapters into an existing model, out of it, into its weights, and one in another's place.

Checkpoints need nothing of this library. Orbax saves an adapter alone by the arrays of
`get_adapter`, and restores it into those of a model adapted by the same rules:

    checkpointer.save(folder, get_adapter(model).arrays)
    fresh = get_adapter(model)
    arrays = checkpointer.restore(folder, fresh.arrays)
    model = set_adapter(model, dataclasses.replace(fresh, arrays=arrays), rngs=nnx.Rngs(0))

(`rngs` is for the masks of an adapter with dropout.)

To go on with training bit for bit, save all that a step changes, and the base model not at all:

    changing = nnx.Any(nnx.LoRAParam, nnx.RngState, nnx.OptState)
    checkpointer.save(folder, nnx.to_pure_dict(nnx.state((model, optimizer), changing)))
    target = nnx.to_pure_dict(nnx.state((model, optimizer), changing))
    nnx.update((model, optimizer), checkpointer.restore(folder, target))
"""

from jax_dora.adapt.adapter import Adapter as Adapter
from jax_dora.adapt.adapter import get_adapter as get_adapter
from jax_dora.adapt.adapter import set_adapter as set_adapter
from jax_dora.adapt.apply import apply_dora as apply_dora
from jax_dora.adapt.coverage import Coverage as Coverage
from jax_dora.adapt.coverage import coverage as coverage
from jax_dora.adapt.merge import merge_dora as merge_dora
from jax_dora.adapt.quantize import quantize as quantize
from jax_dora.adapt.tree import remove_dora as remove_dora
from jax_dora.layers.rule import DoRARule as DoRARule
