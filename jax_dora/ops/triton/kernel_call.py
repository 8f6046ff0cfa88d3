"""Calls of Triton kernels inside JAX programs.

Triton's own compiler compiles the kernel, for its sizes as constants, and XLA launches the PTX by a
custom call of its own. XLA needs no plugin for it, puts it into CUDA graphs, and a program can be
built on a machine without a GPU.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir

from jax_dora.ops.mosaic.hopper.launch import start

TARGET = "__gpu$xla.gpu.ptx"
_TYPES = {
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32"},
    "uint8": "u8",
    "float8_e4m3fn": "u8",  # which kernels for every card can read
}
HALVES = (jnp.bfloat16, jnp.float16)


@functools.cache
def is_installed() -> bool:
    """Returns whether the triton package is there, in version 3.4, the first with `knobs`, or
    later."""
    return all(importlib.util.find_spec(name) for name in ("triton", "triton.knobs"))


@functools.cache
def interpreted() -> bool:
    """Returns whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    if not is_installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def kernel_call(
    kernel: Any,
    grid: tuple[int, ...],
    capability: int,
    *,
    warps: int = 4,
    stages: int = 3,
    scratch: int = 0,
    **arguments: Any,
) -> list[jax.Array]:
    """Returns the results of a kernel.

    Args:
      kernel: a function decorated with Triton's `jit`.
      grid: up to three numbers of programs.
      capability: the compute capability of the GPU, such as 86 for 8.6.
      warps, stages: Triton's launch options.
      scratch: the bytes of global memory that a program has for its tensor descriptors.
      arguments: the kernel's, by name: arrays that it reads, `jax.ShapeDtypeStruct`s of the results
        that it writes, and constants.
    """
    # In the order of the kernel's parameters, in which XLA passes the addresses.
    ordered = [(name, arguments[name]) for name in kernel.arg_names]
    results = {n: a for n, a in ordered if isinstance(a, jax.ShapeDtypeStruct)}
    operands = {n: a for n, a in ordered if isinstance(a, jax.Array)}
    pointers = {n: a for n, a in ordered if n in results or n in operands}
    constants = tuple((n, a) for n, a in ordered if n not in pointers)
    types = {n: f"*{_TYPES[jnp.dtype(array.dtype).name]}:16" for n, array in pointers.items()}
    if interpreted():

        def run(*arrays: Any) -> list[np.ndarray]:
            from dora_common.triton.interpretation import HostArray

            found = {name: np.empty(one.shape, one.dtype) for name, one in results.items()}
            held = {
                n: np.asarray(a, order="C") for n, a in zip(operands, arrays, strict=True)
            } | found
            numbers = {n: float(a) for n, a in held.items() if a.ndim == 0 and n not in found}
            hosts = {n: HostArray(array, types[n][1:-3]) for n, array in held.items()}
            kernel[grid](**dict(constants) | hosts | numbers)
            return list(found.values())

        return jax.pure_callback(
            run, [*results.values()], *operands.values(), vmap_method="sequential"
        )
    from dora_common.triton import compilation

    code = start(
        lambda: compilation.compiled(
            kernel, tuple(types.items()), constants, capability, warps, stages
        )
    )
    written = [*results.values()]
    outputs = [i for i, name in enumerate(pointers) if name in results]
    unread = compilation.UNREAD_PARAMETERS
    if scratch:
        # The first parameter that Triton adds, after the kernel's own.
        written.append(jax.ShapeDtypeStruct((math.prod(grid) * scratch,), jnp.int8))
        outputs.append(len(pointers))
        unread -= 1

    def ptx(found: Any) -> str:
        if found.scratch_bytes > scratch:
            raise ValueError(
                f"the kernel {found.name} needs {found.scratch_bytes} bytes of global memory for a "
                f"program, and has scratch = {scratch}; raise it in the kernel's module"
            )
        return found.ptx

    call = jax.ffi.ffi_call(TARGET, written, vmap_method="sequential")
    read = [*operands.values()]
    launch: dict[str, Any] = {}
    for axis, blocks in zip("xyz", (*grid, 1, 1), strict=False):
        launch |= {f"grid_{axis}": np.int32(blocks), f"block_{axis}": np.int32(1)}
    launch["block_x"] = _Later(code, lambda found: np.int32(found.threads))
    return [
        *call(
            *read,
            *read[:1] * unread,
            kernel_type="ptx",
            kernel_data=_Later(code, ptx),
            name=_Later(code, lambda found: found.name),
            shared_mem_bytes=_Later(code, lambda found: np.int32(found.shared_bytes)),
            output_indices=tuple(map(np.int32, outputs)),
            **launch,
        )
    ][: len(results)]


@dataclasses.dataclass(frozen=True)
class _Later:
    """An attribute of the call that is known when the kernel is compiled: by then JAX has traced
    the program, and other kernels are compiled, too."""

    code: Future[Any]
    read: Callable[[Any], Any]


mlir.register_attribute_handler(
    _Later, lambda later: mlir.ir_attribute(later.read(later.code.result()))
)
