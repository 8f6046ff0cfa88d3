"""The decorator of the host functions that launch Mosaic and Triton kernels.

JAX would trace and lower a kernel anew for every program, and on a mesh for every layer: a fifth of
a second each time, with bytes that differ in a counter, so that XLA would compile it anew, too.
Here a process traces and lowers each kernel once, for its settings and the types of its operands,
and every program contains the same bytes. XLA compiles them in a thread, while JAX lowers the next
kernel and XLA compiles the program around it. With a compilation cache, a second process neither
traces nor lowers a kernel of the first one (`kernel_files`), nor compiles it if JAX finds the
program in the cache.
"""

import contextlib
import functools
import gc
import io
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax._src import config as _config
from jax.experimental.mosaic.gpu import fragmented_array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jax_dora.ops.identity import digest
from jax_dora.ops.mosaic.hopper import kernel_files, kernel_module


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


def launch_shared(launch: Any, *arrays: Any, **settings: Any) -> Any:
    """Returns `launch(*arrays, **settings)`, for a `launch` by `launcher`, such that all programs
    share the lowered kernel. The arrays are pytrees; the settings are static."""
    leaves, tree = jax.tree.flatten(arrays)
    kernel = _Kernel(launch.__wrapped__, tuple(sorted(settings.items())), tree)
    results = jax.tree.structure(_program(kernel, _types(leaves)).out_info)
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

    def traced(self, types: Sequence[Any]) -> Callable[[], Any]:
        """Returns a function that traces the kernel for arrays of these types."""
        function = functools.partial(self.launch, **dict(self.settings))
        for axes in self.axes:
            function = jax.vmap(function, self.tree.unflatten(axes))
        jitted = jax.jit(function, keep_unused=True)
        return functools.partial(jitted.trace, *self.tree.unflatten(types))


def _types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of arrays or of their types, without shardings."""
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _in_thread[R](function: Callable[[], R]) -> R:
    """Returns the result of `function`, called in a thread of its own, where no mesh, no axis and
    no trace of the caller is in effect."""
    return start(function).result()


def start[R](function: Callable[[], R]) -> Future[R]:
    """Returns the result that `function` will have in a thread of its own."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # No executor: it refuses work once the main thread has ended, while others may still run. From
    # Python 3.13 on they can start a thread.
    threading.Thread(target=run, name="jax_dora kernel").start()
    return future


_pauses: list[bool] = []  # for each thread in `_no_collection`, whether Python collected before
_pausing = threading.Lock()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses Python's garbage collection. Lowering a kernel creates so many objects that looking
    through all others of the process, such as a model's, takes a sixth of its time."""
    with _pausing:
        _pauses.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _pausing:
            # The first element is what the process had; it leaves last.
            if _pauses.pop() and not _pauses:
                gc.enable()


def _ask_ptxas_once() -> None:
    """Makes Pallas keep the version of ptxas. Otherwise it starts ptxas for every number that it
    makes of a bool, such as the condition of a `pl.when`: 51 times for the kernels of a step."""
    library: Any = getattr(fragmented_array, "mgpu_lib", None)  # None without JAX's CUDA plugin
    ask = library and library._mosaic_gpu_ext._get_ptxas_isa_version
    if ask and not hasattr(ask, "cache_info"):
        library._mosaic_gpu_ext._get_ptxas_isa_version = functools.cache(ask)


@functools.cache
def _program(kernel: _Kernel, types: tuple[Any, ...]) -> Any:
    """Returns the kernel for operands of these types, as another process has lowered it or as JAX
    traces it here: `kernel_files.Stored` or `jax.stages.Traced`."""
    file = _file(kernel, types)
    if stored := file and kernel_files.read(file):
        return stored
    with _no_collection():
        return _in_thread(kernel.traced(types))


def _file(kernel: _Kernel, types: tuple[Any, ...]) -> pathlib.Path | None:
    """Returns the file of the kernel, or None without a compilation cache."""
    return _in_thread(lambda: kernel_files.path(digest("kernel", tuple(kernel), types)))


@functools.cache
def _code(kernel: _Kernel, types: tuple[Any, ...]) -> bytes:
    """Returns the kernel as a StableHLO module, which is stored when it is lowered."""
    program = _program(kernel, types)
    if isinstance(program, kernel_files.Stored):
        return program.code

    def lower() -> bytes:
        _ask_ptxas_once()
        kernel_module.simplify_in_this_thread()
        module = program.lower(lowering_platforms=("cuda",)).compiler_ir()
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return buffer.getvalue()

    with _no_collection():
        code = _in_thread(lower)
    if file := _file(kernel, types):
        kernel_files.write(file, kernel_files.Stored(program.out_info, code))
    return code


_compiled: set[tuple[_Kernel, tuple[Any, ...]]] = set()


def _compile_ahead(kernel: _Kernel, types: tuple[Any, ...]) -> None:
    """Starts to compile a Mosaic kernel, once, if there is a GPU. jaxlib keeps it, by its bytes,
    for the programs that contain it. Triton's kernels are PTX, which XLA leaves to the driver.

    A kernel that another process has lowered for one device is not compiled: JAX most likely finds
    its program in the cache, with the kernel's code. On several devices kernels are lowered only
    when XLA partitions a program, so JAX has not found it."""
    is_mosaic = "sm_count" in dict(kernel.settings)
    if jax.default_backend() != "gpu" or not is_mosaic or (kernel, types) in _compiled:
        return
    if isinstance(_program(kernel, types), kernel_files.Stored) and jax.device_count() == 1:
        return
    _compiled.add((kernel, types))  # before the kernel's own program is lowered in the thread

    def compile_kernel() -> None:
        with contextlib.suppress(Exception):  # the programs that contain the kernel report it
            _compile_alone(functools.partial(_bound.lower, kernel, *types))

    threading.Thread(target=compile_kernel, name="jax_dora kernel").start()


def _compile_alone(lower: Callable[[], Any]) -> None:
    """Compiles a program of one kernel, which JAX's compilation cache does not store: jaxlib would
    not keep a kernel whose program comes from there, and the programs that contain it would compile
    it again."""
    with _config.persistent_cache_min_compile_time_secs(float("inf")):
        lower().compile()


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
    results = jax.tree.leaves(_program(kernel, _types(avals)).out_info)
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
