"""The device, and the one choice between a Triton kernel and plain torch.

A kernel is a module of :mod:`torch_dora.ops.triton`. ``refuses(call)`` returns why it cannot take a
call, or None, and ``wins(call)`` whether it is faster than torch there; both are functions of
shapes, dtypes, device and mode alone.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

IMPLEMENTATIONS = ("triton", "eager")


class Call(NamedTuple):
    """The facts that decide which implementation runs: nothing else about the tensors may
    matter."""

    rows: int
    features: int
    dtypes: tuple[torch.dtype, ...]
    device: str
    transformed: bool = False
    sharded: bool = False


def choose(call: Call, implementation: str | None, kernel: ModuleType | None) -> str:
    """Returns "triton" or "eager", whichever runs ``call``.

    Args:
        call: what is asked for.
        implementation: one of :data:`IMPLEMENTATIONS`, which then runs or raises; None for the
            best.
        kernel: the operator's kernel; None for one that takes every call that Triton takes.
    """
    check_name(implementation)
    if implementation == "eager":
        return "eager"
    reason = triton_refuses(call)
    if reason is None and kernel is not None:
        reason = kernel.refuses(call)
    if implementation == "triton":
        if reason is not None:
            raise NotImplementedError(f"implementation 'triton' cannot take this call: {reason}")
        return "triton"
    wins = reason is None and triton_wins(call) and (kernel is None or kernel.wins(call))
    return "triton" if wins else "eager"


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless ``implementation`` is None or one of :data:`IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not a torch implementation: "
            f"expected None or one of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )


def _triton_mode() -> str | None:
    if find_spec("triton") is None:
        return None
    from triton import knobs

    # Triton decides between compiling and interpreting when a kernel is decorated, so asking
    # once, when the kernels' modules are imported, asks what they asked.
    return "interpreted" if knobs.runtime.interpret else "compiled"


TRITON_MODE = _triton_mode()
"""How Triton kernels run in this process: "compiled", "interpreted", or None without Triton."""


def transformed() -> bool:
    """Returns whether a transform of torch.func is at work (grad, vmap and so on),
    torch.autograd.forward_ad or torch.jit.trace. The tensors of the first have no memory that a
    kernel could read, and all go through the definition of an operator themselves, without our own
    gradients."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch._C._get_tracing_state() is not None


def triton_refuses(call: Call) -> str | None:
    """Returns why no Triton kernel at all can take ``call``; each kernel adds its own reasons."""
    if TRITON_MODE is None:
        return "the triton package is not installed"
    if call.device != "cuda" and TRITON_MODE != "interpreted":
        return f"needs a CUDA device, or TRITON_INTERPRET=1 on a CPU; got device {call.device!r}"
    if call.transformed:
        return "cannot run inside of torch.func's transforms, such as vmap, forward_ad or jit.trace"
    if call.sharded:
        return "reads the memory of one process, and a DTensor lies in several; pass to_local()"
    for dtype in call.dtypes:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"computes in float32 and takes float32, float16 and bfloat16; got {dtype}"
    return None


def triton_wins(call: Call) -> bool:
    """Returns whether a Triton kernel can be a good choice for ``call``: its interpreter is for
    checking kernels, not for speed."""
    return TRITON_MODE == "compiled" and call.device == "cuda"
