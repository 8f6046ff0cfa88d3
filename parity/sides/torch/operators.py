"""torch_dora, and the same computations in plain torch, in fp32 without TF32."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from parity import oracle
from parity.cases import ComposeInputs, LayerInputs
from parity.sides import Computation, Implementation, choose_operator
from torch_dora import ops

Tensors = dict[str, torch.Tensor]


def norm(inputs: LayerInputs, scale: float, implementation: Implementation) -> Computation:
    op = choose_operator(ops.factored_norm, _plain_norm, implementation)
    return functools.partial(op, inputs.weight, inputs.lora_a, inputs.lora_b, scale)


def magnitude_scale(
    magnitude: torch.Tensor, row_norm: torch.Tensor, dtype: str, implementation: Implementation
) -> torch.Tensor:
    if implementation == "plain":
        return magnitude.float() / row_norm.clamp(min=oracle.EPS[dtype])
    return ops.magnitude_scale(magnitude, row_norm, getattr(torch, dtype))


def compose(
    inputs: ComposeInputs, scale: float, implementation: Implementation, *, frozen: bool
) -> Computation:
    plain_delta = functools.partial(_plain_compose, delta=True)
    operators = {
        "compose ": choose_operator(ops.compose, _plain_compose, implementation, scale=scale),
        "compose_delta ": choose_operator(
            ops.compose_delta, plain_delta, implementation, scale=scale
        ),
    }
    operands = {name: getattr(inputs, name) for name in ("base", "lora", "g")}
    wanted = [name for name in operands if not (frozen and name == "g")]
    return functools.partial(_with_gradients, operators, wanted, operands, inputs.dy)


def naive_delta(inputs: ComposeInputs, scale: float) -> torch.Tensor:
    """Returns `g(s·lora + base) - base` in the operands' dtype, which cancels near g = 1."""
    g = inputs.g.to(inputs.base.dtype)
    return g * (scale * inputs.lora + inputs.base) - inputs.base


def layer(
    inputs: LayerInputs,
    scale: float,
    implementation: Implementation,
    *,
    frozen: bool,
    **options: Any,
) -> Computation:
    op = choose_operator(ops.dora_linear, plain_linear, implementation, scale=scale, **options)
    operands = {name: value for name, value in vars(inputs).items() if value is not None}
    dy = operands.pop("dy")
    constant = {"weight", "magnitude"} if frozen else {"weight"}
    wanted = [name for name in operands if name not in constant]
    return functools.partial(_with_gradients, {"": op}, wanted, operands, dy)


@torch.no_grad()
def _apply(op: Callable, operands: Tensors) -> torch.Tensor:
    return op(**operands)


def apply(inputs: LayerInputs, scale: float, implementation: Implementation) -> Computation:
    op = choose_operator(ops.dora_linear, plain_linear, implementation, scale=scale)
    operands = {name: value for name, value in vars(inputs).items() if value is not None}
    del operands["dy"]
    return functools.partial(_apply, op, operands)


def plain_linear(x, weight, lora_a, lora_b, magnitude, scale, bias=None):
    """Returns y in plain torch: the norm of `W + sBA` and the composition in fp32, products with
    activations in the activations' dtype."""
    with torch.no_grad():
        row_norm = _plain_norm(weight, lora_a, lora_b, scale)
    g = magnitude_scale(magnitude, row_norm, oracle.dtype_name(x.dtype), "plain")
    lora = (x @ lora_a.to(x.dtype).T) @ lora_b.to(x.dtype).T
    return _plain_compose(x @ weight.T, lora, g, scale, bias=bias)


def _plain_norm(weight, lora_a, lora_b, scale):
    weight, lora_a, lora_b = (tensor.float() for tensor in (weight, lora_a, lora_b))
    return torch.linalg.vector_norm(weight + scale * (lora_b @ lora_a), dim=1)


def _plain_compose(base, lora, g, scale, delta=False, bias=None):
    wide = base.float()
    y = (g - 1) * wide + g * (scale * lora.float())
    if not delta:
        y = wide + y
    if bias is not None:
        y = y + bias.float()
    return y.to(base.dtype)


def _with_gradients(
    operators: dict[str, Callable], wanted: list[str], operands: Tensors, dy: torch.Tensor
) -> Tensors:
    """Returns the result of each operator, and its cotangents for the operands in `wanted`."""
    results: Tensors = {}
    for operator, op in operators.items():
        leaves = {name: operands[name].clone().requires_grad_() for name in wanted}
        y = op(**(operands | leaves))
        results[f"{operator}y"] = y.detach()
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        results |= {f"{operator}d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return results
