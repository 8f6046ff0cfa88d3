"""Maps a model's arrays to the tensors of a Hugging Face folder, and loads them.

A tensor [out, in] of a linear layer is a kernel [in, out] in the model, and the arrays of all
layers are stacked. Transposing and stacking happen on the device, block by block.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_dora.lm.models.config import DecoderConfig
from jax_dora.lm.models.sharding import to_host
from jax_dora.lm.models.tensor_files import StoredTensor
from jax_dora.ops import is_quantised
from jax_dora.quantisation import dense

# For each name in the model: the name in the folder, and whether the tensor is transposed.
LEAVES = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
}
BLOCK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a model, and the tensors of a folder that hold its values.

    Attributes:
      path: the path in the model's state, such as ("model", "layers", "mlp", "up_proj", "kernel").
      shape: the shape of the array.
      dtype: the dtype of the array; the dtype that it dequantises to if it is quantised.
      names: the names of its tensors: one per layer if it is stacked, else a single one.
      stacked: whether the array has a leading layer axis.
      transposed: whether each tensor is the transpose of the array.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    @property
    def tensor_bytes(self) -> int:
        """The size of each of its tensors."""
        return math.prod(self.tensor_shape) * self.dtype.itemsize


def stored_arrays(state: nnx.State, config: DecoderConfig) -> Iterator[StoredArray]:
    """Yields the `StoredArray` of every array in a model's state.

    Raises:
      ValueError: the model has an array that the format cannot store, such as an adapter's.
    """
    for path, variable in nnx.to_flat_state(state):
        path = tuple(map(str, path))
        if path[-1] not in LEAVES:
            raise ValueError(
                f"the model has {'/'.join(path)}, which a Hugging Face model folder cannot store: "
                "merge the adapters with jax_dora.merge_dora first"
            )
        leaf, transposed = LEAVES[path[-1]]
        stacked = path[:2] == ("model", "layers")
        if stacked:
            suffix = ".".join((*path[2:-1], leaf))
            names = tuple(f"model.layers.{n}.{suffix}" for n in range(config.num_hidden_layers))
        else:
            names = (".".join((*path[:-1], leaf)),)
        value = variable.get_value()
        # A quantised array has the dtype of its scales.
        shape, dtype = value.shape, np.dtype(config.dtype if is_quantised(value) else value.dtype)
        yield StoredArray(path, shape, dtype, names, stacked, transposed)


def load_array(
    array: StoredArray, tensors: list[StoredTensor], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Returns the array loaded from its tensors, filled block by block."""
    if sharding is None:
        # The result is on the default device, but not committed to it.
        return _load_part(array, tensors, None, (slice(None),) * len(array.shape))
    indices = sharding.addressable_devices_indices_map(array.shape)
    parts = [_load_part(array, tensors, device, index or ()) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _load_part(
    array: StoredArray,
    tensors: list[StoredTensor],
    device: Any,  # a jax.Device, which type checkers take for a function
    index: tuple[slice, ...],
) -> jax.Array:
    """Returns the part `array[index]` on `device`."""
    bounds = [slice(*s.indices(n)[:2]) for s, n in zip(index, array.shape, strict=True)]
    part = jnp.zeros([s.stop - s.start for s in bounds], array.dtype, device=device)
    layers = range(len(tensors))
    if array.stacked:
        layers, bounds = layers[bounds[0]], bounds[1:]
    tensor_bounds = bounds[::-1] if array.transposed else bounds
    rows, columns = tensor_bounds[0], tensor_bounds[-1]
    for number, layer in enumerate(layers):
        for start, block in tensors[layer].blocks(rows, columns, BLOCK_BYTES):
            corner = [0] * len(bounds)
            corner[-1 if array.transposed else 0] = start - rows.start
            if array.stacked:
                corner = [number, *corner]
            part = _write(
                part,
                jax.device_put(block, device),
                jax.device_put(np.array(corner, np.int32), device),
                transposed=array.transposed,
            )
            # Without waiting, blocks whose transfer is pending would pile up on the host.
            part.block_until_ready()
    return part


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _write(part: jax.Array, block: jax.Array, corner: jax.Array, *, transposed: bool) -> jax.Array:
    block = (block.T if transposed else block).astype(part.dtype)
    block = block.reshape((1,) * (part.ndim - block.ndim) + block.shape)
    return lax.dynamic_update_slice(part, block, list(corner))


def layer_tensor(value: Any, array: StoredArray, layer: int) -> np.ndarray:
    """Returns the tensor to store for one layer of the array's `value`, in the host's memory."""
    value = value[layer] if array.stacked else value
    tensor = to_host(dense(value, array.dtype))
    return tensor.T if array.transposed else tensor


def tensors_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Returns whether two stored tensors have the same values; reads them block by block."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    everything = slice(0, a.shape[0]), slice(None), BLOCK_BYTES
    pairs = zip(a.blocks(*everything), b.blocks(*everything), strict=True)
    return all(np.array_equal(left, right) for (_, left), (_, right) in pairs)
