"""Which implementation runs an operator: one loop, for every operator.

An operator lists its candidates, best first. Each says, from shapes, dtypes, device and mode alone,
why it cannot take a call (``refuses``) and why it should not be picked unasked (``loses``). A named
implementation runs or raises; ``None`` takes the first candidate that neither refuses nor loses.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

IMPLEMENTATIONS = ("triton", "eager")


class Call(NamedTuple):
    """What decides whether an implementation accepts: nothing else about the tensors may matter."""

    rows: int
    features: int
    rank: int
    dtypes: tuple[torch.dtype, ...]
    device: str
    training: bool
    transformed: bool = False


class Candidate(NamedTuple):
    """One implementation of one operator. Both predicates return a reason, or None."""

    name: str
    refuses: Callable[[Call], str | None]
    loses: Callable[[Call], str | None]


def accepts(call: Call) -> str | None:
    """The predicate of an implementation that has no reason to refuse anything."""
    return None


def check_name(implementation: str | None) -> None:
    """Raise ValueError unless ``implementation`` is None or one of :data:`IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not a torch implementation: "
            f"expected None or one of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )


def choose(candidates: Sequence[Candidate], call: Call, implementation: str | None) -> str:
    """Name the candidate that runs ``call``.

    Args:
        candidates: the operator's implementations, best first.
        call: what is asked for.
        implementation: one candidate's name, which then runs or raises; None for the best.

    Raises:
        ValueError: ``implementation`` is no torch implementation.
        NotImplementedError: the named implementation refuses, or none accepts; with the reasons.
    """
    check_name(implementation)
    reasons = []
    for candidate in candidates:
        if implementation is not None and candidate.name != implementation:
            continue
        reason = candidate.refuses(call)
        if reason is None and implementation is None:
            reason = candidate.loses(call)
        if reason is None:
            return candidate.name
        reasons.append(f"{candidate.name!r}: {reason}")
    if not reasons:
        reasons.append(f"{implementation!r}: this operator has no such implementation")
    raise NotImplementedError(f"no implementation takes this call: {'; '.join(reasons)}")


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
    """Whether a transform of torch.func is at work: grad, vmap and so on. Their tensors have no
    memory that a kernel could read, and they go through the definition of an operator themselves,
    without our own gradients."""
    return torch._C._are_functorch_transforms_active()


def triton_refuses(call: Call) -> str | None:
    """Why no Triton kernel at all can take ``call``; each kernel adds reasons of its own."""
    if TRITON_MODE is None:
        return "the triton package is not installed"
    if call.device != "cuda" and TRITON_MODE != "interpreted":
        return f"needs a CUDA device, or TRITON_INTERPRET=1 on a CPU; got device {call.device!r}"
    if call.transformed:
        return "cannot run inside of torch.func's transforms, such as vmap and grad"
    for dtype in call.dtypes:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"computes in float32 and takes float32, float16 and bfloat16; got {dtype}"
    return None


def triton_loses(call: Call) -> str | None:
    """Why a Triton kernel is a bad choice for ``call`` although it would run."""
    if TRITON_MODE == "interpreted" or call.device != "cuda":
        return "Triton's interpreter is for checking kernels, not for speed"
    return None
