"""Operators of torch.library, called as plain functions where nobody records them.

torch.compile, torch.export, a dispatch mode (fake tensors, selective checkpointing, counting
FLOPs), a transform of torch.func and the meta device must see one operator where a kernel is
launched. Everybody else need not wait for torch.library, whose way takes longer on the host than a
launch does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dora.ops import choose

_PLAIN = (Tensor, nn.Parameter)


class Operator[**P, R]:
    """A function of tensors that changes none of them; as ``op`` an operator of torch.library."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.function = function
        self.op = torch.library.custom_op(name, function, mutates_args=())

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        called: Any = self.op if _recorded(arguments) else self.function
        return called(*arguments, **named)


def operator[**P, R](name: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that makes an operator of a function, called ``name``."""
    return lambda function: Operator(name, function)


def _recorded(arguments: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if choose.transformed():
        return True
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if any(type(one) not in _PLAIN or one.is_meta for one in tensors):
        return True
    # The operator tells that it has no gradient.
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
