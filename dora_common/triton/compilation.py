"""Compiles kernels with constant sizes by Triton's own compiler, for a card that need not exist."""

import dataclasses
import functools
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

# CUDA 12.8, the first that knows every card of `cards`: a driver reads this version and older ones.
PTX_VERSION = 87
# Triton adds the addresses of scratch memory, of which kernels read the first one at most: before
# 3.5 there is one.
UNREAD_PARAMETERS = 1 if triton.__version__.startswith("3.4.") else 2


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        name: its name in `ptx`, which is that of its module.
        ptx, cubin: its code, for the driver, without debug information, and for the card.
        threads: per program, also those that only fetch tiles.
        shared_bytes: the shared memory of a program.
        scratch_bytes: the global memory of a program, for its tensor descriptors.
    """

    name: str
    ptx: str
    cubin: bytes
    threads: int
    shared_bytes: int
    scratch_bytes: int = 0

    def resources(self) -> tuple[int, int]:
        """Returns the registers of a thread, and the bytes of memory that it spills them to."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack, local = (
            int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK", "LOCAL")
        )
        return registers, stack + local


@functools.cache
def compiled(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    capability: int,
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compiles a kernel.

    Args:
        kernel: a function decorated with ``jit``.
        types: the names and types of parameters, as Triton's own ahead-of-time compiler writes
            them: "*bf16:16" is an address and "i32:16" an integer, both multiples of 16.
        constants: the names and values of all other parameters.
        capability: the compute capability, such as 86 for 8.6.
    """
    names, given = kernel.arg_names, dict(types)
    unknown = {*names} ^ {*given, *dict(constants)}
    if unknown:
        raise TypeError(f"{kernel.fn.__module__} has not the parameters {sorted(unknown)}")
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: given.get(name, "constexpr").removesuffix(":16") for name in names},
        constexprs={(names.index(name),): value for name, value in constants},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, written in types
            if written.endswith(":16")
        },
    )
    options = {"num_warps": warps, "num_stages": stages, "ptx_version": PTX_VERSION}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = found.asm["ptx"]
    declared = re.search(r"\.entry [^(]*\((.*?)\)\s", ptx, re.DOTALL)
    assert declared is not None
    expected = sum(_parameters(written) for _, written in types) + UNREAD_PARAMETERS
    assert declared[1].count(".param") == expected
    # Profiles show this name, and all modules call their kernel so.
    name, module = found.metadata.name, kernel.fn.__module__.rpartition(".")[2]
    if name == "kernel":
        name, ptx = module, re.sub(r"(\.entry )kernel\b", rf"\1{module}", ptx)
    return Compiled(
        name=name,
        ptx=_without_debug_information(ptx),
        cubin=found.asm["cubin"],
        threads=32 * found.metadata.num_warps,
        shared_bytes=found.metadata.shared,
        scratch_bytes=found.metadata.global_scratch_size,
    )


def _without_debug_information(ptx: str) -> str:
    """Returns PTX without line numbers and comments, which are half of it: programs contain the
    code once for each call."""
    code = ptx.partition("\t.section\t.debug")[0]
    left_out = (".loc\t", ".file\t", "//")
    lines = (line for line in code.splitlines() if not line.lstrip().startswith(left_out))
    return "\n".join(lines) + "\n"


def _parameters(written: str) -> int:
    """Returns how many parameters of the card one is: a descriptor has sizes and strides, too."""
    return 1 + 2 * (written.count(",") + 1) if written.startswith("tensordesc") else 1
