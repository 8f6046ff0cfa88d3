"""The shardings of a decoder and its batches over the devices of a mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from jax_dora.models.config import DecoderConfig

AXES = ("dp", "fsdp", "tp")
ROWS = ("dp", "fsdp")
# Whose outputs tensor parallelism shards, and whose inputs.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
INPUTS = ("o_proj", "down_proj")


def whole(array: jax.Array) -> np.ndarray:
    """Returns an array in the host's memory; all processes that have parts of it ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns an array of which every device of this process has its part."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@dataclass(frozen=True)
class DecoderSharding:
    """A mesh of three axes and the place of every array on it.

    Over "dp" weights are the same everywhere; over "fsdp" each device has a part of them, which is
    gathered where it is used; both share the rows of a batch. Over "tp" the devices share heads and
    the MLP's features. An adapter lies like its kernel; the rank is never sharded.
    """

    mesh: Mesh

    @classmethod
    def over(
        cls, dp: int = 1, fsdp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None
    ) -> Self:
        """Returns the sharding over `devices`, by default all there are.

        Raises:
          ValueError: dp·fsdp·tp is not the number of devices.
        """
        devices = jax.devices() if devices is None else devices
        if dp * fsdp * tp != len(devices):
            raise ValueError(
                f"the mesh dp={dp},fsdp={fsdp},tp={tp} takes {dp * fsdp * tp} devices, and there "
                f"are {len(devices)}; expected three factors of {len(devices)}"
            )
        kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
        return cls(jax.make_mesh((dp, fsdp, tp), AXES, axis_types=kinds, devices=devices))

    @property
    def row_shards(self) -> int:
        """Returns how many parts the rows of a batch are in."""
        return math.prod(self.mesh.shape[axis] for axis in ROWS)

    @property
    def rows(self) -> NamedSharding:
        """Returns how activations and tokens [batch, ...] lie."""
        return NamedSharding(self.mesh, P(ROWS))

    @property
    def micro_batches(self) -> NamedSharding:
        """Returns how tokens [accumulate, batch, time] lie."""
        return NamedSharding(self.mesh, P(None, ROWS))

    @property
    def heads(self) -> NamedSharding:
        """Returns how a cache's keys and values [layers, batch, kv_heads, capacity, head_dim]
        lie."""
        return NamedSharding(self.mesh, P(None, None, "tp"))

    @property
    def everywhere(self) -> NamedSharding:
        """Returns the sharding of arrays that every device holds whole."""
        return NamedSharding(self.mesh, P())

    def __call__(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns how the array at a path such as "model/layers/mlp/up_proj/kernel" lies."""
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
        lead = len(shape) - len(spec)
        # A vocabulary need not divide.
        fitting = (
            axis if axis is None or size % self.mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape[lead:], strict=True)
        )
        return NamedSharding(self.mesh, P(*(None,) * lead, *fitting))

    def placed(self, tree: Any) -> Any:
        """Returns `tree` with all arrays on the mesh: those that are not, whole on every device."""

        def place(array: jax.Array) -> jax.Array:
            if isinstance(array.sharding, NamedSharding):
                return array
            return jax.device_put(array, self.everywhere)

        return jax.tree.map(place, tree)

    def check(self, config: "DecoderConfig", batch: int) -> None:
        """Checks that a model and batches of `batch` rows divide over the mesh.

        Raises:
          ValueError: they do not; the message names what.
        """
        sizes = self.mesh.shape
        for name, size, axes in (
            ("--batch", batch, ROWS),
            ("the model's hidden_size", config.hidden_size, ("fsdp",)),
            ("the model's num_attention_heads", config.num_attention_heads, ("tp",)),
            ("the model's num_key_value_heads", config.num_key_value_heads, ("tp",)),
            ("the model's intermediate_size", config.intermediate_size, ("tp",)),
        ):
            parts = math.prod(sizes[axis] for axis in axes)
            if size % parts:
                raise ValueError(
                    f"{name} is {size}, and {'×'.join(axes)} of the mesh is {parts}; expected a "
                    f"multiple of {parts}"
                )
