"""The Flax layer below an adapter: whether it can be adapted, its attributes and its sharding."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_dora.layers.quantised_kernel import ARITHMETIC, ROW_SCALED_DOTS
from jax_dora.ops.quantised import stored

# The attributes by which a user replaces a Flax layer's arithmetic, and the values that can be
# adapted. The adapter's part of the result would not use any other value.
_CUSTOM_ARITHMETIC = {
    "promote_dtype": (dtypes.promote_dtype,),
    "dot_general": (None, lax.dot_general),
    "dot_general_cls": (None,),
    "conv_general_dilated": (lax.conv_general_dilated,),
    "einsum_op": (jnp.einsum,),
    "preferred_element_type": (None,),
    "mask": (None,),
}

# Metadata of a Flax variable: what MaxText records of a stack, and what tells how to shard.
_STACK_METADATA = (nnx.PARTITION_NAME, "param_scan_axis")
_SHARDING = ("sharding_rules", "mesh", "eager_sharding")


def check_base(base: Any, expected: type[nnx.Module]) -> None:
    """Raises TypeError or NotImplementedError if `base` is no `expected` that can be adapted."""
    if not isinstance(base, expected):
        raise TypeError(
            f"the layer is a {type(base).__name__}; expected an nnx.{expected.__name__}: if a "
            "module contains such a layer, adapt that layer"
        )
    if not computes_like(type(base), expected):
        hint = adaptation_hint(base) or (
            f"expected an nnx.{expected.__name__} itself, or inputs for the model as example= of "
            "apply_dora, which then adapts the operations that read the weight"
        )
        raise TypeError(
            f"the layer is a {type(base).__name__}, which computes something else than "
            f"nnx.{expected.__name__}; {hint}"
        )
    for name, allowed in _CUSTOM_ARITHMETIC.items():
        value = getattr(base, name, allowed[0])
        quantised = [ARITHMETIC.get(name, allowed[0])]
        quantised += ROW_SCALED_DOTS.values() if name == "dot_general" else ()
        if not any(value is choice for choice in (*allowed, *quantised)):
            shape = getattr(value, "shape", None)
            described = repr(value) if shape is None else f"an array of shape {tuple(shape)}"
            raise NotImplementedError(
                f"the layer's {name} is {described}; expected Flax's default, the only value that "
                "a DoRA layer supports: reset it, or leave this layer unadapted"
            )


def computes_like(module_type: type[nnx.Module], expected: type[nnx.Module]) -> bool:
    """Returns whether a subclass of the Flax layer `expected` computes what the layer computes: its
    methods that read the weight, __call__ and attend, are the layer's."""
    return all(
        getattr(module_type, name) is getattr(expected, name)
        for name in ("__call__", "attend")
        if hasattr(expected, name)
    )


def check_has_values(
    tree: Any, function: str, *, name: str = "model", can_trace: bool = True
) -> None:
    """Raises ValueError if an array of `tree`, an nnx module or any pytree that the message calls
    `name`, is a `jax.ShapeDtypeStruct`; or a tracer, unless `function`, which reads the values,
    `can_trace`."""
    abstract = jax.ShapeDtypeStruct if can_trace else (jax.ShapeDtypeStruct, Tracer)
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, abstract):
            keys = [key for key in keys if key != jax.tree_util.GetAttrKey("value")]
            path = jax.tree_util.keystr(tuple(keys), simple=True, separator="/")
            fix = f"create it, and call {function}, outside of nnx.eval_shape and jit"
            if can_trace:
                fix = (
                    f"create it outside of nnx.eval_shape, or, to get shapes, call {function} "
                    "inside of nnx.eval_shape too"
                )
            raise ValueError(
                f"{name} is abstract: {path!r} is a {type(leaf).__name__} of shape {leaf.shape}; "
                f"expected arrays, since {function} reads their values: {fix}"
            )


def class_attribute(value: Any) -> Any:
    """Returns what makes `value`, which is callable, an attribute of a class that is read as
    `value`. `nnx.capture` takes every other callable attribute for a method and wraps it."""
    return _ClassAttribute(value)


class _ClassAttribute:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.value


def on_devices_of(like: Any, value: Any) -> Any:
    """Returns `value`, sharded like `like` if that is committed to other devices."""
    arrays = (like, value)
    if any(isinstance(array, Tracer) or not isinstance(array, jax.Array) for array in arrays):
        return value
    if not like.committed or like.sharding.device_set == value.sharding.device_set:
        return value
    return jax.device_put(value, like.sharding)


def adaptation_hint(layer: Any) -> str:
    """Returns what to do instead, if the layer's class says that it cannot be adapted; else ""."""
    return getattr(type(layer), "instead_of_adapting", "")


def set_and_verify(parameter: nnx.Variable, value: Any) -> None:
    """Sets the value of a parameter. Raises NotImplementedError if the variable's class or hooks
    change it."""
    parameter.set_value(value)
    read_leaves, set_leaves = jax.tree.leaves(parameter.get_value()), jax.tree.leaves(value)
    for read, wanted in zip(read_leaves, set_leaves, strict=True):
        is_comparable = read is not wanted and not isinstance(read, Tracer)
        if is_comparable and not jnp.array_equal(read, wanted, equal_nan=True):
            raise NotImplementedError(
                f"its kernel, a {type(parameter).__name__}, returns another value than was set; "
                "expected a variable without its own get_value, set_value or hooks: replace it in "
                "the plain layer by an nnx.Param of the value that it returns"
            )


def copy_attributes(source: Any, target: Any, leave_out: Collection[str] = ()) -> None:
    """Sets every attribute of `source`, variables too, on `target`, as pytree data or not."""
    is_data = vars(source)["_pytree__nodes"]
    for name, value in vars(source).items():
        if not name.startswith("_pytree__") and name not in leave_out:
            setattr(target, name, nnx.data(value) if is_data[name] else value)


def new_instance(module_type: type[nnx.Module]) -> Any:
    """Returns an instance of `module_type` without attributes: its constructor does not run."""
    module = nnx.Module()
    module.__class__ = module_type
    return module


def is_node(value: Any) -> bool:
    """Returns whether `value` is an nnx module or variable rather than a container."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def axis_names(kernel: nnx.Param) -> tuple[Any, ...]:
    """Returns the mesh axes, or None, over which `out_sharding` metadata shard each kernel axis."""
    return pad_axes(kernel.get_metadata().get("out_sharding") or (), kernel.ndim)


def pad_axes(names: Any, ndim: int) -> tuple[Any, ...]:
    """Returns `names` of an array's first axes, padded with None to `ndim` entries."""
    return (*names, *(None,) * (ndim - len(names)))


def like_kernel(
    kernel: nnx.Param,
    kind: type[nnx.LoRAParam],
    value: Any,
    own: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    stack_axis: int | None,
) -> Any:
    """Returns a variable of type `kind` on the kernel's device, with all metadata that the kernel
    has about its axes, unless `value`, an array or `nnx.VariableMetadata`, has sharding metadata of
    its own. `own` takes one entry for each axis of the kernel and returns those of the variable's
    axes; `stack_axis` is the variable's outermost stack axis or None."""
    metadata = kernel.get_metadata()
    about_axes = {
        name: own(pad_axes(entries, kernel.ndim))
        for name, entries in metadata.items()
        if isinstance(entries, tuple | list | PartitionSpec)
        and not name.startswith(("on_", "sharding"))  # hooks, and old names of out_sharding
        and (len(entries) == kernel.ndim or name == "out_sharding")
    }
    names = (*_STACK_METADATA, *_SHARDING)
    others = {name: metadata[name] for name in names if metadata.get(name) is not None}
    if "param_scan_axis" in others and stack_axis is not None:
        others["param_scan_axis"] = stack_axis
    if isinstance(value, nnx.VariableMetadata):
        missing = {*_STACK_METADATA, "eager_sharding"} & others.keys() - value.metadata.keys()
        return kind(value, **{name: others[name] for name in missing})
    array = stored(kernel.get_value())
    if isinstance(getattr(array, "sharding", None), SingleDeviceSharding):
        # Keys that a layer on a mesh has used before are on that mesh, and so is what they draw.
        value = on_devices_of(array, value)
    if "out_sharding" in about_axes:
        sharding = mesh_sharding(kernel)
        is_on_mesh = isinstance(value, Tracer) or isinstance(
            getattr(value, "sharding", None), NamedSharding
        )
        if sharding is not None and not is_on_mesh:
            # Flax shards only arrays that are on a mesh; an initializer may create the value on a
            # single device.
            value = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return kind(value, **about_axes, **others)


def mesh_sharding(variable: nnx.Variable) -> NamedSharding | None:
    """Returns the sharding of a concrete array on a concrete mesh; None for any other array."""
    value = stored(variable.get_value())
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding
    return None
