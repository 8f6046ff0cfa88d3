"""Errors to plant in either package, so that parity can be seen to fail.

Each stands for a way in which a DoRA implementation goes wrong and still trains. A fault replaces
functions of a package, wherever they are bound, for as long as its context lasts:

    with FAULTS["norm_attached"].plant("torch"):
        ...

It acts on every implementation of the operators and through them on the layers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch

from parity.oracle import EPS, dtype_name

Backend = Literal["jax", "torch"]
Level = Literal["operator", "layer", "encoder", "model", "training"]
BACKENDS: tuple[Backend, ...] = ("jax", "torch")
PACKAGES = {"jax": "jax_dora", "torch": "torch_dora"}

MISPLACED_EPS = 1e-6


@dataclass(frozen=True)
class Point:
    """The function `name` of `module`, and what makes a wrong one of it."""

    module: str
    name: str
    spoil: Callable[[Callable], Callable]


@dataclass(frozen=True)
class Fault:
    """One error, plantable in either package.

    Attributes:
      description: what is computed instead.
      caught_by: the levels of parity that must notice it.
      points: by backend, what is replaced.
    """

    name: str
    description: str
    caught_by: tuple[Level, ...]
    points: Mapping[Backend, tuple[Point, ...]]

    @contextlib.contextmanager
    def plant(self, backend: Backend) -> Iterator[None]:
        """The fault, while the context lasts, in `backend`'s package alone.

        Compiled JAX programs are forgotten on entry and on exit: they would run on without the
        fault, or with it. A program that the caller compiled ahead of time is not reached.
        """
        with contextlib.ExitStack() as stack:
            for point in self.points[backend]:
                stack.enter_context(_replaced(PACKAGES[backend], point))
            jax.clear_caches()
            stack.callback(jax.clear_caches)
            yield


@contextlib.contextmanager
def _replaced(package: str, point: Point) -> Iterator[None]:
    home = importlib.import_module(point.module)
    original = getattr(home, point.name)
    spoilt = point.spoil(original)
    try:
        _rebind(package, original, spoilt)
        yield
    finally:
        # Modules that were imported meanwhile have bound the wrong one.
        _rebind(package, spoilt, original)


def _rebind(package: str, old: Callable, new: Callable) -> None:
    for module, name in list(_bindings(package, old)):
        setattr(module, name, new)


def _bindings(package: str, function: Callable) -> Iterator[tuple[ModuleType, str]]:
    """Every name that a loaded module of the package knows the function by."""
    for path, module in list(sys.modules.items()):
        if path == package or path.startswith(f"{package}."):
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name


def _eps_in_the_root_jax(factored_norm: Callable) -> Callable:
    def spoilt(*arguments: Any, **options: Any) -> jax.Array:
        return jnp.sqrt(factored_norm(*arguments, **options) ** 2 + MISPLACED_EPS)

    return spoilt


def _eps_in_the_root_torch(factored_norm: Callable) -> Callable:
    def spoilt(*arguments: Any, **options: Any) -> torch.Tensor:
        return (factored_norm(*arguments, **options) ** 2 + MISPLACED_EPS).sqrt()

    return spoilt


def _rounded_jax(g: jax.Array) -> jax.Array:
    # A cast there and back XLA may drop.
    return jax.lax.reduce_precision(g, exponent_bits=8, mantissa_bits=7)


def _rounded_torch(g: torch.Tensor) -> torch.Tensor:
    return g.bfloat16().to(g.dtype)


def _rounded_result(rounded: Callable) -> Callable[[Callable], Callable]:
    return lambda magnitude_scale: lambda *arguments: rounded(magnitude_scale(*arguments))


def _rounded_argument(rounded: Callable, position: int) -> Callable[[Callable], Callable]:
    def spoil(function: Callable) -> Callable:
        def spoilt(*arguments: Any, **options: Any) -> Any:
            given = list(arguments)
            given[position] = rounded(given[position])
            return function(*given, **options)

        return spoilt

    return spoil


def _without_cross_jax(factored_norm: Callable) -> Callable:
    def spoilt(kernel, lora_a, lora_b, scale, **options: Any) -> jax.Array:
        norm = factored_norm(kernel, lora_a, lora_b, scale, **options)
        w, a, b = (jax.lax.stop_gradient(v).astype(jnp.float32) for v in (kernel, lora_a, lora_b))
        with jax.default_matmul_precision("highest"):
            cross = jnp.sum(b * (a.T @ w), axis=0)
        return jnp.sqrt(jnp.maximum(norm**2 - 2 * scale * cross, 0))

    return spoilt


def _without_cross_torch(factored_norm: Callable) -> Callable:
    def spoilt(weight, lora_a, lora_b, scale, **options: Any) -> torch.Tensor:
        norm = factored_norm(weight, lora_a, lora_b, scale, **options)
        w, a, b = (tensor.detach().float() for tensor in (weight, lora_a, lora_b))
        cross = (b * (w @ a.T)).sum(1)
        return (norm**2 - 2 * scale * cross).clamp(min=0).sqrt()

    return spoilt


def _attached_norm_jax(factored_norm: Callable) -> Callable:
    def spoilt(kernel, lora_a, lora_b, scale, **options: Any) -> jax.Array:
        norm = factored_norm(kernel, lora_a, lora_b, scale, **options)
        product = lora_a.astype(jnp.float32) @ lora_b.astype(jnp.float32)
        dense = jnp.linalg.norm(kernel.astype(jnp.float32) + scale * product, axis=0)
        return norm + dense - jax.lax.stop_gradient(dense)

    return spoilt


def _attached_g_jax(_: Callable) -> Callable:
    def spoilt(magnitude, norm, dtype) -> jax.Array:
        eps = EPS[dtype_name(dtype)]
        return magnitude.astype(jnp.float32) / jnp.maximum(norm, eps)

    return spoilt


def _attached_norm_torch(factored_norm: Callable) -> Callable:
    def spoilt(weight, lora_a, lora_b, scale, **options: Any) -> torch.Tensor:
        product = lora_b.float() @ lora_a.float()
        dense = torch.linalg.vector_norm(weight.float() + scale * product, dim=1)
        return factored_norm(weight, lora_a, lora_b, scale, **options) + dense - dense.detach()

    return spoilt


def _attached_g_torch(_: Callable) -> Callable:
    def spoilt(magnitude, norm, dtype) -> torch.Tensor:
        return magnitude.float() / norm.clamp(min=EPS[dtype_name(dtype)])

    return spoilt


def _norms(jax_spoil: Callable, torch_spoil: Callable) -> dict[Backend, tuple[Point, ...]]:
    return {
        "jax": (Point("jax_dora.ops.norm", "factored_norm", jax_spoil),),
        "torch": (Point("torch_dora.ops.norm", "factored_norm", torch_spoil),),
    }


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "eps_misplaced",
            "‖W + sBA‖ with eps under the root, sqrt(‖·‖² + 1e-6), in place of max(‖·‖, eps): a "
            "zero row's norm becomes 1e-3",
            ("operator", "layer"),
            _norms(_eps_in_the_root_jax, _eps_in_the_root_torch),
        ),
        Fault(
            "g_rounded",
            "g rounded to bf16 before 1 is taken from it",
            ("operator", "layer", "encoder", "model"),
            {
                "jax": (
                    Point("jax_dora.ops.norm", "magnitude_scale", _rounded_result(_rounded_jax)),
                    Point("jax_dora.ops.compose", "forward", _rounded_argument(_rounded_jax, 3)),
                ),
                "torch": (
                    Point(
                        "torch_dora.ops.norm", "magnitude_scale", _rounded_result(_rounded_torch)
                    ),
                    Point(
                        "torch_dora.ops.compose", "forward", _rounded_argument(_rounded_torch, 2)
                    ),
                ),
            },
        ),
        Fault(
            "cross_term_dropped",
            "the factored norm without 2s·Σ B∘(WAᵀ)",
            ("operator", "layer", "encoder", "model", "training"),
            _norms(_without_cross_jax, _without_cross_torch),
        ),
        Fault(
            "norm_attached",
            "a gradient flows through the norm",
            ("layer", "encoder", "model", "training"),
            {
                "jax": (
                    Point("jax_dora.ops.norm", "factored_norm", _attached_norm_jax),
                    Point("jax_dora.ops.norm", "magnitude_scale", _attached_g_jax),
                ),
                "torch": (
                    Point("torch_dora.ops.norm", "factored_norm", _attached_norm_torch),
                    Point("torch_dora.ops.norm", "magnitude_scale", _attached_g_torch),
                ),
            },
        ),
    )
}

# In one kernel alone: what only a run that names the implementation can find.
KERNEL_FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "g_rounded_in_kernel",
            "g rounded to bf16 in the Mosaic, or the Triton, compose alone",
            ("operator",),
            {
                "jax": (
                    Point(
                        "jax_dora.ops.mosaic.compose", "compose", _rounded_argument(_rounded_jax, 2)
                    ),
                ),
                "torch": tuple(
                    Point(
                        "torch_dora.ops.triton.compose_forward",
                        name,
                        _rounded_argument(_rounded_torch, 2),
                    )
                    for name in ("compose", "compose_with_inner")
                ),
            },
        ),
    )
}
