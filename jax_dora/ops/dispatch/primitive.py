"""The JAX primitive that all operators with Mosaic kernels are bound to, and its lowering.

A Mosaic kernel needs the arrays of a single device. Whether a call has them is known only when its
program is lowered, so the implementation is chosen there:

- One device, or `jax.shard_map` over the whole mesh: by the arrays' shapes.
- A mesh with automatic axes: on every device, by the shapes of the device's shards (`shard`). This
  uses JAX's `custom_partitioning`, with a rule for Shardy's propagation of shardings.
- Any other program for several devices: XLA. Examples are a mesh with both manual and other axes,
  an export, arrays on different meshes, and a batch axis that is not just another leading axis.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_dora.ops.dispatch import choose, partitions
from jax_dora.ops.dispatch.choose import KERNELS, PLAIN, interprets
from jax_dora.ops.dispatch.mesh import differentiable, to_unvarying, vary, vary_alike, varying
from jax_dora.ops.dispatch.op import UNSHARDED, Names, Op
from jax_dora.ops.dispatch.shard import Shard, spec

# What XLA's scheduler is told of a Hopper GPU: the rates of projections in a training step, in
# FLOP/s (`h200x2/profile.jsonl`) and in bytes/s of the kernel that they read (those of a copy in
# `h100/quantised.jsonl`), and a time for all other operators. That time is a constant, because XLA
# combines the sums over devices of several operators and warns if they have different times.
FLOP_RATE, BYTE_RATE, SECONDS = 7e14, 3e12, 3e-5


def call(op: Op, settings: Any, operands: Any) -> tuple[Any, ...]:
    """Returns the results of `op`, in a program for any number of devices. Settings are a hashable
    NamedTuple with a field `implementation`; operands a NamedTuple of arrays, of which one may be
    quantised, and None."""
    if settings.implementation in PLAIN or interprets(settings.implementation):
        # The interpreters use callbacks, which a lowering rule must not contain.
        axes = varying(operands)
        if op.is_constant:
            operands = jax.tree.map(lax.stop_gradient, operands)
        if settings.implementation in KERNELS:
            operands = jax.tree.map(to_unvarying, operands)
        results = op.run(settings, Shard(), operands)
        return jax.tree.map(lambda result: vary(result, axes), results)
    leaves, tree = jax.tree.flatten(operands)
    shapes = _shapes(*_call_key(map(jax.typeof, leaves), op, settings, tree))
    results = _op_p.bind(*leaves, op=op, settings=settings, tree=tree)
    return jax.tree.structure(shapes).unflatten(results)


def call_differentiable(
    op: Op, define: Callable[[Any, Any], tuple[jax.Array, ...]], settings: Any, operands: Any
) -> tuple[jax.Array, ...]:
    """Returns the results of `call`. Their gradient is that of `define`, the operator's definition,
    a function of (settings, operands)."""
    return differentiable(_call_with_gradient)((op, define, settings), vary_alike(operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _call_with_gradient(settings: tuple[Op, Any, Any], operands: Any) -> tuple[jax.Array, ...]:
    op, _, settings = settings
    return call(op, settings, operands)


@_call_with_gradient.defjvp
def _jvp_of_definition(settings: tuple[Op, Any, Any], primals: Any, tangents: Any) -> Any:
    _, define, settings = settings
    return jax.jvp(functools.partial(define, settings), primals, tangents)


@functools.cache
def _traced(op: Op) -> Any:
    """Returns `op.run`, jitted so that abstract evaluation and lowering share one trace of it."""
    return jax.jit(op.run, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=range(3))
def _bound(op: Op, settings: Any, tree: Any, *leaves: jax.Array) -> Any:
    return _op_p.bind(*leaves, op=op, settings=settings, tree=tree)


def _for_types(op: Op, settings: Any) -> Any:
    """Returns the settings of the trace that gives the types of the results. On one device this is
    the trace that the lowering needs. On several, kernels are chosen by the shapes of shards; only
    a named kernel stays, so that an unsupported call raises here."""
    if settings.implementation not in KERNELS and choose.target().partitioned:
        return _with_xla(op.for_types(settings) if op.for_types else settings)
    return settings


def _call_key(avals: Iterable[Any], op: Op, settings: Any, tree: Any) -> tuple[Any, ...]:
    """Returns what the types of the results depend on, the arguments of `_shapes`."""
    avals = tuple(map(_unvarying, avals))
    return config.trace_context(), choose.target(), op, _for_types(op, settings), tree, avals


@functools.lru_cache(4096)
def _shapes(
    context: Any, target: Any, op: Op, settings: Any, tree: Any, avals: tuple[Any, ...]
) -> Any:
    """Returns the types of the results. They are kept, as JAX would look its trace up for half a
    millisecond each time."""
    del context, target  # on which the operator's trace depends
    return _traced(op).eval_shape(settings, Shard(), tree.unflatten(avals))


def _with_xla(settings: Any) -> Any:
    return settings._replace(implementation="xla")


@functools.lru_cache(4096)
def _unvarying(aval: Any) -> Any:
    """Returns the type without varying mesh axes: JAX cannot trace kernels of varying arrays."""
    return aval.update(manual_axis_type=jax.typeof(0.0).manual_axis_type)


_op_p = Primitive("dora")
_op_p.multiple_results = True
# Without this, JAX does not pass the program's devices to the lowering rule.
prim_requires_devices_during_lowering.add(_op_p)


@_op_p.def_impl
def _execute(*operands: Any, op: Op, settings: Any, tree: Any) -> Any:
    # If jit were disabled, `_bound` would call this function again, and so would JAX for a NaN.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _bound(op, settings, tree, *operands)
    checks = (
        ("nan", jnp.isnan, jax.config.jax_debug_nans),
        ("inf", jnp.isinf, jax.config.jax_debug_infs),
    )
    for name, is_invalid, is_on in checks:
        if is_on and any(is_invalid(one).any() for one in results if _is_float(one)):
            raise FloatingPointError(f"invalid value ({name}) encountered in {op.name}")
    return results


def _is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


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
        for shape in jax.tree.leaves(_shapes(*_call_key(avals, **params)))
    ]


def _jvp(primals: Any, _: Any, *, op: Op, settings: Any, tree: Any) -> Any:
    if op.is_constant:
        results = _op_p.bind(*primals, op=op, settings=settings, tree=tree)
        return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    raise NotImplementedError(
        f"JAX cannot differentiate the kernels of {op.name}, as jax.hessian and a gradient of a "
        "gradient require; pass implementation='xla', whose gradient JAX differentiates, or "
        "'eager' for forward mode (jax.jvp, jax.jacfwd) too: in a model it is an option of "
        "its DoRARules"
    )


ad.primitive_jvps[_op_p] = _jvp


@dataclasses.dataclass(frozen=True)
class _Batched:
    """An operator's `run` of one element, mapped over the batch axis, or None, of each leaf of its
    operands, whose structure is `tree`."""

    run: Callable[..., Any]
    tree: Any
    axes: tuple[int | None, ...]

    def __call__(self, settings: Any, shard: Shard, operands: Any) -> Any:
        def run_one(*leaves: jax.Array) -> Any:
            return self.run(settings, shard, self.tree.unflatten(leaves))

        return jax.vmap(run_one, in_axes=self.axes)(*jax.tree.leaves(operands))


def _batch(arrays: Any, axes: Any, *, op: Op, settings: Any, tree: Any) -> Any:
    axes = tuple(axes)
    if _is_leading_axis(op, tree, axes):
        pairs = zip(arrays, axes, strict=True)
        arrays = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in pairs]
    else:
        run = _Batched(op.run, tree, axes)
        op = Op(f"batch of {op.name}", run, (), (), is_constant=op.is_constant)
    results = _op_p.bind(*arrays, op=op, settings=settings, tree=tree)
    return results, [0] * len(results)


batching.primitive_batchers[_op_p] = _batch


def _is_leading_axis(op: Op, tree: Any, axes: Sequence[int | None]) -> bool:
    """Returns whether the batch axis can be one more leading axis of x and of the results: unless
    the operator sums over leading axes, or a dropout mask depends on row numbers."""
    if not op.operands or op.contracted == "t":
        return False
    return all(
        names != "s" and (axes[index] is not None) == names.startswith("t")
        for names, field in op.named(tree.unflatten(range(len(axes))))
        for index in jax.tree.leaves(field)
    ) and all(names.startswith("t") for names in op.results)


def _lower(ctx: Any, *operands: Any, op: Op, settings: Any, tree: Any, cuda: bool = False) -> Any:
    is_named, platforms = settings.implementation in KERNELS, ctx.module_context.platforms
    if not cuda and is_named:
        gpu, interpreter = _NEEDS[settings.implementation]
        raise NotImplementedError(
            f"implementation {settings.implementation!r} runs on {gpu}, and this program is being "
            f"built for {', '.join(platforms)}; pass implementation=None or 'xla', or run it "
            f"{interpreter}"
        )
    exported = ctx.module_context.lowering_parameters.for_export
    if not cuda or (exported and not is_named and choose.target().prefers("triton")):
        # JAX exports no custom calls of XLA's own unless it is told to.
        settings = _with_xla(settings)
    mesh, single_device = _devices(ctx.module_context)
    avals = [_unvarying(aval) for aval in ctx.avals_in]
    if mesh is not None and op.operands:
        function = _partitioned(op, settings, tree, avals)
        if cuda:
            seconds = _projection_seconds(tree, avals, mesh) if op.is_projection else SECONDS
            function = _timed(function, seconds)
    elif single_device or not is_named:
        settings = settings if single_device else _with_xla(settings)

        def function(*leaves: jax.Array) -> Any:
            return _traced(op)(settings, Shard(), tree.unflatten(leaves))

    else:
        raise NotImplementedError(
            f"implementation {settings.implementation!r} takes the arrays of one device, and this "
            "program is built for several: in a batch, for an export, for different meshes or for "
            "one with manual axes and others; pass implementation=None, or use jax.shard_map over "
            "the whole mesh"
        )
    flat = mlir.lower_fun(lambda *leaves: jax.tree.leaves(function(*leaves)), multiple_results=True)
    results = flat(ctx.replace(avals_in=avals), *operands)
    if mesh is not None and op.operands:
        identity = (tuple(op), settings, tree, avals, mesh.shape_tuple, platforms, choose.target())
        partitions.share(results[0].owner, *identity)
    return results


# The GPU that a named implementation needs, and its interpreter.
_NEEDS = {
    "mosaic": (
        "a Hopper GPU (compute capability 9.0)",
        "under plgpu.force_gpu_interpret_mode()",
    ),
    "triton": ("an NVIDIA GPU of compute capability 8.0 or later", "with TRITON_INTERPRET=1"),
}
mlir.register_lowering(_op_p, _lower)
mlir.register_lowering(_op_p, functools.partial(_lower, cuda=True), platform="cuda")


def _devices(module: Any) -> tuple[Mesh | None, bool]:
    """Returns the mesh that XLA partitions the program over, or None unless there is exactly one;
    and whether the program's arrays are those of one device."""
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


def _partitioned(op: Op, settings: Any, tree: Any, avals: Sequence[Any]) -> Any:
    """Returns the operator as a function of arrays that are sharded over a mesh."""
    shapes = _shapes(*_call_key(avals, op, settings, tree))
    names = Names.of(op, settings, tree.unflatten(avals), shapes)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        """Returns the function that each device runs, and the shardings of its arrays."""
        specs = ([_spec(array) for array in arrays] for arrays in (operands, results))
        shard = names.shard(mesh, *specs)

        def run(*leaves: jax.Array) -> list[jax.Array]:
            # An empty mesh, because a device's shards are not sharded further.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                parts = names.zero_padding(shard, [aval.shape for aval in avals], leaves)
                return jax.tree.leaves(op.run(settings, shard, tree.unflatten(list(parts))))

        def shardings(specs: Iterable[jax.sharding.PartitionSpec]) -> list[NamedSharding]:
            return [NamedSharding(mesh, one) for one in specs]

        of_results = shardings(spec(axes, shard) for axes in names.results)
        return mesh, run, of_results, tuple(shardings(names.operand_specs(shard)))

    all_names = dict.fromkeys(itertools.chain(*names.operands, *names.results))
    # JAX reads only the types of its results.
    function = custom_partitioning(
        lambda *_: [jnp.zeros(one.shape, one.dtype) for one in jax.tree.leaves(shapes)]
    )
    function.def_partition(
        partition,
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*axes) for axes in names.operands),
            tuple(ArrayMapping(*axes) for axes in names.results),
            reduction_factors=tuple(
                name
                for name in all_names
                if name.lower() in names.contracted
                and name.lower() not in itertools.chain(*names.results)
            ),
            need_replication_factors=tuple(name for name in all_names if name in UNSHARDED),
        ),
    )
    return function


def _timed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Returns `function` with its time for XLA's scheduler, which otherwise takes a kernel for too
    short to hide a collective."""

    def timed(*leaves: jax.Array) -> Any:
        with set_xla_metadata(latency_metadata=str(round(1e9 * seconds))):
            return function(*leaves)

    return timed


def _projection_seconds(tree: Any, avals: Sequence[Any], mesh: Mesh) -> float:
    """Returns the time of a device's even share of a projection, estimated from the FLOPs and from
    the bytes of the kernel."""
    rows, kernel, *_ = tree.unflatten(avals)
    flops = 2 * math.prod(rows.shape[:-1]) * math.prod(kernel.shape)
    moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(kernel))
    return max(flops / FLOP_RATE, moved / BYTE_RATE) / mesh.size


def _spec(array: Any) -> Any:
    return () if array.sharding is None else array.sharding.spec
