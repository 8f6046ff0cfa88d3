"""Runs operators on meshes of several devices.

On a mesh with explicit axes, JAX requires the sharding of the operator's result. Inside
`jax.shard_map` with check_vma, its default, JAX requires that the gradient of an operand varies
over the same mesh axes as the operand.

Operands are a NamedTuple of `jax_dora.ops.operands`, in which None stays None.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_dora.ops.dispatch import choose


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


def spec(array: jax.Array) -> PartitionSpec:
    """Returns the mesh axes that each axis of `array` is sharded over, None for automatic axes."""
    return jax.typeof(array).sharding.spec


def on_explicit_axes(
    function: Callable[..., jax.Array],
    result: Callable[[], PartitionSpec | None],
    *arrays: jax.Array,
) -> Callable[..., jax.Array]:
    """Returns `function` of operands, which include `arrays`, such that it can be called on a mesh
    with explicit axes. `result` returns the sharding of its result, or None if those of the arrays
    do not determine it; JAX then raises its own error."""
    mesh = explicit(*arrays)
    if mesh is None or (spec := result()) is None:
        return function
    return with_auto_axes(function, mesh, spec)


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


@contextlib.contextmanager
def forward_mode_named() -> Iterator[None]:
    """Adds the implementation that supports forward mode to JAX's error, which names none."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error) or "eager" in str(error):
            raise
        raise TypeError(
            f"{error} DoRA's operators define gradients for reverse mode, as of jax.grad; pass "
            "implementation='eager' for jax.jvp and jax.jacfwd: in a model it is an option of its "
            "DoRARules"
        ) from None


def differentiable[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function of (settings, operands) with a custom gradient such that it can be called
    on a manual mesh: there it is jitted, because JAX does not run a custom gradient otherwise."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return jitted(function) if manual else function


def jitted[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function of (settings, operands), jitted: JAX traces and differentiates equal calls
    once, such as those of a model's layers, and has one equation for each of them."""
    return _jitted(function, choose.target())


@functools.cache
def _jitted(function: Callable[..., Any], target: choose.Target) -> Any:
    del target  # by which kernels are chosen: JAX keeps a trace for each of these objects
    return jax.jit(functools.partial(function), static_argnums=0)


def vary_alike[Tree](operands: Tree) -> Tree:
    """Returns the operands, each varying over all mesh axes that any of them varies over. The
    gradient of an operand is summed over the axes added to it."""
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
    """Returns `array` of a manual mesh of one device as varying over no mesh axis: Pallas
    interprets kernels on one device only, and some not with varying operands."""
    axes = jax.typeof(array).manual_axis_type.varying
    return lax.psum(array, tuple(axes)) if axes else array
