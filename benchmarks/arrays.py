"""Sets of inputs that are used in rotation, and arrays that JAX and torch share without a copy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

from parity.sides.jax import operators

# Together the sets are larger than the L2 cache (60 MB on an H200), so that a step finds none of
# its inputs there. There are at least two sets, so that no step reads what the last one read.
ROTATION_BYTES = 128 * 2**20
MOST_SETS = 8
# XLA's own choice between Triton's and cuBLAS's matrix products is sometimes the slower one. LoRA
# must be compared at its best, so both methods are measured with this option and without it.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def set_count(size: int) -> int:
    """Returns how many sets of inputs to rotate, given the bytes of one set."""
    return max(2, min(MOST_SETS, -(-ROTATION_BYTES // max(size, 1))))


def rotate(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Returns the given tensors, and copies of them at other addresses."""
    count = set_count(sum(t.numel() * t.element_size() for t in tensors))
    return [tuple(tensors)] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]


def to_jax(sets: Sequence[Sequence[torch.Tensor]]) -> list[tuple[jax.Array, ...]]:
    """Returns the same memory as JAX arrays; tensors must be contiguous."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [tuple(map(operators.to_jax, tensors)) for tensors in sets]


def interpreted(step: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Returns `step`, with Pallas' interpreter for its Mosaic kernels if there is no GPU."""
    if device == "cuda":
        return step

    def run(*arguments: Any) -> Any:
        with plgpu.force_gpu_interpret_mode():
            return step(*arguments)

    return run


def pullback(
    vjp: Callable[..., Any], sets: Sequence[tuple], device: str
) -> tuple[Callable[..., Any], list[tuple]]:
    """Returns a step that runs a backward pass alone, and its inputs for each set.

    Args:
      vjp: returns what `jax.vjp` returns.
      sets: each a cotangent followed by the arguments of `vjp`.

    Returns:
      A step from the cotangent and the residuals of the forward pass to the gradients, and its
      inputs. The step raises the forward pass's exception if there was one.
    """
    forward = jax.jit(interpreted(lambda *arguments: vjp(*arguments)[1], device))
    try:
        inputs = [(cotangent, forward(*arguments)) for cotangent, *arguments in sets]
    except Exception as error:
        return raising(error), list(sets)
    return interpreted(lambda cotangent, pull: pull(cotangent), device), inputs


def raising(error: Exception) -> Callable[..., Any]:
    """Returns a step that raises `error`, for a variant that could not be built."""

    def step(*_: Any) -> Any:
        raise error

    return step
