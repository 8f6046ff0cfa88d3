"""Launches of kernels with little work on the host."""

import functools
from typing import Any

import torch
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE


@functools.cache
def capability(device: torch.device) -> int:
    """Returns the compute capability of a GPU, such as 86 for 8.6; a Hopper's for a CPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches a kernel: ``kernel[grid](*arguments, **options)``.

    Triton finds the compiled kernel of a call in about 20 µs, of all facts that it may depend on.
    Here it is found by those that can differ: the device, the options, the tensors' dtypes and
    alignment, and of integers what Triton specialises for.

    Args:
        arguments: the kernel's first parameters: tensors, integers, floats and None.
        options: its constants, and Triton's options such as num_warps.
    """
    if TRITON_MODE != "compiled":
        kernel[grid](*arguments, **options)
        return
    facts = [_fact(argument) for argument in arguments]
    key = (id(kernel), torch.cuda.current_device(), *facts, *options.items())
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[key] = compiled, constants
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _fact(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, argument.bit_length() > 31
    return type(argument)
