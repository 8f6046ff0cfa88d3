"""Rotating sets of inputs, shared between the frameworks without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

# Together the sets exceed the L2 (60 MB on an H200), so that back-to-back steps find none of it
# there; two sets at least, so that no step reads what it just read.
ROTATION_BYTES = 128 * 2**20
MOST_SETS = 8
# XLA's own choice of matrix products is now and then a slower one; LoRA is held against at its
# best, so both sides are measured both ways.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def rotate(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Returns the given tensors, and copies of them at other addresses."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = max(2, min(MOST_SETS, -(-ROTATION_BYTES // max(size, 1))))
    return [tuple(tensors)] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]


def to_jax(sets: Sequence[Sequence[torch.Tensor]]) -> list[tuple[jax.Array, ...]]:
    """Returns the same memory as JAX arrays; tensors must be contiguous."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [tuple(jax.dlpack.from_dlpack(t) for t in tensors) for tensors in sets]


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns the same memory as a torch tensor."""
    return torch.from_dlpack(jax.block_until_ready(array))


def interpreted(step: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Returns `step` with its Mosaic kernels run by Pallas' interpreter where there is no GPU."""
    if device == "cuda":
        return step

    def run(*arguments: Any) -> Any:
        with plgpu.force_gpu_interpret_mode():
            return step(*arguments)

    return run


def pullback(
    vjp: Callable[..., Any], sets: Sequence[tuple], device: str
) -> tuple[Callable[..., Any], list[tuple]]:
    """Returns a backward pass alone: a step, and its inputs for each set.

    A set is a cotangent followed by the arguments of `vjp`, which returns what `jax.vjp` does. The
    step takes the cotangent and what the forward pass kept, and returns the gradients.
    """
    forward = jax.jit(interpreted(lambda *arguments: vjp(*arguments)[1], device))
    try:
        inputs = [(cotangent, forward(*arguments)) for cotangent, *arguments in sets]
    except Exception as error:
        return raising(error), list(sets)
    return interpreted(lambda cotangent, pull: pull(cotangent), device), inputs


def raising(error: Exception) -> Callable[..., Any]:
    """Returns a step that raises `error`, for a variant that could not even be built."""

    def step(*_: Any) -> Any:
        raise error

    return step
