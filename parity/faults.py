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
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch

from parity.oracle import EPS, dtype_name
from parity.sides import Backend

Level = Literal["operator", "layer", "encoder", "model", "training"]
PACKAGES: dict[Backend, str] = {"jax": "jax_dora", "torch": "torch_dora"}

MISPLACED_EPS = 1e-6


@dataclass(frozen=True)
class Fault:
    """One error, plantable in either package.

    Attributes:
      description: what is computed instead.
      caught_by: the levels of parity that must notice it.
      points: by the full name of a function that is replaced, what makes a wrong one of it.
      in_kernel: in one kernel alone, which only a run that names the implementation can find: the
        levels above the kernels' run without it.
    """

    name: str
    description: str
    caught_by: tuple[Level, ...]
    points: Mapping[str, Callable[[Callable], Callable]]
    in_kernel: bool = False

    @contextlib.contextmanager
    def plant(self, backend: Backend) -> Iterator[None]:
        """Plants the fault, while the context lasts, in `backend`'s package alone.

        Compiled JAX programs are forgotten on entry and on exit: they would run on without the
        fault, or with it. A program that the caller compiled ahead of time is not reached.

        Raises:
          ValueError: none of the points is a function of that package.
        """
        package, spoilt = PACKAGES[backend], []
        for point, spoil in self.points.items():
            module, _, name = point.rpartition(".")
            if module.startswith(f"{package}."):
                original = getattr(importlib.import_module(module), name)
                spoilt.append((original, spoil(original)))
        if not spoilt:
            raise ValueError(
                f"fault {self.name!r} has the points {sorted(self.points)}; expected a function of "
                f"{package} among them, to plant it there"
            )
        try:
            for original, wrong in spoilt:
                _rebind(package, original, wrong)
            jax.clear_caches()
            yield
        finally:
            # Modules that were imported meanwhile have bound the wrong one.
            for original, wrong in spoilt:
                _rebind(package, wrong, original)
            jax.clear_caches()


def _rebind(package: str, old: Callable, new: Callable) -> None:
    """Replaces a function under every name that a loaded module of the package knows it by."""
    for path, module in list(sys.modules.items()):
        if path == package or path.startswith(f"{package}."):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def _is_jax(array: Any) -> bool:
    return isinstance(array, jax.Array)


def _rounded(g: Any) -> Any:
    if _is_jax(g):
        # A cast there and back XLA may drop.
        return jax.lax.reduce_precision(g, exponent_bits=8, mantissa_bits=7)
    return None if g is None else g.bfloat16().to(g.dtype)


def _round_result(function: Callable) -> Callable:
    return lambda *arguments, **options: _rounded(function(*arguments, **options))


def _round_argument(at: int) -> Callable[[Callable], Callable]:
    return lambda function: (
        lambda *given, **options: function(
            *given[:at], _rounded(given[at]), *given[at + 1 :], **options
        )
    )


def _fp32(*arrays: Any) -> list[Any]:
    return [a.astype(jnp.float32) if _is_jax(a) else a.float() for a in arrays]


def _of_norm(change: Callable) -> Callable[[Callable], Callable]:
    """Returns a function that spoils a norm: by `change` of the right one, the operands in fp32 and
    the scale."""

    def spoil(factored_norm: Callable) -> Callable:
        def spoilt(kernel: Any, lora_a: Any, lora_b: Any, scale: float, **options: Any) -> Any:
            norm = factored_norm(kernel, lora_a, lora_b, scale, **options)
            return change(norm, *_fp32(kernel, lora_a, lora_b), scale)

        return spoilt

    return spoil


@_of_norm
def _eps_in_the_root(norm: Any, w: Any, a: Any, b: Any, scale: float) -> Any:
    return (norm**2 + MISPLACED_EPS) ** 0.5


@_of_norm
def _without_cross(norm: Any, w: Any, a: Any, b: Any, scale: float) -> Any:
    if _is_jax(w):
        with jax.default_matmul_precision("highest"):
            w, a, b = (jax.lax.stop_gradient(value) for value in (w, a, b))
            cross = jnp.sum(b * (a.T @ w), axis=0)
        return jnp.sqrt(jnp.maximum(norm**2 - 2 * scale * cross, 0))
    cross = (b * (w @ a.T)).sum(1).detach()
    return (norm**2 - 2 * scale * cross).clamp(min=0).sqrt()


@_of_norm
def _attached_norm(norm: Any, w: Any, a: Any, b: Any, scale: float) -> Any:
    if _is_jax(w):
        dense = jnp.linalg.norm(w + scale * (a @ b), axis=0)
        return norm + dense - jax.lax.stop_gradient(dense)
    dense = torch.linalg.vector_norm(w + scale * (b @ a), dim=1)
    return norm + dense - dense.detach()


def _attached_g(_: Callable) -> Callable:
    return lambda magnitude, norm, dtype: (
        _fp32(magnitude)[0] / norm.clip(min=EPS[dtype_name(dtype)])
    )


NORM = ("jax_dora.ops.norm.factored_norm", "torch_dora.ops.norm.factored_norm")
# Of operators and of layers.
G = ("jax_dora.ops.norm.ratio", "torch_dora.ops.norm.magnitude_scale")

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "eps_misplaced",
            "‖W + sBA‖ with eps under the root, sqrt(‖·‖² + 1e-6), in place of max(‖·‖, eps): a "
            "zero row's norm becomes 1e-3",
            ("operator", "layer"),
            dict.fromkeys(NORM, _eps_in_the_root),
        ),
        Fault(
            "g_rounded",
            "g rounded to bf16 before 1 is taken from it",
            ("operator", "layer", "encoder", "model"),
            {
                **dict.fromkeys(G, _round_result),
                "jax_dora.ops.compose.forward": _round_argument(3),
                "torch_dora.ops.compose.forward": _round_argument(2),
            },
        ),
        Fault(
            "cross_term_dropped",
            "the factored norm without 2s·Σ B∘(WAᵀ)",
            ("operator", "layer", "encoder", "model", "training"),
            dict.fromkeys(NORM, _without_cross),
        ),
        Fault(
            "norm_attached",
            "a gradient flows through the norm",
            ("layer", "encoder", "model", "training"),
            {**dict.fromkeys(NORM, _attached_norm), **dict.fromkeys(G, _attached_g)},
        ),
        Fault(
            "g_rounded_in_kernel",
            "g rounded to bf16 in the Mosaic, or the Triton, compose alone",
            ("operator",),
            {
                "jax_dora.ops.mosaic.compose.launch": _round_argument(2),
                "torch_dora.ops.triton.compose_forward.compose": _round_argument(2),
            },
            in_kernel=True,
        ),
    )
}
