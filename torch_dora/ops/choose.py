"""Chooses between a Triton kernel and eager torch.

Every kernel is a module of :mod:`torch_dora.ops.triton`. Its ``refuses(call)`` returns the reason
why the kernel cannot run a call, or None. Its ``wins(call)`` returns whether the kernel is faster
than eager torch. Both depend only on shapes, dtypes, device and mode.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

IMPLEMENTATIONS = ("triton", "eager")


class Call(NamedTuple):
    """The facts that decide which implementation runs. Nothing else about the tensors may
    matter."""

    rows: int
    features: int
    dtypes: tuple[torch.dtype, ...]
    device: str
    transformed: bool = False
    sharded: bool = False


def choose(call: Call, implementation: str | None, kernel: ModuleType | None) -> str:
    """Returns the implementation that runs ``call``, "triton" or "eager": a named one runs or
    raises, None is the best. ``kernel`` is the operator's; None if it can run every call that
    Triton can."""
    check_name(implementation)
    if implementation == "eager":
        return "eager"
    reason = triton_refuses(call)
    if reason is None and kernel is not None:
        reason = kernel.refuses(call)
    if implementation == "triton":
        if reason is not None:
            raise NotImplementedError(f"implementation 'triton' cannot run this call: {reason}")
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

    # Triton decides whether to compile or interpret a kernel when it decorates the kernel. So one
    # check at import, when the kernels' modules are imported too, gives the same answer.
    return "interpreted" if knobs.runtime.interpret else "compiled"


TRITON_MODE = _triton_mode()
"""How Triton kernels run in this process: "compiled", "interpreted", or None without Triton."""


def in_transform() -> bool:
    """Returns whether a transform of torch.func (grad, vmap and so on), torch.autograd.forward_ad
    or torch.jit.trace is active. They differentiate or trace the eager operations themselves, and
    tensors inside torch.func have no memory that a kernel could read."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch._C._get_tracing_state() is not None


def triton_refuses(call: Call) -> str | None:
    """Returns the reason why no Triton kernel can run ``call``, or None. Kernels add their own
    reasons."""
    if TRITON_MODE is None:
        return "the triton package is not installed"
    if call.device != "cuda" and TRITON_MODE != "interpreted":
        return f"needs a CUDA device, or TRITON_INTERPRET=1 on a CPU; got device {call.device!r}"
    if call.transformed:
        return "cannot run inside torch.func's transforms, such as vmap, forward_ad or jit.trace"
    if call.sharded:
        return "reads the memory of one process, but a DTensor spans several; pass to_local()"
    for dtype in call.dtypes:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"computes in float32 and accepts float32, float16 and bfloat16; got {dtype}"
    return None


def triton_wins(call: Call) -> bool:
    """Returns whether a Triton kernel can be a good choice for ``call``. Triton's interpreter never
    is: it is for checking kernels."""
    return TRITON_MODE == "compiled" and call.device == "cuda"
