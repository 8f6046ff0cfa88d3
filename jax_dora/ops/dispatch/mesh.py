"""Runs operators on meshes of several devices.

On a mesh with explicit axes, JAX requires the sharding of the operator's result. Inside
`jax.shard_map` with check_vma, its default, JAX requires that the gradient of an operand varies
over the same mesh axes as the operand.

Operands are a NamedTuple of `jax_dora.ops.operands`, in which None stays None.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def explicit(*arrays: jax.Array) -> AbstractMesh | None:
    """Returns the mesh with explicit axes that one of the arrays is sharded over, or None."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def context_of(array: jax.Array) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that sets the mesh with explicit axes of `array`, if it has one."""
    mesh = explicit(array)
    if mesh is None or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def spec(array: jax.Array) -> tuple[Any, ...]:
    """Returns the mesh axes that each axis of `array` is sharded over, None for automatic axes."""
    return tuple(jax.typeof(array).sharding.spec)


def elementwise(
    function: Callable[[Any], jax.Array], first: jax.Array, second: jax.Array
) -> Callable[[Any], jax.Array]:
    """Returns `function` such that it can be called on a mesh with explicit axes.

    The operands of `function` include the two arrays [..., out]; its result is sharded like their
    sum.
    """
    mesh = explicit(first, second)
    if mesh is None:
        return function
    pairs = list(zip(spec(first), spec(second), strict=True))
    result = [a or b for a, b in pairs]
    axes = jax.tree.leaves(result)
    if len(axes) > len(set(axes)) or any(a and b and a != b for a, b in pairs):
        return function  # JAX raises its own error for two different shardings
    return with_auto_axes(function, mesh, jax.P(*result))


def result_spec(function: Callable[..., jax.Array], *operands: jax.Array) -> PartitionSpec:
    """Returns how JAX shards the result of `function(*operands)` over explicit axes."""
    # jax.eval_shape loses the sharding if some axes of the mesh are not explicit.
    result: Any = jax.make_jaxpr(function)(*operands).out_avals[0]
    return result.sharding.spec


def with_auto_axes(
    function: Callable[..., jax.Array], mesh: AbstractMesh, result: PartitionSpec
) -> Callable[..., jax.Array]:
    """Returns `function` for operands on explicit axes. Inside of it the axes are automatic."""
    sharding: Any = NamedSharding(mesh, result)
    return cast(Any, jax.sharding.auto_axes(function, out_sharding=sharding))


def differentiable[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which has a custom gradient, such that it can be called on a manual mesh.

    There it is jitted, because JAX does not run a custom gradient otherwise.

    Args:
      function: a function of (static, operands).
    """
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return _compiled(function) if manual else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(lambda static, operands: function(static, operands), static_argnums=0)


def vary_alike[Tree](operands: Tree) -> Tree:
    """Returns the operands, each varying over all mesh axes that any of them varies over.

    The gradient of an operand is summed over the mesh axes that were added to it.
    """
    axes = varying(operands)
    return jax.tree.map(lambda operand: vary(operand, axes), operands)


def varying(tree: Any) -> frozenset[Any]:
    """Returns the axes of a manual mesh that any array of `tree` varies over."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `array`, marked as varying over `axes` of a manual mesh."""
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return lax.pcast(array, tuple(missing), to="varying") if missing else array


def to_unvarying(array: jax.Array) -> jax.Array:
    """Returns `array` of a manual mesh of one device, marked as varying over no mesh axis.

    Pallas interprets kernels on one device only, and some kernels not with varying operands.
    """
    axes = jax.typeof(array).manual_axis_type.varying
    return lax.psum(array, tuple(axes)) if axes else array
