"""The frame around every launch of a Mosaic kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_dora.ops import mesh
from jax_dora.ops.choose import interpreted


def launcher[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a kernel's launch: `jax.jit`, with these and the knobs static.

    The program refuses with NotImplementedError to be lowered for anything but CUDA, unless it is
    interpreted. Inside `jax.shard_map` the kernel sees operands that vary over no axis of the mesh
    (JAX cannot trace references that do), and its results vary over every axis that an operand
    varies over.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # A program names what is jitted: by the kernel.
        function.__name__ = function.__module__.rpartition(".")[2]

        @functools.partial(jax.jit, static_argnames=("config", "sm_count", *static))
        @functools.wraps(function)
        def launch(*operands: Any, **options: Any) -> Any:
            axes = mesh.varying((operands, options))
            bare = functools.partial(_operand_p.bind, interpreted=interpreted())
            operands = jax.tree.map(bare, operands)
            results = function(*operands, **options)
            return jax.tree.map(lambda result: mesh.vary(result, axes), results)

        return launch

    return decorate


_operand_p = Primitive("dora_kernel_operand")
_operand_p.def_abstract_eval(
    lambda x, *, interpreted: x.update(manual_axis_type=jax.typeof(0.0).manual_axis_type)
)
batching.primitive_batchers[_operand_p] = lambda args, axes, **params: (
    _operand_p.bind(*args, **params),
    axes[0],
)


def _lower(ctx: Any, x: Any, *, interpreted: bool) -> Any:
    if not interpreted:
        raise NotImplementedError(
            "implementation 'mosaic' runs on a Hopper GPU (compute capability 9.0), and this "
            f"program is being built for {', '.join(ctx.module_context.platforms)}; pass "
            "implementation=None or 'xla', or run it under plgpu.force_gpu_interpret_mode()"
        )
    return [x]


mlir.register_lowering(_operand_p, _lower)
mlir.register_lowering(_operand_p, lambda ctx, x, *, interpreted: [x], platform="cuda")
