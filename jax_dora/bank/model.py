"""A model whose rows choose their adapters from a bank."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dora_common.slots import check_plain
from jax_dora.adapt.tree import check_model, find_dora_layers, find_modules, replace_modules
from jax_dora.bank.bank import AdapterBank
from jax_dora.bank.layers import CLASSES
from jax_dora.layers import dora_class_of
from jax_dora.ops import choose
from jax_dora.ops.bank import step_of

DECODING_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""`jax.jit`'s `compiler_options` for a function whose rows have one token each: adapters' kernels
that wait for nothing of the base's then run beside its own."""


def with_bank[Model: nnx.Module](
    model: Model,
    bank: AdapterBank,
    adapter_ids: jax.Array | np.ndarray | Sequence[int],
    *,
    implementation: str | None = None,
) -> Model:
    """Returns a copy of `model`, for a call or a few, whose rows have the adapters of a bank.

        logits = jax_dora.with_bank(model, bank, jnp.array([3, -1, 3, 0]))(tokens)

    Row b of every projection's input [batch, ..., in], whose first axis is the batch, meets the
    adapter in slot adapter_ids[b], or the base alone where that is -1, bit for bit. The copy shares
    all arrays of the model and of the bank. It works eagerly, under `jax.jit` (compile a function
    of the model's arrays, the bank and the ids: none of them is a constant then; with
    `jax_dora.bank.DECODING_OPTIONS` where rows have one token), `jax.vmap`, `nnx.scan` and on
    meshes. Dropout plays no part: an adapter in a bank is served.

    Args:
      model: the plain model that the bank was made of, or another of the same projections.
      bank: of it.
      adapter_ids: integers [batch], each a slot or -1.
      implementation: None, "mosaic" or "xla", as `jax_dora.ops.dora_linear`'s.

    Raises:
      TypeError: `model` is no nnx module, `bank` no `AdapterBank`, or the ids are no integers.
      ValueError: the ids have not one axis; one of them is no slot, or the slot is empty, where
        they are known: under `jit` the results of such a row are NaN. Or the model lacks a
        projection of the bank, or holds an adapter.
    """
    check_model(model)
    choose.check_name(implementation)
    if not isinstance(bank, AdapterBank):
        raise TypeError(f"bank is a {type(bank).__name__}; expected an AdapterBank")
    check_plain([found.paths[0] for found in find_dora_layers(model)], "jax_dora")
    ids = bank.checked(adapter_ids)
    sizes = {
        (*projection.sizes, bank.arrays[path].lora_a.shape[-2], projection.dtype)
        for path, projection in bank.projections.items()
    }
    step = step_of(ids, bank.slots, sizes, implementation)
    copy = nnx.clone(model)
    by_path = {path: found.module for found in find_modules(copy) for path in found.paths}
    replacements: dict[int, Any] = {}
    for path, projection in bank.projections.items():
        module: Any = by_path.get(path)
        if dora_class_of(module) is not projection.kind or (
            getattr(module, projection.kind.kernel_name).shape != projection.shape
        ):
            raise ValueError(
                f"model has no {projection.kind.base_type.__name__} {projection.shape} at {path!r}"
                ", for which the bank holds adapters; expected the model that it was made of"
            )
        layer = CLASSES[projection.kind](
            module, projection, bank.arrays[path], ids, step, implementation
        )
        replacements[id(module)] = layer
    return replace_modules(copy, replacements)
