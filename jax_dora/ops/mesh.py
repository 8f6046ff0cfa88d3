"""Runs operators on meshes of several devices.

On a mesh with explicit axes its operands say how they are sharded, and its result has to. Inside
`jax.shard_map` with check_vma, its default, a custom gradient has to vary over the same axes of the
mesh as its primal.

Operands come as one NamedTuple of `jax_dora.ops.operands`, in which None stays None.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def explicit(*arrays: jax.Array) -> AbstractMesh | None:
    """Returns the mesh with explicit axes that one of the arrays lies on, or None."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def context_of(array: jax.Array) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of the mesh whose explicit axes `array` lies on."""
    mesh = explicit(array)
    if mesh is None or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def spec(array: jax.Array) -> tuple[Any, ...]:
    """Returns the mesh axes that each axis of `array` is sharded over, None where XLA decides."""
    return tuple(jax.typeof(array).sharding.spec)


def elementwise(
    function: Callable[[Any], jax.Array], one: jax.Array, other: jax.Array
) -> Callable[[Any], jax.Array]:
    """Returns `function`, of operands among which are these two arrays [..., out], as it can be
    called here: on a mesh with explicit axes its result is sharded as their sum is."""
    mesh = explicit(one, other)
    if mesh is None:
        return function
    pairs = list(zip(spec(one), spec(other), strict=True))
    result = [a or b for a, b in pairs]
    axes = jax.tree.leaves(result)
    if len(axes) > len(set(axes)) or any(a and b and a != b for a, b in pairs):
        return function  # JAX refuses two shardings
    return left_to_xla(function, mesh, jax.P(*result))


def result_spec(function: Callable[..., jax.Array], *operands: jax.Array) -> PartitionSpec:
    """Returns how JAX shards the result of `function` of operands on explicit axes."""
    # jax.eval_shape tells nothing where some axes of the mesh are not explicit.
    result: Any = jax.make_jaxpr(function)(*operands).out_avals[0]
    return result.sharding.spec


def left_to_xla(
    function: Callable[..., jax.Array], mesh: AbstractMesh, result: PartitionSpec
) -> Callable[..., jax.Array]:
    """Returns `function` for operands on explicit axes, which XLA takes over inside of it."""
    sharding: Any = NamedSharding(mesh, result)
    return cast(Any, jax.sharding.auto_axes(function, out_sharding=sharding))


def differentiable[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which has a custom gradient and one static argument, its first, as it can
    be called here: compiled inside a manual mesh, where JAX does not run a custom gradient
    otherwise."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return _compiled(function) if manual else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(lambda static, operands: function(static, operands), static_argnums=0)


def vary_alike[Tree](operands: Tree) -> Tree:
    """Returns the operands, each varying over every mesh axis that one of them varies over.

    The gradient of one that varied over fewer is then summed over the others.
    """
    axes = varying(operands)
    return jax.tree.map(lambda operand: vary(operand, axes), operands)


def varying(tree: Any) -> frozenset[Any]:
    """Returns the axes of a manual mesh that any array of `tree` varies over."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `array`, taken to vary over `axes` of a manual mesh."""
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return lax.pcast(array, tuple(missing), to="varying") if missing else array


def of_one_device(array: jax.Array) -> jax.Array:
    """Returns `array` of a manual mesh of one device, taken to vary over none of its axes: Pallas
    interprets kernels on one device only, and not all of them where an operand varies."""
    axes = jax.typeof(array).manual_axis_type.varying
    return lax.psum(array, tuple(axes)) if axes else array
