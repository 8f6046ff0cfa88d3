"""The sharding that a caller asks a layer's result to have."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType

from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.quantised import stored


def with_out_sharding(
    out_sharding: Any, function: Callable[[Any], jax.Array], operands: Mapping[str, Any]
) -> jax.Array:
    """Returns `function(operands)` of arrays by name, with the sharding that the caller asks for: a
    PartitionSpec or NamedSharding over explicit axes of the operands' mesh, or None. Raises
    ValueError if it names an axis that is not explicit."""
    if out_sharding is None:
        return function(operands)
    arrays = jax.tree.leaves(operands)
    mesh = meshes.explicit(*arrays) or jax.typeof(stored(operands["kernel"])).sharding.mesh
    spec = getattr(out_sharding, "spec", out_sharding)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = jax.tree.leaves(tuple(spec))
    if others := [name for name in names if types.get(name) is not AxisType.Explicit]:
        raise ValueError(
            f"out_sharding is {spec}; expected explicit axes of the kernel's mesh, but "
            f"{', '.join(others)} is not one of them: the mesh has {types}. For an axis that is "
            "left to XLA, use jax.lax.with_sharding_constraint on the result"
        )
    if AxisType.Explicit not in mesh.axis_types:
        return function(operands)
    return meshes.with_auto_axes(function, mesh, jax.P(*spec))(operands)
