"""The layer in torch: the base, PEFT's LoRA and DoRA, and `torch_dora.ops.dora_linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arrays import rotate
from benchmarks.problem import Method, Problem
from benchmarks.work import Variant
from parity.sides.torch import peft_layer
from torch_dora import ops

Apply = Callable[[Tensor], Tensor]


def by_peft(problem: Problem, *, dora: bool, wide: bool) -> tuple[Any, list[nn.Parameter]]:
    """Returns PEFT's layer with the problem's values, and its trained parameters."""
    inputs, rank = problem.inputs, problem.case.rank
    alpha = round(problem.scale * rank**0.5)
    options = {"use_dora": dora, "use_rslora": True, "wide": wide}
    layer, parameters = peft_layer.adapt_linear(
        peft_layer.frozen_linear(inputs.weight), rank, alpha, **options
    )
    dtype = torch.float32 if wide else inputs.weight.dtype
    for name, parameter in parameters.items():
        parameter.data = getattr(inputs, name).to(dtype, copy=True)
    return layer, list(parameters.values())


def variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    """Yields the variants, those of `every` included or not."""
    i, s = problem.inputs, problem.scale
    inputs = [(x.clone().requires_grad_(backward), dy) for x, dy in rotate([i.x, i.dy])]
    adapter = [t.clone().requires_grad_(backward) for t in (i.lora_a, i.lora_b, i.magnitude)]
    a, b, m = adapter
    norm = ops.factored_norm(i.weight, i.lora_a, i.lora_b, s)

    def ours(x: Tensor) -> Tensor:
        return ops.dora_linear(x, i.weight, a, b, m, s)

    def kept(x: Tensor) -> Tensor:
        return ops.dora_linear(x, i.weight, a, b, m, s, norm=norm)

    def variant(name: str, method: Method, apply: Apply, parameters: Sequence[Tensor]) -> Variant:
        exact, asked = apply in (ours, kept), problem.asked(method, backward, apply is kept)
        step = _step(apply, parameters, backward)
        return Variant("torch", name, step, inputs, exact=exact, **asked)

    wide_dora, wide_parameters = by_peft(problem, dora=True, wide=True)

    def defaults(x: Tensor) -> Tensor:
        with torch.autocast(problem.device, dtype=torch.bfloat16):
            return wide_dora(x)

    yield variant("PEFT DoRA, defaults", "DoRA", defaults, wide_parameters)
    yield variant("torch_dora", "DoRA", ours, adapter)
    yield variant("torch_dora, norm kept", "DoRA", kept, adapter)
    peft_lora, lora_parameters = by_peft(problem, dora=False, wide=False)
    yield variant("PEFT LoRA, bf16", "LoRA", peft_lora, lora_parameters)
    if every and problem.device == "cuda":
        peft_dora, parameters = by_peft(problem, dora=True, wide=False)
        compiled = torch.compile(peft_dora)
        yield variant("PEFT DoRA, bf16, compiled", "DoRA", compiled, parameters)


def _step(apply: Apply, parameters: Sequence[Tensor], backward: bool) -> Callable:
    def forward(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"y": apply(x)}

    names = ("d_x", "d_lora_a", "d_lora_b", "d_magnitude")

    def forward_backward(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        y = apply(x)
        gradients = torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))
        return {"y": y.detach()} | dict(zip(names, gradients, strict=False))

    return forward_backward if backward else forward
