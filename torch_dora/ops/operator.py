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
from torch.utils.flop_counter import register_flop_formula

from torch_dora.ops import choose

PLAIN = frozenset((Tensor, nn.Parameter))
"""The classes of tensors without behaviour of their own."""

_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides


class Operator[**P, R]:
    """A function of tensors that mutates none of them and has no gradient. ``op`` is the operator
    of torch.library.

    It is defined by the dispatcher itself, and not by ``torch.library.custom_op``, whose Python for
    the gradient takes longer in each call of a compiled program than the kernel's launch.
    """

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.function, self.name = _on_its_device(function), name
        namespace, name = name.split("::")
        self._library = torch.library.Library(namespace, "FRAGMENT")
        schema = torch.library.infer_schema(function, mutates_args=())
        self._library.define(name + schema, tags=_TAGS)
        self._library.impl(name, _unrecorded(self.function), "CompositeExplicitAutograd")
        self._library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        self.op: Any = getattr(getattr(torch.ops, namespace), name).default

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        if _must_record(arguments):
            return self.op(*arguments, **named)
        if torch.is_grad_enabled() and any(map(_needs_gradient, arguments)):
            return _WithoutGradient.apply(self, named, *arguments)
        return self.function(*arguments, **named)

    def fake(self, function: Callable[P, R]) -> Callable[P, R]:
        """Registers the function that computes shapes and dtypes."""
        torch.library.register_fake(self.name, function, lib=self._library)
        return function

    def count(self, formula: Callable[..., int]) -> Callable[..., int]:
        """Registers the function that computes the FLOPs of the operator's products from the shapes
        of its tensors and its other arguments, for FlopCounterMode."""
        register_flop_formula(self.op.overloadpacket)(formula)
        return formula

    def define(self, definition: Callable[P, R]) -> Callable[P, R]:
        """Registers plain operations that compute the operator, for torch.onnx.export. Programs of
        torch.export keep the operator, since decomposed ones lose ``detach``: gradients would flow
        through the norm."""
        return register_decomposition(self.op)(definition)


class _WithoutGradient(torch.autograd.Function):
    """Raises an error in the backward pass of an operator."""

    @staticmethod
    def forward(ctx, operator, named, *arguments):
        ctx.name = operator.name
        results = operator.function(*arguments, **named)
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    def backward(ctx, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(f"{ctx.name} has no gradient")


def operator[**P, R](name: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that turns a function into an operator called ``name``."""
    return lambda function: Operator(name, function)


def _on_its_device[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns ``function``, which computes on the GPU of its first tensor. Triton launches kernels
    on the current one."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
        if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
            return function(*arguments, **named)
        with torch.cuda.device(tensor.device):
            return function(*arguments, **named)

    return call


def _unrecorded[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns ``function`` without a gradient: the dispatcher, which passes autograd by, leaves its
    mode as the caller has it."""

    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*arguments, **named)
        with torch.no_grad():
            return function(*arguments, **named)

    return call


def is_exporting() -> bool:
    """Returns whether torch.export traces. Dynamo before torch 2.13 takes torch's own function of
    this name for True, whatever it traces."""
    return torch.compiler._is_exporting_flag


def is_compiled() -> bool:
    """Returns whether torch.compile traces a program that runs in this process."""
    return torch.compiler.is_compiling() and not is_exporting()


def is_observed() -> bool:
    """Returns whether a compiler, a dispatch mode or a transform must see the operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return choose.in_transform()


def _must_record(arguments: tuple[Any, ...]) -> bool:
    if is_observed():
        return True
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return any(type(tensor) not in PLAIN or tensor.is_meta for tensor in tensors)


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad
