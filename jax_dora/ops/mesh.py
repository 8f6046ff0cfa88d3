"""What several devices ask of an operator.

On a mesh with explicit axes its operands say how they are sharded, and its result has to. Inside
`jax.shard_map` with check_vma, its default, a custom gradient has to vary over the same axes of the
mesh as its primal, and what a kernel makes is taken to vary over none.
"""

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def explicit(*operands: jax.Array) -> AbstractMesh | None:
    """The mesh with explicit axes that one of the operands lies on, or None."""
    meshes = (jax.typeof(operand).sharding.mesh for operand in operands)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def spec(array: jax.Array) -> tuple[Any, ...]:
    """The axes that each axis of `array` is sharded over, None where that is XLA's to say."""
    return tuple(jax.typeof(array).sharding.spec)


def names(entry: Any) -> tuple[str, ...]:
    """Of the axes in one entry of `spec`."""
    return tuple(jax.tree.leaves(entry))


@functools.partial(jax.jit, static_argnums=range(5))
def per_device(
    function: Callable[..., jax.Array],
    static: tuple[Hashable, ...],
    mesh: AbstractMesh,
    specs: tuple[PartitionSpec, ...],
    result: PartitionSpec,
    *operands: jax.Array | None,
) -> jax.Array:
    """`function(*static, *operands)` of what each device holds of the operands, which `specs` shard
    over explicit axes; None stays None."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    sharded = jax.shard_map(
        functools.partial(function, *static),
        mesh=mesh,
        in_specs=specs,
        out_specs=result,
        axis_names={name for name, kind in kinds if kind is AxisType.Explicit},
    )
    placed = (
        None if operand is None else jax.reshard(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(operands, specs, strict=True)
    )
    return sharded(*placed)


def elementwise(
    function: Callable[..., jax.Array],
    static: tuple[Hashable, ...],
    left: jax.Array,
    right: jax.Array,
    *others: jax.Array | None,
) -> jax.Array:
    """`function(*static, …)` of two arrays [..., out], and of vectors [out] and scalars.

    On a mesh with explicit axes each device computes its part of the result, which is sharded as
    both arrays are.
    """
    mesh, whole = explicit(left, right), jax.P(*spec(left))
    if mesh is None or spec(left) != spec(right):
        return function(*static, left, right, *others)  # JAX refuses two shardings
    vector, scalar = jax.P(*whole[-1:]), jax.P()
    specs = (scalar if other is None or other.ndim == 0 else vector for other in others)
    operands = (left, right, *others)
    return per_device(function, static, mesh, (whole, whole, *specs), whole, *operands)


def left_to_xla(
    function: Callable[..., jax.Array], mesh: AbstractMesh, result: PartitionSpec
) -> Callable[..., jax.Array]:
    """`function` of operands on explicit axes, which XLA takes over inside of it."""
    sharding: Any = NamedSharding(mesh, result)
    return cast(Any, jax.sharding.auto_axes(function, out_sharding=sharding))


def differentiable(
    function: Callable[..., jax.Array], static: tuple[Hashable, ...], *operands: jax.Array | None
) -> jax.Array:
    """`function(*static, *operands)`, which has a custom gradient, of operands that vary alike."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    run = _compiled if manual else _run
    return run(function, static, *vary_alike(*operands))


def _run(function, static, *operands):
    return function(*static, *operands)


# Where nobody compiles a shard_map, a custom gradient in it is not implemented in JAX.
_compiled = jax.jit(_run, static_argnums=(0, 1))


def vary_alike(*operands: jax.Array | None) -> tuple[Any, ...]:
    """The operands, each varying over every axis that one of them varies over; None stays None.

    The gradient of one that varied over fewer is then summed over the others.
    """
    axes = _axes(operands)
    return tuple(None if operand is None else _vary(operand, axes) for operand in operands)


def jit[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit`, with these static arguments, of a function around a kernel.

    Its results vary over every axis that one of its operands varies over.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.partial(jax.jit, static_argnames=static)
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            axes = _axes(jax.tree.leaves((args, kwargs)))
            return jax.tree.map(lambda result: _vary(result, axes), function(*args, **kwargs))

        return call

    return decorate


def _axes(values: Iterable[Any]) -> frozenset[Any]:
    arrays = (value for value in values if isinstance(value, jax.Array))
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def _vary(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return lax.pcast(array, tuple(missing), to="varying") if missing else array
