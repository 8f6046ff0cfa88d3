"""Loads arrays that are quantised in a folder, or that are quantised while they are loaded."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_dora.adapt.quantize import shard_kernel
from jax_dora.layers.quantised_kernel import LAYERS, compute_quantised
from jax_dora.layers.stack import allocate_stack, set_layer
from jax_dora.lm.models.config import USE_16_BITS
from jax_dora.lm.models.quantised_weights import QuantisedTensor
from jax_dora.lm.models.stored_arrays import StoredArray
from jax_dora.lm.models.tensor_files import StoredTensor
from jax_dora.ops import check, quantised, row_scaled
from jax_dora.ops.rounding import round_to


def quantised_tensors(
    names: Iterable[str], tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, QuantisedTensor]:
    """Returns those of the weights `names` that are quantised in the folder."""
    found = {name: QuantisedTensor.of(name, tensors, config) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def use_stored_formats(
    model: Any, arrays: Iterable[StoredArray], tensors: Mapping[str, QuantisedTensor]
) -> None:
    """Gives an abstract model, in place, quantised kernels where the folder has such weights."""
    for array in arrays:
        layers = [tensors.get(name) for name in array.names]
        if not any(layers):
            continue
        if array.path[-1] != "kernel":
            raise ValueError(
                f"{array.names[0]} is quantised in the folder; expected quantised weights of "
                f"projections only: {USE_16_BITS}"
            )
        formats: dict[str, list[int]] = {}
        for number, one in enumerate(layers):
            formats.setdefault(_format(one), []).append(number)
        if len(formats) > 1:
            found = ", and ".join(
                f"layers {_shortened(numbers)} ({name})" for name, numbers in formats.items()
            )
            raise ValueError(
                f"{'/'.join(array.path)} has layers of different formats in the folder: {found}; "
                f"expected the same format in all layers, which are one array: {USE_16_BITS}"
            )
        module = functools.reduce(getattr, array.path[:-1], model)
        kernel = layers[0].abstract if layers[0] is not None else None
        count = (len(layers),) if array.stacked else ()
        kernel = jax.tree.map(
            lambda one, count=count: jax.ShapeDtypeStruct((*count, *one.shape), one.dtype), kernel
        )
        module.kernel.set_value(kernel)
        compute_quantised(module)


def quantise_activations(model: Any, act_qtype: str) -> None:
    """Makes the projections of a quantised model quantise their activations as well, in place."""
    quantised_layers = [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, LAYERS) and quantised.is_quantised(module.kernel.get_value())
    ]
    if not quantised_layers:
        raise ValueError(
            f"act_qtype is {act_qtype!r}, but the model is not quantised; expected "
            f"quantize={row_scaled.QTYPE!r} as well, or a folder in that format"
        )
    for name, module in quantised_layers:
        row_scaled.check_act_qtype(act_qtype, name, module.kernel.get_value())
        compute_quantised(module, act_qtype)


def _format(tensor: QuantisedTensor | None) -> str:
    """Describes the shapes and dtypes that all layers of a stack must have in common."""
    if tensor is None:
        return "not quantised"
    parts = ", ".join(
        f"{name.lstrip('._')} {part.dtype} {part.shape}"
        for name, part in sorted(tensor.parts.items())
        if "quant_state" not in name
    )
    return f"{tensor.weight.dtype} {tensor.shape} with {parts}"


def _shortened(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"{', '.join(map(str, numbers[:5]))}{more}"


def load_quantised(
    array: StoredArray,
    like: Any,
    read_layer: Callable[[StoredArray, jax.sharding.Sharding | None], Any],
    sharding: jax.sharding.Sharding | None,
) -> Any:
    """Returns a quantised array of a model, loaded layer by layer.

    Args:
      array: the array to load.
      like: the abstract `qwix.QArray` to return.
      read_layer: returns the array of one layer, quantised or not, given its `StoredArray` and
        sharding.
      sharding: the sharding of the whole array. Scales are sharded alike where possible.
    """
    one_layer, layer_sharding, result = array, sharding, None
    if array.stacked:
        one_layer = dataclasses.replace(array, shape=array.shape[1:], stacked=False)
        if isinstance(sharding, NamedSharding):
            layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[1:]))
    for number, name in enumerate(array.names):
        layer = read_layer(dataclasses.replace(one_layer, names=(name,)), layer_sharding)
        if not quantised.is_quantised(layer):
            shape, scales = like.shape, like.scale.shape
            tile = tuple(n // m for n, m in zip(shape, scales, strict=True))[-layer.ndim :]
            layer = round_to(layer, quantised.qtype_name(like), tile, like.scale.dtype)
            check.rounded(name, layer)
            layer = shard_kernel(layer, layer_sharding)
        if not array.stacked:
            return layer
        if result is None:
            result = jax.tree.map(lambda x: allocate_stack(len(array.names), x), layer)
        result = jax.tree.map(lambda whole, x, n=number: set_layer(whole, x, n), result, layer)
        # Wait, so that only one layer's float weights are in memory at a time.
        jax.block_until_ready(result)
    return result
