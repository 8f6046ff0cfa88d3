"""Returns a model in which each row of a batch selects its adapter from a bank."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dora_common.slots import check_plain
from jax_dora.adapt.tree import (
    by_path,
    check_model,
    find_dora_layers,
    find_modules,
    replace_modules,
)
from jax_dora.bank.adapter_bank import AdapterBank
from jax_dora.bank.bank_layers import LAYER_CLASSES
from jax_dora.layers import dora_class_of, kind_of
from jax_dora.ops.bank_linear import step_of
from jax_dora.ops.dispatch import choose

DECODING_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""`compiler_options` of `jax.jit` for functions with one token per row, or up to 256 tokens.

The adapters' GPU kernels then run concurrently with those kernels of the base model that they do
not depend on."""


def with_bank[Model: nnx.Module](
    model: Model,
    bank: AdapterBank,
    adapter_ids: jax.Array | np.ndarray | Sequence[int],
    *,
    implementation: str | None = None,
) -> Model:
    """Returns a copy of `model` in which each row of a batch uses an adapter of a bank.

        logits = jax_dora.with_bank(model, bank, jnp.array([3, -1, 3, 0]))(tokens)

    Every projection has an input [batch, ..., in]. Row b uses the adapter in slot adapter_ids[b].
    If adapter_ids[b] is -1, then the row's result is that of the base model, bit for bit.

    The copy shares all arrays with the model and the bank, and is meant for one or a few calls. It
    works eagerly, under `jax.jit`, `jax.vmap` and `nnx.scan`, and on meshes. Under `jax.jit`, make
    the model's arrays, the bank and the ids arguments of the function, so that they do not become
    constants; use `jax_dora.bank.DECODING_OPTIONS` if each row has one token, and for prompts of up
    to 256 tokens. There is no dropout, since a bank is for inference.

    Args:
      model: the plain model that the bank was made for, or another one with the same projections.
      bank: a bank for the model.
      adapter_ids: integers [batch], each a slot or -1. Pass them to a function under `jax.jit` as
        int32: JAX truncates int64 arguments to int32 before they can be checked.
      implementation: None, "mosaic", "triton" or "xla", as in `jax_dora.ops.dora_linear`.

    Raises:
      TypeError: `model` is not an nnx module, `bank` is not an `AdapterBank`, or the ids are not
        integers.
      ValueError: the ids do not have one axis; or an id is not a slot, or the slot is empty; or the
        model lacks a projection of the bank, or has an adapter. Under `jit` the values of the ids
        are unknown, and the results of a row with such an id are NaN.
    """
    check_model(model)
    choose.check_name(implementation)
    if not isinstance(bank, AdapterBank):
        raise TypeError(f"bank is a {type(bank).__name__}; expected an AdapterBank")
    check_plain([path for path, *_ in find_dora_layers(model)], "jax_dora")
    ids = bank.checked(adapter_ids)
    sizes = {
        (*projection.sizes, bank.arrays[path].lora_a.shape[-2], projection.result_dtype)
        for path, projection in bank.projections.items()
    }
    step = step_of(ids, bank.slots, sizes, implementation)
    copy = nnx.clone(model)
    modules = by_path(find_modules(copy))
    replacements: dict[int, Any] = {}
    for path, projection in bank.projections.items():
        module: Any = modules.get(path)
        kind = kind_of(projection.module)
        if dora_class_of(module) is not kind or (
            getattr(module, projection.param).shape != projection.shape
        ):
            raise ValueError(
                f"model has no {kind.base_type.__name__} {projection.shape} at {path!r}"
                ", for which the bank holds adapters; expected the model that the bank was made for"
            )
        layer = LAYER_CLASSES[kind](
            module, projection, bank.arrays[path], ids, step, implementation
        )
        replacements[id(module)] = layer
    return replace_modules(copy, replacements)
