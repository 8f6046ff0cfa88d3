"""The arrays of a model and the stored tensors that each is made of, read and written.

A linear layer's weight [out, in] is stored here as kernel [in, out], and the layers' arrays are
stacked; both happen on the device, block by block.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_dora.models.config import DecoderConfig
from jax_dora.models.sharding import whole
from jax_dora.models.weights import StoredTensor
from jax_dora.ops.quantised import dense, is_quantised

# Name in the file, and whether it is stored transposed, of each name in the model.
LEAVES = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
}
BLOCK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """An array of the model and the tensors it is made of: one a layer, or one."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    def tensor_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape


def targets(state: nnx.State, config: DecoderConfig) -> Iterator[Target]:
    """Yields every array of a model's state, and the tensors of a folder that it is made of."""
    for path, variable in nnx.to_flat_state(state):
        path = tuple(map(str, path))
        if path[-1] not in LEAVES:
            raise ValueError(
                f"the model has {'/'.join(path)}, which a Hugging Face model folder has no place "
                "for: merge the adapters with jax_dora.merge_dora first"
            )
        leaf, transposed = LEAVES[path[-1]]
        stacked = path[:2] == ("model", "layers")
        if stacked:
            inside = ".".join((*path[2:-1], leaf))
            names = tuple(f"model.layers.{n}.{inside}" for n in range(config.num_hidden_layers))
        else:
            names = (".".join((*path[:-1], leaf)),)
        value = variable.get_value()
        # A quantised kernel stands for one of the model's dtype, whatever its scales have.
        shape, dtype = value.shape, np.dtype(config.dtype if is_quantised(value) else value.dtype)
        yield Target(path, shape, dtype, names, stacked, transposed)


def load(
    target: Target, tensors: list[StoredTensor], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Returns the array of stored tensors, one a layer or one, filled block by block."""
    if sharding is None:
        # On the default device, and free to be moved from there.
        return _load_part(target, tensors, None, (slice(None),) * len(target.shape))
    indices = sharding.addressable_devices_indices_map(target.shape)
    parts = [_load_part(target, tensors, device, index or ()) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, parts)


def _load_part(
    target: Target,
    tensors: list[StoredTensor],
    device: Any,  # a jax.Device, which type checkers take for a function
    index: tuple[slice, ...],
) -> jax.Array:
    """Returns the part of the target that `index` cuts out, on `device`."""
    bounds = [slice(*s.indices(n)[:2]) for s, n in zip(index, target.shape, strict=True)]
    part = jnp.zeros([s.stop - s.start for s in bounds], target.dtype, device=device)
    layers = range(len(tensors))
    if target.stacked:
        layers, bounds = layers[bounds[0]], bounds[1:]
    tensor_bounds = bounds[::-1] if target.transposed else bounds
    rows, columns = tensor_bounds[0], tensor_bounds[-1]
    for place, layer in enumerate(layers):
        for start, block in tensors[layer].blocks(rows, columns, BLOCK_BYTES):
            corner = [0] * len(bounds)
            corner[-1 if target.transposed else 0] = start - rows.start
            if target.stacked:
                corner = [place, *corner]
            part = _write(
                part,
                jax.device_put(block, device),
                jax.device_put(np.array(corner, np.int32), device),
                transposed=target.transposed,
            )
            # Blocks that wait for their transfer would pile up on the host.
            part.block_until_ready()
    return part


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _write(part: jax.Array, block: jax.Array, corner: jax.Array, *, transposed: bool) -> jax.Array:
    block = (block.T if transposed else block).astype(part.dtype)
    block = block.reshape((1,) * (part.ndim - block.ndim) + block.shape)
    return lax.dynamic_update_slice(part, block, list(corner))


def nbytes(target: Target) -> int:
    """Returns how many bytes one of the target's tensors takes."""
    return int(np.prod(target.tensor_shape())) * target.dtype.itemsize


def fetch(array: Any, target: Target, layer: int) -> np.ndarray:
    """Returns a layer's tensor of the target's array, as the file has it."""
    array = array[layer] if target.stacked else array
    value = whole(dense(array, target.dtype))
    return value.T if target.transposed else value


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Returns whether two stored tensors have the same values, read block by block."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    whole = slice(0, a.shape[0]), slice(None), BLOCK_BYTES
    pairs = zip(a.blocks(*whole), b.blocks(*whole), strict=True)
    return all(np.array_equal(left, right) for (_, left), (_, right) in pairs)
