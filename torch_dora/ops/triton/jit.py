"""Launches of kernels with little work on the host."""

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.knobs import runtime
from triton.runtime import _allocation

from torch_dora.ops.choose import TRITON_MODE


@functools.cache
def capability(device: torch.device) -> int:
    """Returns the compute capability of a GPU, such as 86 for 8.6; a Hopper's for a CPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def aligned(size: int) -> int:
    """Returns a size in elements or bytes, rounded up to one at which a tensor can begin: Triton
    assumes 16 bytes."""
    return -(-size // 64) * 64


_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_IS_AHEAD = contextvars.ContextVar("is_ahead", default=False)
_LOG = logging.getLogger(__name__)


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
    if _IS_AHEAD.get():
        kernel.warmup(*arguments, grid=grid, **options)
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


def compile_ahead(launches: Callable[[], None]) -> None:
    """Compiles the kernels that a function launches by :func:`launch_kernel`, at the same time, and
    does not launch them: what they would write is left as it was. One after another they take
    seconds each. An error is raised when its kernel is launched."""
    if TRITON_MODE != "compiled":
        return

    def compile_all() -> None:
        _IS_AHEAD.set(True)
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            launches()

    try:
        contextvars.copy_context().run(compile_all)
    except Exception:  # The launches will tell.
        _LOG.debug("kernels are compiled when they are launched", exc_info=True)


def _fact(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, argument.bit_length() > 31
    return type(argument)


class Launch:
    """A launch that is made again and again with other tensors: ``kernel[grid](*tensors, *scalars,
    **options)``, as fast as Inductor launches. Keep it, for example in a ``functools.lru_cache``.

    Args:
        scalars: the integers and floats that follow the tensors among the kernel's parameters.
        options: its constants, and Triton's options such as num_warps.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], **options: Any
    ) -> None:
        self.kernel, self.grid, self.scalars, self.options = kernel, grid, scalars, options
        self.blocks = (*grid, 1, 1)[:3]
        self.same: dict[tuple[Any, ...], SameLaunch] = {}
        constants = (options[name] for name in kernel.arg_names if name in options)
        self.passed = (*scalars, *constants)

    def __call__(self, first: Tensor, *others: Tensor | None) -> "SameLaunch | None":
        """Launches with tensors of the current device, or None. Returns the launch with others of
        the same dtypes, if there may be one."""
        if TRITON_MODE != "compiled" or is_profiled():
            self._ask(first, *others)
            return None
        # Triton's launcher would ask the driver about a tensor; it takes an address as it is.
        address, device = first.data_ptr(), first.get_device()
        addresses, bits, key = [address], address, [device, first.dtype]
        for tensor in others:
            if tensor is None:
                addresses.append(0)
                key.append(None)
            else:
                addresses.append(address := tensor.data_ptr())
                bits |= address
                key.append(tensor.dtype)
        if bits % 16:  # Triton compiles another kernel, which has no place here.
            self._ask(first, *others)
            return None
        found = self.same.get(key := tuple(key))
        if found is None:
            found = SameLaunch(self)
            found.keep(self._ask(first, *others), first)
            self.same[key] = found
        else:
            _launch_again(found, addresses)
        return found

    def _ask(self, *tensors: Tensor | None) -> Any:
        """Launches by Triton's own call, and returns the compiled kernel."""
        return self.kernel[self.grid](*tensors, *self.scalars, **self.options)


class DescribingLaunch(Launch):
    """A launch of a kernel that describes its tensors (TMA): it has memory for this in each launch,
    and copies of operands that do not begin at a multiple of 16 bytes."""

    def _ask(self, *tensors: Any) -> Any:
        aligned = (
            tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone()
            for tensor in tensors
        )
        with _memory(tensors[0].device):
            return super()._ask(*aligned)


def _launch_again(same: "SameLaunch", addresses: Iterable[int]) -> None:
    """Launches with addresses of the current device, or 0. ``takes`` holds for them, and
    :func:`is_profiled` does not."""
    stream, before = torch._C._cuda_getCurrentRawStream(same.device), same.before
    if same.scratch:
        memory = same.bytes.new_empty(same.scratch)
        before = (*before[:3], memory.data_ptr(), *before[4:])
    run: Any = same.run
    run(*same.blocks, stream, *before, *addresses, *same.passed)


class SameLaunch:
    """A :class:`Launch` whose every call has tensors of the same device and dtypes, and None in the
    same places: nothing is looked up."""

    __slots__ = (
        "before",
        "blocks",
        "bytes",
        "compiled",
        "device",
        "launch",
        "passed",
        "run",
        "scratch",
    )

    def __init__(self, launch: Launch) -> None:
        self.launch, self.compiled = launch, None
        self.blocks, self.passed = launch.blocks, launch.passed
        self.device, self.run, self.before = 0, None, ()
        self.scratch, self.bytes = 0, torch.empty(0, dtype=torch.uint8)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launches with tensors of the current device, or None."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self.takes(addresses) and not is_profiled():
            self.at(addresses)
        else:
            self._ask(*tensors)

    at = _launch_again

    def takes(self, addresses: Iterable[int]) -> bool:
        """Returns whether the kernel was launched before, with tensors that are aligned as those at
        these addresses: else it may be another kernel."""
        bits = 0
        for address in addresses:
            bits |= address
        return self.run is not None and not bits % 16

    def keep(self, compiled: Any, first: Tensor) -> None:
        """Keeps the compiled kernel for tensors of the first one's device."""
        # Triton unloads a kernel that nothing refers to.
        self.compiled, self.device = compiled, first.get_device()
        before, run, scratch = _run_of(compiled, first.device)
        self.before, self.scratch = before, scratch * math.prod(self.launch.blocks)
        self.bytes = first.new_empty(0, dtype=torch.uint8)
        self.run = run

    def _ask(self, *tensors: Any) -> None:
        if (same := self.launch(*tensors)) is not None:
            # Another thread must not see `run` without the others.
            self.compiled, self.device, self.before = same.compiled, same.device, same.before
            self.scratch, self.bytes = same.scratch, same.bytes
            self.run = same.run


def _run_of(compiled: Any, device: torch.device) -> tuple[tuple[Any, ...], Any, int]:
    """Returns the arguments between the stream and the kernel's, the function that launches a
    compiled kernel with them, and the bytes of memory that a program needs, whose address is the
    fourth argument; 0 if that function asks for the memory itself."""
    run = compiled.run
    if triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher":
        launch, scratch = run.launch, run.global_scratch_size
        # Calls of Python, which would only find out how much scratch memory there is, are left out.
        if type(launch) is BuiltinFunctionType and not run.profile_scratch_size:
            options = run.launch_cooperative_grid, run.launch_pdl, None, None
            before = (compiled.function, *options, compiled.packed_metadata, None, None, None)
            return before, launch, scratch
    before = (compiled.function, compiled.packed_metadata, None, None, None)
    if not getattr(run, "global_scratch_size", 0):
        return before, run, 0

    def run_with_memory(*arguments: Any) -> None:
        with _memory(device):
            run(*arguments)

    return before, run_with_memory, 0


@contextlib.contextmanager
def _memory(device: torch.device) -> Iterator[None]:
    """Lets Triton allocate memory for descriptors, and leaves its allocator as it was."""

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    token = _allocation._allocator.set(allocate)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def is_profiled() -> bool:
    """Returns whether hooks must see each launch."""
    before: Any = runtime.launch_enter_hook
    after: Any = runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))
