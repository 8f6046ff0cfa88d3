"""A model's arrays that are quantised as they are read from a folder, or were quantised in it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_dora.adapt.quantize import shard_kernel
from jax_dora.layers.quantised import LAYERS, compute_quantised
from jax_dora.layers.stack import allocate_stack, set_layer
from jax_dora.models.quantised_weights import QuantisedTensor
from jax_dora.models.weights import StoredTensor
from jax_dora.ops import quantised, row_wise
from jax_dora.ops.rounding import round_to


def quantised_tensors(
    names: Iterable[str], stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, QuantisedTensor]:
    """Returns the weights among `names` that a folder holds quantised."""
    found = {name: QuantisedTensor.of(name, stored, config) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def as_in_folder(model: Any, targets: Iterable[Any], found: Mapping[str, QuantisedTensor]) -> None:
    """Gives an abstract model, in place, quantised kernels where a folder has them."""
    for target in targets:
        its = [found.get(name) for name in target.names]
        if not any(its):
            continue
        kinds = {None if one is None else _shapes(one) for one in its}
        if len(kinds) > 1 or target.path[-1] != "kernel":
            raise ValueError(
                f"{'/'.join(target.path)} is quantised in {sum(map(bool, its))} of its {len(its)} "
                f"tensors, {target.names[0]} and so on; expected all layers of a stack alike, and "
                "kernels alone"
            )
        module = functools.reduce(getattr, target.path[:-1], model)
        kernel = its[0].abstract if its[0] is not None else None
        count = (len(its),) if target.stacked else ()
        kernel = jax.tree.map(
            lambda one, count=count: jax.ShapeDtypeStruct((*count, *one.shape), one.dtype), kernel
        )
        module.kernel.set_value(kernel)
        compute_quantised(module)


def compute_by_rows(model: Any, act_qtype: str) -> None:
    """Has the projections of a model that is quantised quantise their activations too, in place."""
    quantised_layers = [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, LAYERS) and quantised.is_quantised(module.kernel.get_value())
    ]
    if not quantised_layers:
        raise ValueError(
            f"act_qtype is {act_qtype!r} and the model is not quantised; expected "
            f"quantize={row_wise.QTYPE!r} beside it, or a folder in that format"
        )
    for name, module in quantised_layers:
        row_wise.check_act_qtype(act_qtype, name, module.kernel.get_value())
        compute_quantised(module, act_qtype)


def _shapes(tensor: QuantisedTensor) -> Any:
    """Returns the shapes and formats that layers in a stack have to share."""
    parts = ((name, part.shape, part.dtype) for name, part in tensor.parts.items())
    held = tuple(sorted((one for one in parts if "quant_state" not in one[0]), key=str))
    return tensor.weight.dtype, tensor.shape, held


def load_quantised(
    target: Any,
    like: Any,
    read: Callable[[Any, jax.sharding.Sharding | None], Any],
    sharding: jax.sharding.Sharding | None,
) -> Any:
    """Returns a quantised array of a model, layer by layer.

    Args:
      target: the `Target`.
      like: the `qwix.QArray` that it is to be, of shapes alone.
      read: (the target of one layer, its sharding) to that layer's array, quantised or not.
      sharding: of the whole array; its scales are sharded alike where they can be.
    """
    one_layer, its_sharding, arrays = target, sharding, None
    if target.stacked:
        one_layer = dataclasses.replace(target, shape=target.shape[1:], stacked=False)
        if isinstance(sharding, NamedSharding):
            its_sharding = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[1:]))
    for number, name in enumerate(target.names):
        layer = read(dataclasses.replace(one_layer, names=(name,)), its_sharding)
        if not quantised.is_quantised(layer):
            shape, scales = like.shape, like.scale.shape
            tile = tuple(n // m for n, m in zip(shape, scales, strict=True))[-layer.ndim :]
            layer = round_to(layer, quantised.qtype_name(like), tile, like.scale.dtype)
            quantised.check(name, layer)
            layer = shard_kernel(layer, its_sharding)
        if not target.stacked:
            return layer
        if arrays is None:
            arrays = jax.tree.map(lambda x: allocate_stack(len(target.names), x), layer)
        arrays = jax.tree.map(lambda whole, x, n=number: set_layer(whole, x, n), arrays, layer)
        # The next layer's float copy is made when this one's has gone.
        jax.block_until_ready(arrays)
    return arrays
