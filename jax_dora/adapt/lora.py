"""`to_lora`: the best plain LoRA of a trained DoRA adapter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dora_common.lora_report import LoRALayer, LoRAReport, check_arguments
from dora_common.peft.folder import check_finite
from jax_dora.adapt.adapter import Adapter, get_adapter, set_adapter
from jax_dora.adapt.merge import weight_change
from jax_dora.adapt.tree import find_dora_layers
from jax_dora.layers.base_layer import check_has_values
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.magnitude import fresh_magnitude


def to_lora(model: nnx.Module, rank: int, *, limit: float) -> tuple[Adapter, LoRAReport]:
    """Returns the best LoRA of this rank in place of the DoRA adapter of `model`, and how far it is
    from that.

        lora, report = jax_dora.to_lora(model, 16, limit=0.05)
        model = jax_dora.set_adapter(model, lora, rngs=nnx.Rngs(0))
        jax_dora.peft.save_adapter(model, "folder", use_dora=False)

    Every layer's s·lora_a lora_b is the matrix of this rank that is nearest to W' - W, all elements
    weighted equally: the largest singular values of W' - W, which is computed in fp32 (fp64 if a
    parameter is). W' - W has full rank, since the magnitudes scale every column of W. So the error
    tells which part of the adapter a LoRA of this rank cannot express.

    As an `Adapter`, a LoRA is a DoRA adapter whose magnitudes are its norms, as from a LoRA folder.
    Its alpha is its rank, and lora_a and lora_b are fp32.

    Args:
      model: a model with an adapter, which stays as it is.
      rank: of the LoRA, the same in all layers.
      limit: the largest error to accept, ‖(W' - W) - s·lora_a lora_b‖ / ‖W' - W‖ of a layer.

    Raises:
      TypeError: `model` is not an nnx module; an argument has the wrong type.
      ValueError: a layer's error is above `limit`: the message names the layers, their errors and
        the ranks that would do; or the model has no adapter, or is abstract; an argument is out of
        range; numbers are not finite.
    """
    check_arguments(rank, limit)
    rank = int(rank)
    adapter = get_adapter(model)
    check_has_values(model, "jax_dora.to_lora", can_trace=False)
    arrays: dict[str, dict[str, Any]] = {}
    rows = []
    for paths, layer in find_dora_layers(model).items():
        # On the host, since an SVD has no rule for sharded operands.
        change = jax.device_get(layer.stack.move_to_front(weight_change(None, layer)))
        check_finite(f"the change of {paths[0]!r} by its adapter", change)
        contraction = dataclasses.replace(layer.contraction, rank=rank)
        changes = change.reshape(-1, *contraction.kernel.stored)
        pairs, values = zip(*(_best_pair(contraction, one) for one in changes), strict=True)
        arrays[paths[0]] = {
            name: layer.stack.join([pair[name] for pair in pairs]) for name in pairs[0]
        }
        arrays[paths[0]]["magnitude"] = layer.magnitude[...]
        groups = rank // contraction.lora_a.matrices[-1]
        rows.append(
            LoRALayer.from_singular_values(
                paths[0], np.concatenate(values), rank, limit=limit, groups=groups
            )
        )
    report = LoRAReport(rank, float(limit), tuple(rows))
    report.check()
    options = {"rank": rank, "alpha": rank, "use_rslora": False, "adapter_dtype": jnp.float32}
    rules = tuple(dataclasses.replace(rule, **options) for rule in adapter.rules)
    lora = set_adapter(model, Adapter(rules, arrays, adapter.weights), rngs=nnx.Rngs(0))
    for layer in find_dora_layers(lora).values():
        layer.magnitude.set_value(fresh_magnitude(layer))
    return get_adapter(lora), report


@functools.partial(jax.jit, static_argnums=0)
def _best_pair(contraction: Contraction, change: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Returns the lora_a and lora_b of scale 1 that are nearest to a layer's `change`, in the
    shapes of `contraction`, and the singular values [n, all] of the change's matrices."""
    left, values, right = jnp.linalg.svd(
        contraction.kernel.to_matrices(change), full_matrices=False
    )
    roots = jnp.sqrt(values)
    found = {}
    for name, vectors, axis in (
        ("lora_a", left * roots[:, None, :], 2),
        ("lora_b", roots[:, :, None] * right, 1),
    ):
        axes = getattr(contraction, name)
        rank = axes.matrices[axis]
        kept = vectors.take(jnp.arange(min(rank, vectors.shape[axis])), axis)
        padding = [
            (0, wanted - size) for wanted, size in zip(axes.matrices, kept.shape, strict=True)
        ]
        found[name] = axes.from_matrices(jnp.pad(kept, padding))
    return found, values
