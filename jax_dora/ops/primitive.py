"""The primitive that all operators with kernels are bound to, and what runs in its place.

A kernel takes the arrays of one device. Whether a call has those is known only when its program is
lowered, and there the kernel is chosen:

    one device, or a device's part inside of `jax.shard_map` over a whole mesh    by its shapes
    a mesh with automatic axes          on every device, by the shapes of its part (`shard`)
    any other program for several devices: a mesh with manual axes and others, an export, arrays on
    different meshes, a batch that is more than rows          XLA

The second is JAX's `custom_partitioning`, with a rule by which Shardy propagates shardings.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_dora.ops.choose import PLAIN, interpreted
from jax_dora.ops.mesh import of_one_device, vary, varying
from jax_dora.ops.shard import WHOLE, Names, Op, Shard, spec


def call(op: Op, static: Any, operands: Any) -> tuple[Any, ...]:
    """Returns the results of `op`, whatever number of devices the program is built for.

    Args:
      static: a NamedTuple of hashables, one of them `implementation`; it is handed to `op.run`.
      operands: a NamedTuple of arrays and None; one of the arrays may be quantised.
    """
    if interpreted() or static.implementation in PLAIN:
        # The interpreter's callbacks are ordered, which nothing in a lowering rule may be.
        axes = varying(operands)
        if static.implementation == "mosaic":
            operands = jax.tree.map(of_one_device, operands)
        results = op.run(static, Shard(), operands)
        return jax.tree.map(lambda result: vary(result, axes), results)
    leaves, tree = jax.tree.flatten(operands)
    params = {"op": op, "static": static, "tree": tree}
    shapes = _shapes(map(jax.typeof, leaves), **params)
    return jax.tree.structure(shapes).unflatten(_op_p.bind(*leaves, **params))


# The tracing of an operator, which its shapes and its lowering share.
@functools.partial(jax.jit, static_argnums=range(3))
def _traced(op: Op, static: Any, tree: Any, *leaves: jax.Array) -> Any:
    return op.run(static, Shard(), tree.unflatten(leaves))


@functools.partial(jax.jit, static_argnums=range(3))
def _bound(op: Op, static: Any, tree: Any, *leaves: jax.Array) -> Any:
    return _op_p.bind(*leaves, op=op, static=static, tree=tree)


def _shapes(avals: Iterable[Any], *, op: Op, static: Any, tree: Any) -> Any:
    # A kernel that is named refuses here, by the shapes of whole arrays.
    static = static if static.implementation == "mosaic" else _by_xla(static)
    return _traced.eval_shape(op, static, tree, *map(_bare, avals))


def _by_xla(static: Any) -> Any:
    return static._replace(implementation="xla")


def _bare(aval: Any) -> Any:
    """Returns the type that varies over no axis of a mesh: JAX cannot trace kernels of others."""
    return aval.update(manual_axis_type=jax.typeof(0.0).manual_axis_type)


_op_p = Primitive("dora")
_op_p.multiple_results = True
# Otherwise JAX does not tell the lowering rule which devices a program is for.
prim_requires_devices_during_lowering.add(_op_p)


@_op_p.def_impl
def _execute(*operands: Any, op: Op, static: Any, tree: Any) -> Any:
    with jax.disable_jit(False):  # without its program the primitive would be bound again
        return _bound(op, static, tree, *operands)


@_op_p.def_abstract_eval
def _types(*avals: Any, **params: Any) -> list[Any]:
    axes = frozenset().union(*(aval.manual_axis_type.varying for aval in avals))
    first = avals[0]
    return [
        first.update(
            shape=shape.shape,
            dtype=shape.dtype,
            weak_type=False,
            sharding=shape.sharding or NamedSharding(first.sharding.mesh, jax.P()),
            manual_axis_type=first.manual_axis_type.update(varying=axes),
        )
        for shape in jax.tree.leaves(_shapes(avals, **params))
    ]


def _refuse_tangents(*_: Any, op: Op, static: Any, tree: Any) -> Any:
    raise NotImplementedError(
        f"JAX cannot differentiate the kernels of {op.name}, which a gradient of a gradient asks "
        "for; pass implementation='xla', or 'eager' for forward mode too: in a model it is an "
        "option of its DoRARules"
    )


ad.primitive_jvps[_op_p] = _refuse_tangents


class _Each(NamedTuple):
    """`run` of every element of a batch, whose axis in each operand is one of `axes`, or None."""

    run: Callable[..., Any]
    tree: Any
    axes: tuple[int | None, ...]

    def __call__(self, static: Any, shard: Shard, operands: Any) -> Any:
        one = functools.partial(self.run, static, shard)
        return jax.vmap(lambda *leaves: one(self.tree.unflatten(leaves)), in_axes=self.axes)(
            *jax.tree.leaves(operands)
        )


def _batch(arrays: Any, axes: Any, *, op: Op, static: Any, tree: Any) -> Any:
    axes = tuple(axes)
    if _are_rows(op, tree, axes):
        pairs = zip(arrays, axes, strict=True)
        arrays = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in pairs]
    else:
        op = Op(f"batch of {op.name}", _Each(op.run, tree, axes), (), ())
    results = _op_p.bind(*arrays, op=op, static=static, tree=tree)
    return results, [0] * len(results)


batching.primitive_batchers[_op_p] = _batch


def _are_rows(op: Op, tree: Any, axes: Sequence[int | None]) -> bool:
    """Returns whether a batch is no more than another leading axis: not where rows are summed over,
    nor where a mask counts them."""
    if not op.operands or op.contracted == "t":
        return False
    fields = zip(op.operands, tree.unflatten(range(len(axes))), strict=True)
    return all(
        names != "s" and (axes[place] is not None) == names.startswith("t")
        for names, field in fields
        for place in jax.tree.leaves(field)
    ) and all(names.startswith("t") for names in op.results)


def _lower(ctx: Any, *operands: Any, op: Op, static: Any, tree: Any, cuda: bool = False) -> Any:
    if not cuda and static.implementation == "mosaic":
        raise NotImplementedError(
            "implementation 'mosaic' runs on a Hopper GPU (compute capability 9.0), and this "
            f"program is being built for {', '.join(ctx.module_context.platforms)}; pass "
            "implementation=None or 'xla', or run it under plgpu.force_gpu_interpret_mode()"
        )
    static = static if cuda else _by_xla(static)
    mesh, alone = _devices(ctx.module_context)
    avals = [_bare(aval) for aval in ctx.avals_in]
    if mesh is not None and op.operands:
        function = _partitioned(op, static, tree, avals)
    elif alone or static.implementation != "mosaic":
        static = static if alone else _by_xla(static)
        function = functools.partial(_traced, op, static, tree)
    else:
        raise NotImplementedError(
            "implementation 'mosaic' takes the arrays of one device, and this program is built for "
            "several: in a batch, for an export, for different meshes or for one with manual axes "
            "and others; pass implementation=None, or use jax.shard_map over the whole mesh"
        )
    flat = mlir.lower_fun(lambda *leaves: jax.tree.leaves(function(*leaves)), multiple_results=True)
    return flat(ctx.replace(avals_in=avals), *operands)


mlir.register_lowering(_op_p, _lower)
mlir.register_lowering(_op_p, functools.partial(_lower, cuda=True), platform="cuda")


def _devices(module: Any) -> tuple[Mesh | None, bool]:
    """Returns the mesh that XLA partitions a program over, where there is a single one, and whether
    the program sees what one device has."""
    context = module.axis_context
    if hasattr(context, "manual_axes"):
        manual = set(context.manual_axes) == set(context.mesh.axis_names)
        return None, manual or context.mesh.size == 1
    if context.num_devices == 1:
        return None, True
    mesh, devices = context.abstract_mesh, context.device_assignment
    if module.lowering_parameters.for_export or mesh is None or mesh.empty or devices is None:
        return None, False
    return Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names), False


def _partitioned(op: Op, static: Any, tree: Any, avals: Sequence[Any]) -> Any:
    """Returns the operator as a function of arrays that lie on the devices of a mesh."""
    shapes = _shapes(avals, op=op, static=static, tree=tree)
    names = Names.of(op, tree.unflatten(avals), shapes)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        """Returns what each device does, and how the arrays are sharded for it."""
        given = ([_spec(array) for array in arrays] for arrays in (operands, results))
        shard = names.shard(mesh, *given)

        def run(*leaves: jax.Array) -> list[jax.Array]:
            # On no mesh: what a device has is sharded no further.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                parts = names.cut(shard, [aval.shape for aval in avals], leaves)
                return jax.tree.leaves(op.run(static, shard, tree.unflatten(parts)))

        def sharded(arrays: Sequence[tuple[str, ...]]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec(one, shard)) for one in arrays)

        return mesh, run, list(sharded(names.results)), sharded(names.operands)

    every = dict.fromkeys(itertools.chain(*names.operands, *names.results))
    whole = custom_partitioning(
        lambda *leaves: jax.tree.leaves(_traced(op, _by_xla(static), tree, *leaves))
    )
    whole.def_partition(
        partition,
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*axes) for axes in names.operands),
            tuple(ArrayMapping(*axes) for axes in names.results),
            reduction_factors=tuple(
                one
                for one in every
                if one.lower() in names.contracted
                and one.lower() not in itertools.chain(*names.results)
            ),
            need_replication_factors=tuple(one for one in every if one in WHOLE),
        ),
    )
    return whole


def _spec(array: Any) -> Any:
    return () if array.sharding is None else array.sharding.spec
