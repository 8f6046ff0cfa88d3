"""torch_dora, and the same computations in plain torch, in fp32 without TF32."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from parity import oracle
from parity.cases import ComposeInputs, LayerInputs
from torch_dora import ops

NAME = "torch"
Tensors = dict[str, torch.Tensor]


def implementation(kernels: bool) -> str:
    return "triton" if kernels else "eager"


def norm(inputs: LayerInputs, scale: float, implementation: str) -> torch.Tensor:
    return ops.factored_norm(
        inputs.weight, inputs.lora_a, inputs.lora_b, scale, implementation=implementation
    )


def plain_norm(inputs: LayerInputs, scale: float) -> torch.Tensor:
    weight, lora_a, lora_b = (t.float() for t in (inputs.weight, inputs.lora_a, inputs.lora_b))
    return torch.linalg.vector_norm(weight + scale * (lora_b @ lora_a), dim=1)


def magnitude_scale(magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str) -> torch.Tensor:
    return ops.magnitude_scale(magnitude, row_norm, getattr(torch, dtype))


def plain_magnitude_scale(
    magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str
) -> torch.Tensor:
    return magnitude.float() / row_norm.clamp(min=oracle.EPS[dtype])


def compose(inputs: ComposeInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    options = {"scale": scale, "implementation": implementation}
    return _compose(
        {
            "compose": functools.partial(ops.compose, **options),
            "compose_delta": functools.partial(ops.compose_delta, **options),
        },
        inputs,
        frozen,
    )


def plain_compose(inputs: ComposeInputs, scale: float, *, frozen: bool) -> Tensors:
    return _compose(
        {
            "compose": functools.partial(_plain_compose, scale=scale, delta=False),
            "compose_delta": functools.partial(_plain_compose, scale=scale, delta=True),
        },
        inputs,
        frozen,
    )


def naive_delta(inputs: ComposeInputs, scale: float) -> torch.Tensor:
    """`g(s·lora + base) - base` in the dtype of its operands: what cancels near g = 1."""
    g = inputs.g.to(inputs.base.dtype)
    return g * (scale * inputs.lora + inputs.base) - inputs.base


def layer(inputs: LayerInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    def run(x, lora_a, lora_b, magnitude, bias):
        return ops.dora_linear(
            x,
            inputs.weight,
            lora_a,
            lora_b,
            magnitude,
            scale,
            bias=bias,
            implementation=implementation,
        )

    return _layer(run, inputs, frozen)


def plain_layer(inputs: LayerInputs, scale: float, *, frozen: bool) -> Tensors:
    row_norm = plain_norm(inputs, scale)

    def run(x, lora_a, lora_b, magnitude, bias):
        g = plain_magnitude_scale(magnitude, row_norm, oracle.dtype_name(x.dtype))
        base = x @ inputs.weight.T
        lora = (x @ lora_a.to(x.dtype).T) @ lora_b.to(x.dtype).T
        return _plain_compose(base, lora, g, scale, False, bias)

    return _layer(run, inputs, frozen)


def _plain_compose(base, lora, g, scale, delta, bias=None):
    wide = base.float()
    y = (g - 1) * wide + g * (scale * lora.float())
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + bias.float()
    return y.to(base.dtype)


def _compose(operators: dict[str, Callable], inputs: ComposeInputs, frozen: bool) -> Tensors:
    wanted = {"base": inputs.base, "lora": inputs.lora}
    if not frozen:
        wanted["g"] = inputs.g
    results = {}
    for operator, op in operators.items():
        leaves = {name: value.clone().requires_grad_() for name, value in wanted.items()}
        y = op(**({"g": inputs.g} | leaves))
        for name, value in _with_gradients(y, leaves, inputs.dy).items():
            results[f"{operator} {name}"] = value
    return results


def _layer(op: Callable, inputs: LayerInputs, frozen: bool) -> Tensors:
    names = ["x", "lora_a", "lora_b"] + ["magnitude"] * (not frozen)
    names += ["bias"] * (inputs.bias is not None)
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    y = op(**({"magnitude": inputs.magnitude, "bias": inputs.bias} | leaves))
    return _with_gradients(y, leaves, inputs.dy)


def _with_gradients(y: torch.Tensor, leaves: Tensors, dy: torch.Tensor) -> Tensors:
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | {
        f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }
