"""Calls of Triton kernels inside JAX programs.

Triton's own compiler compiles the kernel, for its sizes as constants, and XLA launches the PTX by a
custom call of its own. XLA needs no plugin for it, puts it into CUDA graphs, and a program can be
built on a machine without a GPU.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TARGET = "__gpu$xla.gpu.ptx"
_TYPES = {
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32"},
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
    **arguments: Any,
) -> list[jax.Array]:
    """Returns the results of a kernel.

    Args:
      kernel: a function decorated with Triton's `jit`.
      grid: up to three numbers of programs.
      capability: the compute capability of the GPU, such as 86 for 8.6.
      warps, stages: Triton's launch options.
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
    from dora_common.triton.compilation import compiled

    code = compiled(kernel, tuple(types.items()), constants, capability, warps, stages)
    call = jax.ffi.ffi_call(TARGET, [*results.values()], vmap_method="sequential")
    read = [*operands.values()]
    # The addresses of scratch memory that the kernel does not use.
    unused = read[:1] * (code.parameters - len(pointers))
    grid, launch = (*grid, 1, 1)[:3], {"kernel_type": "ptx", "kernel_data": code.ptx}
    for axis, blocks, threads in zip("xyz", grid, (code.threads, 1, 1), strict=True):
        launch |= {f"grid_{axis}": np.int32(blocks), f"block_{axis}": np.int32(threads)}
    return [
        *call(
            *read,
            *unused,
            name=code.name,
            shared_mem_bytes=np.int32(code.shared_bytes),
            output_indices=tuple(np.int32(i) for i, name in enumerate(pointers) if name in results),
            **launch,
        )
    ]
