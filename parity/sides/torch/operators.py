"""torch_dora, and the same computations in plain torch, in fp32 without TF32."""

from __future__ import annotations

import functools

import torch

from parity import oracle
from parity.cases import ComposeInputs, LayerInputs
from parity.sides import composes
from torch_dora import ops

Tensors = dict[str, torch.Tensor]


def norm(inputs: LayerInputs, scale: float, implementation: str) -> torch.Tensor:
    adapter = (inputs.weight, inputs.lora_a, inputs.lora_b)
    if implementation == "plain":
        return _plain_norm(*adapter, scale)
    return ops.factored_norm(*adapter, scale, implementation=implementation)


def magnitude_scale(
    magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str, implementation: str
) -> torch.Tensor:
    if implementation == "plain":
        return magnitude.float() / row_norm.clamp(min=oracle.EPS[dtype])
    return ops.magnitude_scale(magnitude, row_norm, getattr(torch, dtype))


def compose(inputs: ComposeInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    operators = composes(ops, _plain_compose, scale, implementation)
    wanted = {"base": inputs.base, "lora": inputs.lora} | ({} if frozen else {"g": inputs.g})
    results = {}
    for operator, op in operators.items():
        leaves = {name: value.clone().requires_grad_() for name, value in wanted.items()}
        y = op(**({"g": inputs.g} | leaves))
        for name, value in _with_gradients(y, leaves, inputs.dy).items():
            results[f"{operator} {name}"] = value
    return results


def naive_delta(inputs: ComposeInputs, scale: float) -> torch.Tensor:
    """Returns `g(s·lora + base) - base` in its operands' dtype: what cancels near g = 1."""
    g = inputs.g.to(inputs.base.dtype)
    return g * (scale * inputs.lora + inputs.base) - inputs.base


def layer(inputs: LayerInputs, scale: float, implementation: str, *, frozen: bool) -> Tensors:
    weight = inputs.weight

    def ours(x, lora_a, lora_b, magnitude, bias):
        return ops.dora_linear(
            x, weight, lora_a, lora_b, magnitude, scale, bias=bias, implementation=implementation
        )

    plain = functools.partial(plain_linear, weight=weight, scale=scale)
    names = ["x", "lora_a", "lora_b"] + ["magnitude"] * (not frozen)
    names += ["bias"] * (inputs.bias is not None)
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    op = plain if implementation == "plain" else ours
    y = op(**({"magnitude": inputs.magnitude, "bias": inputs.bias} | leaves))
    return _with_gradients(y, leaves, inputs.dy)


def plain_linear(x, lora_a, lora_b, magnitude, bias, weight, scale):
    """Returns y in plain torch: the norm of `W + sBA` and the composition in fp32, activations'
    products in their dtype."""
    with torch.no_grad():
        row_norm = _plain_norm(weight, lora_a, lora_b, scale)
    g = magnitude_scale(magnitude, row_norm, oracle.dtype_name(x.dtype), "plain")
    lora = (x @ lora_a.to(x.dtype).T) @ lora_b.to(x.dtype).T
    return _plain_compose(x @ weight.T, lora, g, scale, False, bias)


def _plain_norm(weight, lora_a, lora_b, scale):
    weight, lora_a, lora_b = (tensor.float() for tensor in (weight, lora_a, lora_b))
    return torch.linalg.vector_norm(weight + scale * (lora_b @ lora_a), dim=1)


def _plain_compose(base, lora, g, scale, delta, bias=None):
    wide = base.float()
    y = (g - 1) * wide + g * (scale * lora.float())
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + bias.float()
    return y.to(base.dtype)


def _with_gradients(y: torch.Tensor, leaves: Tensors, dy: torch.Tensor) -> Tensors:
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | {
        f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }
