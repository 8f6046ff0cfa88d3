"""The Flax layer that an adapter is put on: what may be adapted, and how its kernel is sharded."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_dora.layers.quantised import ARITHMETIC, BY_ROWS
from jax_dora.ops.quantised import stored

# What a Flax layer may be given in place of its own arithmetic. The adapter's part of the result
# would not go through it.
_OWN_ARITHMETIC = {
    "promote_dtype": (dtypes.promote_dtype,),
    "dot_general": (None, lax.dot_general),
    "dot_general_cls": (None,),
    "conv_general_dilated": (lax.conv_general_dilated,),
    "einsum_op": (jnp.einsum,),
    "preferred_element_type": (None,),
    "mask": (None,),
}


def check_base(base: Any, expected: type[nnx.Module]) -> None:
    """Checks that a layer of type `expected` can be adapted."""
    if not isinstance(base, expected):
        raise TypeError(
            f"the layer is a {type(base).__name__}; expected an nnx.{expected.__name__}: of a "
            "module that holds one, adapt that one"
        )
    if type(base).__call__ is not expected.__call__:
        way_on = way_on_from(base) or (
            f"expected an nnx.{expected.__name__} itself, or apply_dora's example=, inputs to call "
            "the model with, by which what reads the weight is adapted"
        )
        raise TypeError(
            f"the layer is a {type(base).__name__}, which computes something else than "
            f"nnx.{expected.__name__}; {way_on}"
        )
    for name, allowed in _OWN_ARITHMETIC.items():
        value = getattr(base, name, allowed[0])
        ours = (of.get(name, allowed[0]) for of in (ARITHMETIC, BY_ROWS))
        if not any(value is one for one in (*allowed, *ours)):
            shape = getattr(value, "shape", None)
            told = repr(value) if shape is None else f"an array of shape {tuple(shape)}"
            raise NotImplementedError(
                f"the layer's {name} is {told}; expected Flax's default, the only one that a "
                "DoRA layer honours: set it back, or leave this layer unadapted"
            )


def way_on_from(layer: Any) -> str:
    """Returns what to do instead, where a layer's class says why nobody can adapt it, or ""."""
    return getattr(type(layer), "instead_of_adapting", "")


def set_as_read(parameter: nnx.Variable, value: Any) -> None:
    """Sets a parameter so that its value is read as given.

    Raises:
      NotImplementedError: its class or its hooks make another number of it.
    """
    parameter.set_value(value)
    read, wanted = jax.tree.leaves(parameter.get_value()), jax.tree.leaves(value)
    for one, other in zip(read, wanted, strict=True):
        is_known = one is not other and not isinstance(one, Tracer)
        if is_known and not jnp.array_equal(one, other, equal_nan=True):
            raise NotImplementedError(
                f"what is read of its kernel, a {type(parameter).__name__}, is not what was set; "
                "expected a variable without get_value, set_value or hooks of its own: put "
                "nnx.Param of what is read of it into the plain layer"
            )


def copy_attributes(source: Any, target: Any, leave_out: Collection[str] = ()) -> None:
    """Sets every attribute of `source` on `target`, variables too, as data where it is data."""
    is_data = vars(source)["_pytree__nodes"]
    for name, value in vars(source).items():
        if not name.startswith("_pytree__") and name not in leave_out:
            setattr(target, name, nnx.data(value) if is_data[name] else value)


def bare(module_type: type[nnx.Module]) -> Any:
    """Returns an object of this class without attributes, whose constructor has not run."""
    module = nnx.Module()
    module.__class__ = module_type
    return module


def is_node(value: Any) -> bool:
    """Returns whether a walk through a model treats `value` as one thing, not as a container."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def axis_names(kernel: nnx.Param) -> tuple[Any, ...]:
    """Returns for each of the kernel's axes the axis of the mesh that it is sharded over, or None,
    as its `out_sharding` metadata says."""
    return padded(_sharding_metadata(kernel).get("out_sharding", ()), kernel.ndim)


def padded(names: Any, ndim: int) -> tuple[Any, ...]:
    """Returns the names of an array's axes, None for each that has none."""
    return (*names, *(None,) * (ndim - len(names)))


def sharded_like(
    kernel: nnx.Param, kind: type[nnx.LoRAParam], value: Any, names: tuple[Any, ...]
) -> Any:
    """Returns a variable of this kind for an adapter's array, with the kernel's sharding metadata
    and these names of its own axes; as it is where the value brings metadata."""
    if isinstance(value, nnx.VariableMetadata):
        return kind(value)
    metadata = _sharding_metadata(kernel)
    if "out_sharding" in metadata:
        metadata["out_sharding"] = names
        sharding = mesh_sharding(kernel)
        is_on_mesh = isinstance(value, Tracer) or isinstance(
            getattr(value, "sharding", None), NamedSharding
        )
        if sharding is not None and not is_on_mesh:
            # Flax shards what lies on a mesh alone; an initializer may make it on one device.
            value = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return kind(value, **metadata)


def mesh_sharding(variable: nnx.Variable) -> NamedSharding | None:
    """Returns how a concrete array lies on a mesh of its own."""
    value = stored(variable.get_value())
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding
    return None


def _sharding_metadata(kernel: nnx.Param) -> dict[str, Any]:
    metadata = kernel.get_metadata()
    keys = ("out_sharding", "sharding_rules", "mesh")
    return {key: metadata[key] for key in keys if metadata.get(key) is not None}
