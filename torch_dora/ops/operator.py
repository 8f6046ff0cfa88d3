"""Operators of torch.library that are called as plain functions where possible.

These must see a kernel launch as one operator: torch.compile, torch.export, a dispatch mode (fake
tensors, selective checkpointing, counting FLOPs), the transforms of torch.func, and the meta
device. In all other cases the plain function is called: torch.library's dispatch takes longer on
the host than a kernel launch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import register_decomposition

from torch_dora.ops import choose

PLAIN = (Tensor, nn.Parameter)


class Operator[**P, R]:
    """A function of tensors that mutates none of them. ``op`` is the operator of torch.library."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.function = _on_its_device(function)
        self.op = torch.library.custom_op(name, self.function, mutates_args=())

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        function: Any = self.op if _must_record(arguments) else self.function
        return function(*arguments, **named)

    def define(self, definition: Callable[P, R]) -> Callable[P, R]:
        """Registers plain operations that compute the operator, for torch.onnx.export. Programs of
        torch.export keep the operator, since decomposed ones lose ``detach``: gradients would flow
        through the norm."""
        return register_decomposition(self.op._opoverload)(definition)


def operator[**P, R](name: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that turns a function into an operator called ``name``."""
    return lambda function: Operator(name, function)


def _on_its_device[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns ``function``, which computes on the GPU of its first tensor. Triton launches kernels
    on the current one."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return function(*arguments, **named)
        with torch.cuda.device(tensor.device):
            return function(*arguments, **named)

    return call


def is_observed() -> bool:
    """Returns whether a compiler, a dispatch mode or a transform must see the operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return choose.in_transform()


def _must_record(arguments: tuple[Any, ...]) -> bool:
    if is_observed():
        return True
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if any(type(tensor) not in PLAIN or tensor.is_meta for tensor in tensors):
        return True
    # The operator raises an error in the backward pass if it has no gradient.
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
