"""Level `layer`: one adapted projection, forward, and forward with backward.

DoRA by jax_dora and torch_dora, compared with LoRA and with DoRA by plain XLA, and with LoRA and
DoRA by PEFT. Weight and adapters are bf16, the magnitude is fp32, and the norm is computed in every
call unless the variant says "norm kept". PEFT's "defaults" are fp32 adapters under autocast.

All variants run at the main shape, 4096 rows × 8192 × 8192 with rank 384; at other shapes and ranks
those of JAX with XLA's Triton products, and those compiled by torch, are left out. Results are
compared with fp64 on the operands of the timing. One line is one variant at one shape, with device
time (cold L2 cache) and wall time; `benchmarks.report` lists its fields.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import torch
from torch import Tensor

from benchmarks.arrays import NO_TRITON, rotate, to_jax
from benchmarks.work import BEST_LORA, Expectation, Variant, Work
from jax_dora import ops
from parity import oracle
from parity.cases import Case, LayerInputs, layer, layer_inputs
from parity.compare import prepare_layer
from parity.sides.jax.operators import to_torch, with_gradients
from parity.sides.torch import peft_layer
from torch_dora import ops as torch_ops

DTYPE = "bfloat16"
ITEM = 2  # bytes
RANK = 384
RANKS = (64, 128, 256, 512, 768)
# rows, in, out
MAIN = (4096, 8192, 8192)
OTHERS = ((4096, 4096, 4096), (4096, 4096, 14336))
QUICK = (24, 64, 48, 8)
BASELINES = {
    "jax LoRA": BEST_LORA,
    "jax LoRA (no Triton)": BEST_LORA,
    "torch PEFT DoRA, defaults": "torch PEFT DoRA, defaults",
}

Step = Callable[..., Any]
Method = Literal["LoRA", "DoRA"]
TRAINED: dict[Method, tuple[str, ...]] = {
    "LoRA": ("x", "lora_a", "lora_b"),
    "DoRA": ("x", "lora_a", "lora_b", "magnitude"),
}


@dataclass(frozen=True)
class Problem:
    """The operands of one layer: bf16 weight and adapters, fp32 magnitude, rsLoRA's scale, no bias.

    Its fp64 results are computed once, for the forward and the backward pass.
    """

    case: Case
    inputs: LayerInputs
    device: str

    @classmethod
    def draw(cls, rows: int, n_in: int, n_out: int, rank: int, device: str) -> Self:
        options = {"adapter_dtype": DTYPE, "rslora": True, "bias": False}
        case = layer(DTYPE, rows, n_in, n_out, rank, **options)
        return cls(case, layer_inputs(case, device), device)

    def bytes(self, backward: bool) -> int:
        """Returns the bytes of each operand read once and each result written once."""
        c = self.case
        forward = (c.rows + c.rank) * (c.n_in + c.n_out) + c.n_in * c.n_out
        return ITEM * (3 * forward - c.n_in * c.n_out if backward else forward)

    def flops(self, backward: bool, with_norm: bool) -> int:
        """Returns the FLOPs of the matrix products; the frozen weight has no gradient."""
        c = self.case
        base = 2 * c.rows * c.n_in * c.n_out
        adapters = 2 * c.rows * c.rank * (c.n_in + c.n_out)
        norm = 2 * c.n_in * c.n_out * c.rank if with_norm else 0
        return base * (2 if backward else 1) + adapters * (3 if backward else 1) + norm

    def fields(self, method: Method, backward: bool, norm_kept: bool = False) -> dict[str, Any]:
        """Returns the fields of a `Variant` that depend on its method."""
        flops = self.flops(backward, method == "DoRA" and not norm_kept)
        return {"flops": flops, "expected": self.expected(method, backward)}

    def expected(self, method: Method, backward: bool) -> dict[str, Expectation]:
        every = self._dora if method == "DoRA" else self._lora
        return every if backward else {"y": every["y"]}

    @functools.cached_property
    def _dora(self) -> dict[str, Expectation]:
        exact, _ = prepare_layer(self.case, self.device)
        return {name: Expectation(value.want, value.bound) for name, value in exact.items()}

    @functools.cached_property
    def _lora(self) -> dict[str, Expectation]:
        i, s = self.inputs, self.case.scale
        merged = oracle.direction(i.weight, i.lora_a, i.lora_b, s)
        x, dy = i.x.double(), i.dy.double()
        dense = dy.T @ x
        wanted = {
            "y": x @ merged.T,
            "d_x": dy @ merged,
            "d_lora_a": s * (i.lora_b.double().T @ dense),
            "d_lora_b": s * (dense @ i.lora_a.double().T),
        }
        return {name: Expectation(want) for name, want in wanted.items()}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields functions that make the pieces of work: all variants at the main shape, fewer at other
    shapes and over ranks."""
    cases = [(*MAIN, RANK), *((*o, RANK) for o in OTHERS), *((*MAIN, rank) for rank in RANKS)]
    for sizes in [QUICK] if settings.quick else cases:
        problem = functools.cache(functools.partial(Problem.draw, *sizes, device))
        every = sizes in (QUICK, cases[0])
        for backward in (False, True):
            yield functools.partial(work, problem, every, backward)


def work(make: Callable[[], Problem], every: bool, backward: bool) -> Work:
    """Returns the work of one problem, with all variants if `every`."""
    problem = make()
    c = problem.case
    variants = [*jax_variants(problem, every, backward), *torch_variants(problem, every, backward)]
    return Work(
        "layer forward+backward" if backward else "layer forward",
        {"rows": c.rows, "in": c.n_in, "out": c.n_out, "rank": c.rank},
        problem.bytes(backward),
        problem.flops(backward, with_norm=True),
        problem.expected("DoRA", backward),
        variants,
        BASELINES,
    )


def jax_variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    """Yields JAX's variants without XLA's Triton products, and, if `every`, also with them."""
    i, s = problem.inputs, problem.case.scale
    fixed = to_jax([(*(t.T.contiguous() for t in (i.weight, i.lora_a, i.lora_b)), i.magnitude)])[0]
    kept = jax.jit(ops.factored_norm)(*fixed[:3], s)
    inputs = [(*fixed, kept, x, dy) for x, dy in to_jax(rotate([i.x, i.dy]))]

    def lora(kernel, norm, *, x, lora_a, lora_b):
        return x @ kernel + s * ((x @ lora_a) @ lora_b)

    def dora(kernel, _, *, x, lora_a, lora_b, magnitude, **options):
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, s, **options)

    def norm_kept(kernel, norm, **operands):
        return dora(kernel, None, norm=norm, **operands)

    def by_xla(kernel, _, *, lora_a, lora_b, **operands):
        norm = ops.factored_norm(kernel, lora_a, lora_b, s, implementation="xla")
        options = {"norm": norm, "implementation": "xla"}
        return dora(kernel, None, lora_a=lora_a, lora_b=lora_b, **operands, **options)

    def step_of(apply: Step, trained: tuple[str, ...]) -> Step:
        def step(kernel, lora_a, lora_b, magnitude, norm, x, dy):
            operands = {"x": x, "lora_a": lora_a, "lora_b": lora_b, "magnitude": magnitude}
            operands = {name: operands[name] for name in trained}
            function = functools.partial(apply, kernel, norm)
            if not backward:
                return {"y": function(**operands)}
            return with_gradients({"": function}, trained, operands, dy)

        return step

    def results(arrays: dict[str, Any]) -> dict[str, Tensor]:
        tensors = {name: to_torch(array) for name, array in arrays.items()}
        return {n: t.T if n in ("d_lora_a", "d_lora_b") else t for n, t in tensors.items()}

    variants: list[tuple[str, Method, Step]] = [
        ("LoRA", "LoRA", lora),
        ("XLA DoRA", "DoRA", by_xla),
        ("DoRA", "DoRA", dora),
        ("DoRA, norm kept", "DoRA", norm_kept),
    ]
    for name, method, apply in variants:
        fields = problem.fields(method, backward, apply is norm_kept)
        step = step_of(apply, TRAINED[method])
        variant = Variant("jax", name, step, inputs, results, method == "DoRA", **fields)
        yield replace(variant, name=f"{name} (no Triton)", compiler_options=NO_TRITON)
        if every:
            yield variant


def torch_variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    """Yields torch's variants; PEFT's compiled DoRA only if `every`."""
    i, s, rank = problem.inputs, problem.case.scale, problem.case.rank
    inputs = [(x.clone().requires_grad_(backward), dy) for x, dy in rotate([i.x, i.dy])]
    adapter = [t.clone().requires_grad_(backward) for t in (i.lora_a, i.lora_b, i.magnitude)]
    a, b, m = adapter
    norm = torch_ops.factored_norm(i.weight, i.lora_a, i.lora_b, s)

    def ours(x: Tensor) -> Tensor:
        return torch_ops.dora_linear(x, i.weight, a, b, m, s)

    def kept(x: Tensor) -> Tensor:
        return torch_ops.dora_linear(x, i.weight, a, b, m, s, norm=norm)

    def peft(*, dora: bool, wide: bool) -> tuple[Any, list[Tensor]]:
        """Returns PEFT's layer with the problem's values, and its trained parameters."""
        options = {"use_dora": dora, "use_rslora": True, "wide": wide}
        base, alpha = peft_layer.frozen_linear(i.weight), round(s * rank**0.5)
        layer, parameters = peft_layer.adapt_linear(base, rank, alpha, **options)
        dtype = torch.float32 if wide else i.weight.dtype
        for name, parameter in parameters.items():
            parameter.data = getattr(i, name).to(dtype, copy=True)
        return layer, list(parameters.values())

    def variant(name: str, method: Method, apply: Step, parameters: Sequence[Tensor]) -> Variant:
        def forward(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                return {"y": apply(x)}

        def forward_backward(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
            y = apply(x)
            gradients = torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))
            names = ("d_x", "d_lora_a", "d_lora_b", "d_magnitude")
            return {"y": y.detach()} | dict(zip(names, gradients, strict=False))

        step = forward_backward if backward else forward
        fields = problem.fields(method, backward, apply is kept)
        return Variant("torch", name, step, inputs, exact=apply in (ours, kept), **fields)

    wide_dora, wide_parameters = peft(dora=True, wide=True)

    def defaults(x: Tensor) -> Tensor:
        with torch.autocast(problem.device, dtype=torch.bfloat16):
            return wide_dora(x)

    yield variant("PEFT DoRA, defaults", "DoRA", defaults, wide_parameters)
    yield variant("torch_dora", "DoRA", ours, adapter)
    yield variant("torch_dora, norm kept", "DoRA", kept, adapter)
    yield variant("PEFT LoRA, bf16", "LoRA", *peft(dora=False, wide=False))
    if every and problem.device == "cuda":
        peft_dora, parameters = peft(dora=True, wide=False)
        compiled = torch.compile(peft_dora)
        yield variant("PEFT DoRA, bf16, compiled", "DoRA", compiled, parameters)
