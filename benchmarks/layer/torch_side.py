"""The layer in torch: the base, PEFT's LoRA and DoRA, and `torch_dora.ops.dora_linear`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from torch import Tensor, nn

from benchmarks.layer.problem import Method, Problem
from benchmarks.ops.inputs import rotate
from benchmarks.work import Variant
from torch_dora import ops

Apply = Callable[[Tensor], Tensor]


class _Holder(nn.Module):
    """What PEFT wants around a projection."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.proj.weight = nn.Parameter(weight, requires_grad=False)


def peft_layer(problem: Problem, *, dora: bool, wide: bool) -> tuple[nn.Module, list[nn.Parameter]]:
    """PEFT's layer with the problem's values, and [lora_a, lora_b, magnitude]. `wide`: adapters in
    fp32, PEFT's default, else in the weight's dtype."""
    i = problem.inputs
    config = LoraConfig(
        r=problem.rank,
        lora_alpha=round(problem.scale * problem.rank**0.5),
        use_rslora=True,
        use_dora=dora,
        target_modules=["proj"],
    )
    holder = _Holder(i.weight)
    get_peft_model(holder, config, autocast_adapter_dtype=wide)
    layer: Any = holder.proj
    dtype = torch.float32 if wide else i.weight.dtype
    parameters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    values = [i.lora_a, i.lora_b]
    if dora:
        parameters.append(layer.lora_magnitude_vector["default"].weight)
        values.append(i.magnitude)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.to(dtype, copy=True)
    return layer, parameters


def variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    i, s = problem.inputs, problem.scale
    cuda = problem.device == "cuda"
    inputs = [(x.clone().requires_grad_(backward), dy) for x, dy in rotate([i.x, i.dy])]
    adapter = [i.lora_a, i.lora_b, i.magnitude]
    adapter = [t.clone().requires_grad_(backward) for t in adapter]
    norm = ops.factored_norm(i.weight, i.lora_a, i.lora_b, s)

    def ours(**given: Any) -> Apply:
        a, b, m = adapter
        return lambda x: ops.dora_linear(x, i.weight, a, b, m, s, **given)

    def variant(
        name: str,
        method: Method,
        apply: Apply,
        parameters: Sequence[Tensor],
        *,
        exact: bool = False,
        cached: bool = False,
        norm_done: bool = False,
        unless: str | None = None,
    ) -> Variant:
        return Variant(
            "torch",
            name,
            _step(apply, parameters, backward),
            inputs,
            lambda found: found,
            exact=exact,
            unless=unless,
            flops=problem.flops(method, backward, method == "DoRA" and not norm_done),
            expected=problem.expected(method, backward),
            cached=cached,
        )

    wide_dora, wide_parameters = peft_layer(problem, dora=True, wide=True)

    def defaults(x: Tensor) -> Tensor:
        with torch.autocast(problem.device, dtype=torch.bfloat16):
            return wide_dora(x)

    yield variant("PEFT DoRA, defaults", "DoRA", defaults, wide_parameters)
    yield variant("torch_dora", "DoRA", ours(), adapter, exact=True)
    kept = ours(norm=norm)
    yield variant(
        "torch_dora, norm kept", "DoRA", kept, adapter, exact=True, cached=True, norm_done=True
    )
    peft_lora, lora_parameters = peft_layer(problem, dora=False, wide=False)
    yield variant("PEFT LoRA, bf16", "LoRA", peft_lora, lora_parameters)
    if not every:
        return

    peft_dora, parameters = peft_layer(problem, dora=True, wide=False)
    no_compiler = None if cuda else "torch.compile is measured on a GPU"
    yield variant("base", "base", lambda x: F.linear(x, i.weight), ())
    yield variant("PEFT DoRA, bf16", "DoRA", peft_dora, parameters)
    compiled = torch.compile(peft_dora) if cuda else peft_dora
    yield variant("PEFT DoRA, bf16, compiled", "DoRA", compiled, parameters, unless=no_compiler)
    compiled_lora = torch.compile(peft_lora) if cuda else peft_lora
    yield variant(
        "PEFT LoRA, bf16, compiled", "LoRA", compiled_lora, lora_parameters, unless=no_compiler
    )
    if not backward:
        caching, cached_parameters = peft_layer(problem, dora=True, wide=False)
        caching.eval()

        def with_cache(x: Tensor) -> Tensor:
            with _dora_caching():
                return caching(x)

        yield variant(
            "PEFT DoRA, bf16, its cache",
            "DoRA",
            with_cache,
            cached_parameters,
            cached=True,
            norm_done=True,
        )


@contextlib.contextmanager
def _dora_caching() -> Iterator[None]:
    with DoraCaching():
        yield


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
