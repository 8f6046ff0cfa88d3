"""jax_dora, and the same computations in plain jnp, called with torch tensors in torch's layout.

Tensors cross by DLPack, without a copy on a GPU. Matrix products of fp32 operands are asked for in
fp32: XLA's default on an NVIDIA GPU is TF32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora import ops
from parity import oracle
from parity.cases import ComposeInputs, LayerInputs
from parity.quantised import is_quantised, parts
from parity.sides import composes

Tensors = dict[str, torch.Tensor]


def norm(inputs: LayerInputs, scale: float, implementation: str) -> torch.Tensor:
    op = functools.partial(ops.factored_norm, implementation=implementation)
    run = jax.jit(_plain_norm if implementation == "plain" else op)
    with jax.default_matmul_precision("highest"), _interpreted(implementation, inputs.weight):
        return to_torch(run(*_adapter(inputs), scale))


def magnitude_scale(
    magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str, implementation: str
) -> torch.Tensor:
    op = _plain_magnitude_scale if implementation == "plain" else ops.magnitude_scale
    return to_torch(op(to_jax(magnitude), to_jax(row_norm), jnp.dtype(dtype)))


def compose(inputs: ComposeInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    operators = composes(ops, _plain_compose, scale, implementation)
    with _interpreted(implementation, inputs.base):
        return _compose(operators, inputs, frozen)


def layer(inputs: LayerInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    def ours(x, lora_a, lora_b, magnitude, bias, kernel):
        return ops.dora_linear(
            x, kernel, lora_a, lora_b, magnitude, scale, bias=bias, implementation=implementation
        )

    plain = functools.partial(plain_linear, scale=scale)
    with jax.default_matmul_precision("highest"), _interpreted(implementation, inputs.x):
        return _layer(plain if implementation == "plain" else ours, inputs, frozen)


def plain_linear(x, lora_a, lora_b, magnitude, bias, kernel, scale):
    """Returns y in plain jnp: the norm of `W + sBA` and the composition in fp32, activations'
    products in their dtype."""
    dtype = x.dtype
    row_norm = jax.lax.stop_gradient(_plain_norm(kernel, lora_a, lora_b, scale))
    g = _plain_magnitude_scale(magnitude, row_norm, dtype)
    lora = (x @ lora_a.astype(dtype)) @ lora_b.astype(dtype)
    return _plain_compose(x @ kernel, lora, g, scale, False, bias)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(array))


def _adapter(inputs: LayerInputs) -> tuple[Any, jax.Array, jax.Array]:
    adapter = to_jax(inputs.lora_a.T), to_jax(inputs.lora_b.T)
    if is_quantised(inputs.weight):
        return _quantised_kernel(inputs.weight), *adapter
    return to_jax(inputs.weight.T), *adapter


def _quantised_kernel(weight: Any) -> Any:
    """Returns torchao's quantised weight as the `qwix.QArray` [in, out] of its codes and scales."""
    import qwix  # which nothing else here needs

    found = parts(weight)
    dtype = jnp.dtype({"nf4": "uint4"}.get(found.qtype, found.qtype))
    codes = found.codes if found.qtype != "float8_e4m3fn" else found.codes.view(dtype)
    qtype = "nf4" if found.qtype == "nf4" else dtype
    return qwix.QArray(jnp.asarray(codes.T).astype(dtype), jnp.asarray(found.scale.T), None, qtype)


def _plain_norm(kernel, lora_a, lora_b, scale):
    kernel, lora_a, lora_b = (a.astype(jnp.float32) for a in (kernel, lora_a, lora_b))
    return jnp.linalg.norm(kernel + scale * (lora_a @ lora_b), axis=0)


def _plain_magnitude_scale(magnitude, row_norm, dtype):
    return magnitude.astype(jnp.float32) / jnp.maximum(row_norm, oracle.EPS[dtype.name])


def _plain_compose(base, lora, g, scale, delta, bias=None):
    wide = base.astype(jnp.float32)
    g = g.reshape((1,) * (wide.ndim - 1) + (-1,))
    y = (g - 1) * wide + g * (scale * lora.astype(jnp.float32))
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape(g.shape)
    return y.astype(base.dtype)


def _compose(operators: dict[str, Callable], inputs: ComposeInputs, frozen: bool) -> Tensors:
    """Computes all operators in one program: compiling is what takes the time."""
    operands = [to_jax(inputs.base), to_jax(inputs.lora), to_jax(inputs.g)]
    names = ("d_base", "d_lora") if frozen else ("d_base", "d_lora", "d_g")

    @jax.jit
    def run(operands, dy):
        wanted, constant = operands[: len(names)], operands[len(names) :]
        results = {}
        for operator, op in operators.items():
            y, pull = jax.vjp(lambda *some, op=op: op(*some, *constant), *wanted)
            results[f"{operator} y"] = y
            for name, cotangent in zip(names, pull(dy), strict=True):
                results[f"{operator} {name}"] = cotangent
        return results

    results = run(operands, to_jax(inputs.dy))
    return {name: to_torch(value) for name, value in results.items()}


def _layer(op: Callable, inputs: LayerInputs, frozen: bool) -> Tensors:
    kernel, lora_a, lora_b = _adapter(inputs)
    arguments = {
        "x": to_jax(inputs.x),
        "lora_a": lora_a,
        "lora_b": lora_b,
        "magnitude": to_jax(inputs.magnitude),
        "bias": None if inputs.bias is None else to_jax(inputs.bias),
    }

    @jax.jit
    def run(kernel, arguments, dy):
        wanted = {
            name: value
            for name, value in arguments.items()
            if value is not None and not (frozen and name == "magnitude")
        }
        y, pull = jax.vjp(lambda some: op(**(arguments | some), kernel=kernel), wanted)
        return y, pull(dy)[0]

    y, cotangents = run(kernel, arguments, to_jax(inputs.dy))
    results = {"y": y} | {f"d_{name}": ct for name, ct in cotangents.items()}
    return {
        name: to_torch(value).T if name in ("d_lora_a", "d_lora_b") else to_torch(value)
        for name, value in results.items()
    }


def _interpreted(implementation: str, tensor: torch.Tensor):
    kernel = implementation == "mosaic" and not tensor.is_cuda
    return interpreted() if kernel else contextlib.nullcontext()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs Mosaic kernels on a CPU while it lasts, in Pallas' GPU interpreter; a data race is a
    RuntimeError."""
    options: dict = {"detect_races": True}
    if "on_race" in (f.name for f in dataclasses.fields(plgpu.InterpretGPUParams)):
        options["on_race"] = "raise"
    # Before jax 0.12 the interpreter can only print what it found.
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**options)),
    ):
        yield
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())
