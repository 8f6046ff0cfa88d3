"""Errors to plant in either package, so that parity can be shown to fail.

Each fault is a typical mistake in a DoRA implementation that still trains. A fault replaces
functions of a package, in every module that has bound them, while its context is active:

    with FAULTS["norm_attached"].plant("torch"):
        ...

It affects all implementations of the operators, and the layers that call them.
"""

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

Level = Literal["operator", "layer", "model", "training"]
PACKAGES: dict[Backend, str] = {"jax": "jax_dora", "torch": "torch_dora"}

MISPLACED_EPS = 1e-6


@dataclass(frozen=True)
class Fault:
    """One error that can be planted in either package.

    Attributes:
      description: what is computed instead.
      caught_by: the levels of parity that must catch it.
      points: the replaced functions; full name → wrapper that makes the function faulty.
      in_kernel: the fault is in one kernel only. Only the level that names implementations can
        catch it; the other levels run without kernels.
    """

    name: str
    description: str
    caught_by: tuple[Level, ...]
    points: Mapping[str, Callable[[Callable], Callable]]
    in_kernel: bool = False

    @contextlib.contextmanager
    def plant(self, backend: Backend) -> Iterator[None]:
        """Plants the fault in `backend`'s package while the context is active.

        Compiled JAX programs are dropped on entry and on exit, since they would keep running
        without the fault, or with it. Programs that the caller has compiled ahead of time are not
        affected.

        Raises:
          ValueError: none of the points is a function of that package.
        """
        package, replaced = PACKAGES[backend], []
        for point, make_faulty in self.points.items():
            module, _, name = point.rpartition(".")
            if module.startswith(f"{package}."):
                original = getattr(importlib.import_module(module), name)
                replaced.append((original, make_faulty(original)))
        if not replaced:
            raise ValueError(
                f"fault {self.name!r} has the points {sorted(self.points)}; expected a function of "
                f"{package} among them, to plant it there"
            )
        try:
            for original, faulty in replaced:
                _rebind(package, original, faulty)
            jax.clear_caches()
            yield
        finally:
            # Modules that were imported while the fault was planted have bound the faulty function.
            for original, faulty in replaced:
                _rebind(package, faulty, original)
            jax.clear_caches()


def _rebind(package: str, old: Callable, new: Callable) -> None:
    """Replaces a function in every loaded module of the package, under every name."""
    for path, module in list(sys.modules.items()):
        if path == package or path.startswith(f"{package}."):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def _is_jax(array: Any) -> bool:
    return isinstance(array, jax.Array)


def _rounded(g: Any) -> Any:
    if _is_jax(g):
        # XLA may remove a cast to bf16 and back.
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


def _change_norm(change: Callable) -> Callable[[Callable], Callable]:
    """Makes a norm function faulty: the result is `change(norm, weight, lora_a, lora_b, scale)` of
    the correct norm, with the matrices in fp32."""

    def make_faulty(factored_norm: Callable) -> Callable:
        def faulty(kernel: Any, lora_a: Any, lora_b: Any, scale: float, **options: Any) -> Any:
            norm = factored_norm(kernel, lora_a, lora_b, scale, **options)
            return change(norm, *_fp32(kernel, lora_a, lora_b), scale)

        return faulty

    return make_faulty


@_change_norm
def _eps_in_the_root(norm: Any, w: Any, a: Any, b: Any, scale: float) -> Any:
    return (norm**2 + MISPLACED_EPS) ** 0.5


@_change_norm
def _without_cross(norm: Any, w: Any, a: Any, b: Any, scale: float) -> Any:
    if _is_jax(w):
        with jax.default_matmul_precision("highest"):
            w, a, b = (jax.lax.stop_gradient(value) for value in (w, a, b))
            cross = jnp.sum(b * (a.T @ w), axis=0)
        return jnp.sqrt(jnp.maximum(norm**2 - 2 * scale * cross, 0))
    cross = (b * (w @ a.T)).sum(1).detach()
    return (norm**2 - 2 * scale * cross).clamp(min=0).sqrt()


@_change_norm
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
# The functions that compute g, for operators and for layers.
G = ("jax_dora.ops.norm.ratio", "torch_dora.ops.norm.magnitude_scale")

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "eps_misplaced",
            "‖W + sBA‖ with eps under the root, sqrt(‖·‖² + 1e-6), instead of max(‖·‖, eps): a "
            "zero row's norm becomes 1e-3",
            ("operator", "layer"),
            dict.fromkeys(NORM, _eps_in_the_root),
        ),
        Fault(
            "g_rounded",
            "g rounded to bf16 before 1 is subtracted",
            ("operator", "layer", "model"),
            {
                **dict.fromkeys(G, _round_result),
                "jax_dora.ops.compose.forward": _round_argument(3),
                "torch_dora.ops.compose.forward": _round_argument(2),
            },
        ),
        Fault(
            "cross_term_dropped",
            "the factored norm without 2s·Σ B∘(WAᵀ)",
            ("operator", "layer", "model", "training"),
            dict.fromkeys(NORM, _without_cross),
        ),
        Fault(
            "norm_attached",
            "a gradient flows through the norm",
            ("layer", "model", "training"),
            {**dict.fromkeys(NORM, _attached_norm), **dict.fromkeys(G, _attached_g)},
        ),
        Fault(
            "g_rounded_in_kernel",
            "g rounded to bf16 in the Mosaic or Triton kernel of compose only",
            ("operator",),
            {
                "jax_dora.ops.mosaic.rows.compose_forward.launch": _round_argument(2),
                "torch_dora.ops.triton.compose_forward.compose": _round_argument(2),
            },
            in_kernel=True,
        ),
    )
}
