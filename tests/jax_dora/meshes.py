"""Meshes of the first devices, their axes as keyword arguments."""

import functools

import jax
from jax.sharding import AxisType, Mesh


def mesh_of(axis_type: AxisType, /, **sizes: int) -> Mesh:
    """Returns a mesh with an axis of each of the `sizes`."""
    names = tuple(sizes)
    return jax.make_mesh(tuple(sizes.values()), names, axis_types=(axis_type,) * len(names))


automatic = functools.partial(mesh_of, AxisType.Auto)
explicit = functools.partial(mesh_of, AxisType.Explicit)
