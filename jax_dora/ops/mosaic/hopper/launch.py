"""The decorator of the host functions that launch Mosaic and Triton kernels.

JAX would trace and lower a kernel anew for every program, and on a mesh for every layer: a fifth of
a second each time, with bytes that differ in a counter, so that XLA would compile it anew, too.
Here a process traces and lowers each kernel once, for its settings and the types of its operands,
and every program contains the same bytes. XLA compiles them in a thread, while JAX lowers the next
kernel and XLA compiles the program around it. With a compilation cache, a second process neither
traces nor lowers a kernel of the first one (`kernel_files`).
"""

import contextlib
import functools
import io
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jax_dora.ops.identity import digest
from jax_dora.ops.mosaic.hopper import kernel_files


def launcher[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that jits a kernel's `launch`. Its keyword arguments `config`, `sm_count`
    and `static` are static; all other arguments are pytrees of arrays. A Triton kernel has
    "capability" instead of "sm_count"."""
    names = {"config", *static} | ({"sm_count"} if "capability" not in static else set())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # Programs show the name of a jitted function; "launch" would not tell which kernel it is.
        function.__name__ = function.__module__.rpartition(".")[2]
        jitted: Any = functools.wraps(function)(jax.jit(function, static_argnames=names))
        jitted.static = names
        return jitted

    return decorate


def launch_shared(launch: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns `launch(*args, **kwargs)`, for a `launch` by `launcher`, such that all programs share
    the lowered kernel."""
    settings = tuple((name, kwargs.pop(name)) for name in sorted(launch.static & kwargs.keys()))
    leaves, tree = jax.tree.flatten((args, kwargs))
    kernel = _Kernel(launch.__wrapped__, settings, tree)
    results = jax.tree.structure(_results(kernel, _types(leaves)))
    return results.unflatten(_kernel_p.bind(*leaves, kernel=kernel))


class _Kernel(NamedTuple):
    """A call of a kernel.

    Attributes:
      launch: the host function.
      settings: its static arguments.
      tree: the structure of its other arguments.
      axes: for every `jax.vmap` of the call, the mapped axis of each array, or None.
    """

    launch: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...]
    tree: Any
    axes: tuple[tuple[int | None, ...], ...] = ()

    def __repr__(self) -> str:
        return self.launch.__name__

    def run(self, *leaves: jax.Array) -> Any:
        """Returns the results for the arrays."""
        if self.axes:
            *axes, last = self.axes
            return jax.vmap(self._replace(axes=tuple(axes)).run, last)(*leaves)
        args, kwargs = self.tree.unflatten(leaves)
        return self.launch(*args, **kwargs, **dict(self.settings))


def _types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of arrays or of their types, without shardings."""
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _in_thread[R](function: Callable[[], R]) -> R:
    """Returns the result of `function`, called in a thread of its own, where no mesh, no axis and
    no trace of the caller is in effect."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # No executor: it refuses work once the main thread has ended, while others may still run. From
    # Python 3.13 on they can start a thread.
    threading.Thread(target=run, name="jax_dora kernel").start()
    return future.result()


@functools.cache
def _traced(kernel: _Kernel, types: tuple[Any, ...]) -> Any:
    """Returns the kernel as traced for operands of these types."""
    return _in_thread(functools.partial(jax.jit(kernel.run, keep_unused=True).trace, *types))


@functools.cache
def _stored(kernel: _Kernel, types: tuple[Any, ...]) -> kernel_files.Stored | None:
    """Returns the kernel as another process has lowered it, or None."""
    file = _file(kernel, types)
    return file and kernel_files.read(file)


def _file(kernel: _Kernel, types: tuple[Any, ...]) -> pathlib.Path | None:
    """Returns the file of the kernel, or None without a compilation cache."""
    return _in_thread(lambda: kernel_files.path(digest("kernel", tuple(kernel), types)))


def _results(kernel: _Kernel, types: tuple[Any, ...]) -> Any:
    """Returns the types of the kernel's results."""
    stored = _stored(kernel, types)
    return _traced(kernel, types).out_info if stored is None else stored.results


@functools.cache
def _code(kernel: _Kernel, types: tuple[Any, ...]) -> bytes:
    """Returns the kernel as a StableHLO module."""
    stored = _stored(kernel, types)
    return _lowered(kernel, types) if stored is None else stored.code


def _lowered(kernel: _Kernel, types: tuple[Any, ...]) -> bytes:
    """Lowers the kernel to a StableHLO module, which it stores and returns."""
    traced = _traced(kernel, types)

    def lower() -> bytes:
        lowered = traced.lower(lowering_platforms=("cuda",))
        buffer = io.BytesIO()
        lowered.compiler_ir().operation.write_bytecode(buffer)
        return buffer.getvalue()

    code = _in_thread(lower)
    if file := _file(kernel, types):
        kernel_files.write(file, kernel_files.Stored(traced.out_info, code))
    return code


_compiled: set[tuple[_Kernel, tuple[Any, ...]]] = set()


def _compile_ahead(kernel: _Kernel, types: tuple[Any, ...]) -> None:
    """Starts to compile the kernel, once, if there is a GPU. jaxlib keeps it, by its bytes, for the
    programs that contain it."""
    if jax.default_backend() != "gpu" or (kernel, types) in _compiled:
        return
    _compiled.add((kernel, types))  # before the kernel's own program is lowered in the thread

    def compile_kernel() -> None:
        with contextlib.suppress(Exception):  # the programs that contain the kernel report it
            _bound.lower(kernel, *types).compile()

    threading.Thread(target=compile_kernel, name="jax_dora kernel").start()


_kernel_p = Primitive("dora_kernel")
_kernel_p.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _bound(kernel: _Kernel, *operands: jax.Array) -> Any:
    return _kernel_p.bind(*operands, kernel=kernel)


@_kernel_p.def_impl
def _execute(*operands: Any, kernel: _Kernel) -> Any:
    with jax.disable_jit(False):  # if jit were disabled, `_bound` would call this function again
        return _bound(kernel, *operands)


@_kernel_p.def_abstract_eval
def _result_types(*avals: Any, kernel: _Kernel) -> list[Any]:
    types = _types(avals)
    results = jax.tree.leaves(_results(kernel, types))
    if _stored(kernel, types):  # so that XLA compiles it while JAX traces the program
        _compile_ahead(kernel, types)
    return [avals[0].update(shape=one.shape, dtype=one.dtype, weak_type=False) for one in results]


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, kernel: _Kernel) -> Any:
    kernel = kernel._replace(axes=(*kernel.axes, tuple(axes)))
    results = _kernel_p.bind(*operands, kernel=kernel)
    return results, [0] * len(results)


batching.primitive_batchers[_kernel_p] = _batch


def _lower(ctx: Any, *operands: Any, kernel: _Kernel) -> Any:
    types = _types(ctx.avals_in)
    module = ir.Module.parse(_code(kernel, types))
    _compile_ahead(kernel, types)
    main: Any = ir.SymbolTable(module.operation)["main"]
    program, symbols = ctx.module_context.module, ctx.module_context.symbol_table
    result_types = main.type.results  # before `main` is moved
    name = mlir.merge_mlir_modules(program, str(kernel), module, symbols)
    callee = ir.FlatSymbolRefAttr.get(name)
    return func.CallOp(result_types, callee, list(operands)).results


mlir.register_lowering(_kernel_p, _lower, platform="cuda")
