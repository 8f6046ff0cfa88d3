"""Quantised kernels for code that loads models: their formats, and how a model gets them."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_dora.adapt.quantize import shard_kernel
from jax_dora.layers.quantised_kernel import LAYERS, compute_quantised
from jax_dora.layers.stack import allocate_stack, set_layer
from jax_dora.ops import check, quantised, row_scaled
from jax_dora.ops.forward_coded import ForwardCodes as ForwardCodes
from jax_dora.ops.forward_coded import forward_codes as forward_codes
from jax_dora.ops.forward_coded import multiply_forward as multiply_forward
from jax_dora.ops.quantised import FORMATS as FORMATS
from jax_dora.ops.quantised import NF4 as NF4
from jax_dora.ops.quantised import dense as dense
from jax_dora.ops.rounding import make as make
from jax_dora.ops.rounding import round_to
from jax_dora.ops.row_scaled import BWD_QTYPES as BWD_QTYPES
from jax_dora.ops.row_scaled import QTYPE as QTYPE


def set_kernel(module: Any, kernel: Any) -> None:
    """Gives an `nnx.Linear` or another projection a quantised kernel, perhaps abstract, in
    place."""
    module.kernel.set_value(kernel)
    compute_quantised(module)


def quantise_activations(model: nnx.Module, act_qtype: Any, bwd_qtype: Any = None) -> None:
    """Makes the projections of a quantised model quantise their activations as well, in place, to
    "float8_e4m3fn", and gradients to `bwd_qtype` as in `jax_dora.quantize`; raises ValueError if
    the model is not quantised, or in another format."""
    row_scaled.check_formats(act_qtype, bwd_qtype)
    layers = [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, LAYERS) and quantised.is_quantised(module.kernel.get_value())
    ]
    if not layers:
        raise ValueError(
            f"act_qtype is {act_qtype!r}, but the model is not quantised; expected "
            f"quantize={QTYPE!r} as well, or a folder in that format"
        )
    for name, module in layers:
        row_scaled.check_act_qtype(act_qtype, name, module.kernel.get_value())
        compute_quantised(module, act_qtype, bwd_qtype)


def load_kernel(
    like: Any,
    read: Callable[[str, jax.sharding.Sharding | None], Any],
    names: tuple[str, ...],
    sharding: jax.sharding.Sharding | None,
    *,
    is_stacked: bool,
) -> Any:
    """Returns a quantised kernel, loaded layer by layer.

    Args:
      like: the abstract `qwix.QArray` to return.
      read: returns the array of one layer, given its name and sharding: in the format, or in
        floats, which are rounded to it.
      names: the layers' names; a single one unless `is_stacked` along the leading axis.
      sharding: of the whole array. Scales are sharded alike where possible.
    """
    layer_sharding, result = sharding, None
    if is_stacked and isinstance(sharding, NamedSharding):
        layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[1:]))
    for number, name in enumerate(names):
        layer = read(name, layer_sharding)
        if not quantised.is_quantised(layer):
            shape, scales = like.shape, like.scale.shape
            tile = tuple(n // m for n, m in zip(shape, scales, strict=True))[-layer.ndim :]
            layer = round_to(layer, quantised.qtype_name(like), tile, like.scale.dtype)
            check.rounded(name, layer)
        layer = shard_kernel(layer, layer_sharding)
        if is_stacked:
            if result is None:
                result = jax.tree.map(lambda x: allocate_stack(len(names), x), layer)
            layer = jax.tree.map(lambda whole, x, n=number: set_layer(whole, x, n), result, layer)
            # Wait, so that only one layer's float weights are in memory at a time.
            jax.block_until_ready(layer)
        result = layer
    return result
