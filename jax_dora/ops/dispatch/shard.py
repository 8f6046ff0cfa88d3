"""How the arrays of an operator are sharded over the devices of a mesh."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Shard:
    """How a call is sharded; by default not at all: pairs of a named axis and the mesh axes that it
    is sharded over; the mesh axes that a contracted axis is sharded over, `summed`; whether a
    matrix is gathered for the call, like kernels under FSDP, while a product runs; and, if the
    operator gathers one itself, the axis of which a device has a part, and its mesh axes."""

    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    summed: tuple[str, ...] = ()
    gathered: bool = False
    apart: tuple[int, tuple[str, ...]] | None = None

    @property
    def shares_rows(self) -> bool:
        """Returns whether rows are sharded. The gradients of parameters are then summed over the
        devices while other gradients are computed."""
        return any(name.startswith("t") for name, _ in self.axes)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that a named axis is sharded over."""
        return dict(self.axes).get(name, ())

    def start(self, name: str, size: int) -> Any:
        """Returns the global index of the device's first of `size` elements of a named axis."""
        axes = self.mesh_axes(name)
        return lax.axis_index(axes) * size if axes else 0

    def on_first_device(self, array: Any) -> Any:
        """Returns a summand that enters the sum over devices once: zeros except on the first."""
        if array is None or not self.summed:
            return array
        return jnp.where(lax.axis_index(self.summed) == 0, array, jnp.zeros((), array.dtype))

    def sum(self, array: Any) -> Any:
        """Returns the sum of the partial sums of the devices.

        Of a vector, each device sums a part, which is then gathered, as an all-reduce does it, too.
        But XLA joins the all-reduces of all layers' vectors to one, and writes a kernel for each
        vector that it cuts out of the result, which takes longer to compile than all else that a
        further layer adds.
        """
        if not self.summed or array is None:
            return array
        if array.ndim == 1 and array.size % lax.axis_size(self.summed) == 0:
            part = lax.psum_scatter(array, self.summed, tiled=True)
            return lax.all_gather(part, self.summed, tiled=True)
        return lax.psum(array, self.summed)

    def gather(self, matrix: jax.Array) -> jax.Array:
        """Returns the matrix that the operator gathers itself, whole; or, if devices have parts of
        its last axis, [parts, first axis, last axis / parts], which is how they arrive."""
        if self.apart is None:
            return matrix
        axis, over = self.apart
        return lax.all_gather(matrix, over, tiled=axis == 0)

    def as_copies(self, *arrays: Any) -> tuple[Any, ...]:
        """Returns `arrays` for a kernel; during collectives behind a barrier, before which XLA
        copies parts of stacks. Else it joins the kernel with the reading of the stack, and its
        scheduler no longer sees the kernel's time."""
        return lax.optimization_barrier(arrays) if self.gathered else arrays

    def max(self, array: Any) -> Any:
        """Returns the elementwise maximum over the devices that share a contracted axis."""
        return lax.pmax(array, self.summed) if self.summed else array


def spec(names: Sequence[str], shard: Shard) -> jax.sharding.PartitionSpec:
    """Returns the PartitionSpec of an array with these axis names."""
    return jax.P(*(shard.mesh_axes(name) or None for name in names))


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()
