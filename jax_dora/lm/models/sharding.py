"""Shards a decoder and its batches over the devices of a mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("dp", "fsdp", "tp")
ROWS = ("dp", "fsdp")
# Tensor parallelism shards the output features of these projections.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
# Tensor parallelism shards the input features of these projections.
INPUTS = ("o_proj", "down_proj")
# The axes that sizes have to divide over: the rows of a batch, and sizes of the model's config.
SHARDED_SIZES = {
    "batch": ROWS,
    "hidden_size": ("fsdp",),
    "num_attention_heads": ("tp",),
    "num_key_value_heads": ("tp",),
    "intermediate_size": ("tp",),
}


def to_host(array: jax.Array) -> np.ndarray:
    """Returns the whole array in the host's memory.

    If the array is spread over several processes, all of them have to call this function.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def to_devices(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns a sharded array. Each device of this process gets its part of `array`."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@dataclass(frozen=True)
class DecoderSharding:
    """The shardings of a decoder's arrays on a mesh with three axes.

    - "dp": every device has all weights. Rows of a batch are sharded.
    - "fsdp": every device has a part of the weights, which is gathered where it is used. Rows of a
      batch are sharded.
    - "tp": attention heads and the features of the MLP are sharded.

    An adapter is sharded like its kernel. The rank axis is never sharded.
    """

    mesh: Mesh

    @classmethod
    def over(
        cls, dp: int = 1, fsdp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None
    ) -> Self:
        """Returns the sharding over `devices`, by default all devices.

        Raises:
          ValueError: dp·fsdp·tp is not the number of devices.
        """
        devices = jax.devices() if devices is None else devices
        if dp * fsdp * tp != len(devices):
            raise ValueError(
                f"the mesh dp={dp},fsdp={fsdp},tp={tp} has {dp * fsdp * tp} devices, but there are "
                f"{len(devices)}; expected sizes whose product is {len(devices)}"
            )
        kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
        return cls(jax.make_mesh((dp, fsdp, tp), AXES, axis_types=kinds, devices=devices))

    @property
    def row_shards(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return math.prod(self.mesh.shape[axis] for axis in ROWS)

    @property
    def rows(self) -> NamedSharding:
        """The sharding of activations and tokens [batch, ...]."""
        return NamedSharding(self.mesh, P(ROWS))

    @property
    def micro_batches(self) -> NamedSharding:
        """The sharding of tokens [accumulate, batch, time]."""
        return NamedSharding(self.mesh, P(None, ROWS))

    @property
    def heads(self) -> NamedSharding:
        """The sharding of a cache's keys and values.

        Their shape is [layers, batch, kv_heads, capacity, head_dim].
        """
        return NamedSharding(self.mesh, P(None, None, "tp"))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of arrays that are replicated on every device."""
        return NamedSharding(self.mesh, P())

    def __call__(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an array, given its path and shape.

        A path looks like "model/layers/mlp/up_proj/kernel".
        """
        *_, layer, name = path.split("/")
        spec: tuple[str | None, ...] = ()
        if layer == "embed_tokens" and name == "embedding":
            spec = ("tp", "fsdp")
        elif layer in COLUMNS or layer in INPUTS:
            into, out = ("fsdp", "tp") if layer in COLUMNS else ("tp", "fsdp")
            spec = {
                "kernel": (into, out),
                "lora_a": (into, None),
                "lora_b": (None, out),
            }.get(name, (out,))
        n_leading = len(shape) - len(spec)
        # Axes that do not divide over the mesh, such as an odd vocabulary, are not sharded.
        divisible = (
            axis if axis is None or size % self.mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape[n_leading:], strict=True)
        )
        return NamedSharding(self.mesh, P(*(None,) * n_leading, *divisible))

    def placed(self, tree: Any) -> Any:
        """Returns `tree` with all arrays on the mesh.

        Arrays that are not on a mesh yet are replicated on every device.
        """

        def place(array: jax.Array) -> jax.Array:
            if isinstance(array.sharding, NamedSharding):
                return array
            return jax.device_put(array, self.everywhere)

        return jax.tree.map(place, tree)

    def check(self, **sizes: int) -> None:
        """Checks that sizes of a model, by their names in its config, and a batch divide.

        Raises:
          ValueError: a size does not divide over its axes of the mesh; the message names it.
        """
        for name, size in sizes.items():
            axes = SHARDED_SIZES[name]
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if size % parts:
                raise ValueError(
                    f"{name}={size}: expected a multiple of {parts}, since {'×'.join(axes)} of the "
                    f"mesh is {parts}"
                )
