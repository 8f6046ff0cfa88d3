"""Level `ops`: the public operators of both packages, one at a time.

    norm                   ‖W + sBA‖ by jax_dora and torch_dora, compared with forming the product
                           (dense), PEFT, and the paper's method (arXiv 2603.22276)
    compose                y = g ⊙ (base + s·lora), by each implementation
    backward               its gradients, with and without that of `lora` ("backward, d_base")
    SwiGLU's gradient      from dh, gate and up to the gradients of two DoRA layers (JAX alone)

Operands are bf16, g and the norms fp32, at the shapes of the paper and of public models. Each
variant is compared with fp64 on the operands of its timing, and timed alone: device time with a
cold L2 cache, and wall time. One line is one variant at one shape; `benchmarks.report` lists its
fields.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from benchmarks import baselines
from benchmarks.arrays import interpreted, pullback, raising, rotate, to_jax
from benchmarks.work import Expectation, Variant, Work
from jax_dora import ops as jax_ops
from parity import oracle, tolerances
from parity.cases import PAPER_ACTIVATIONS, Case, ComposeInputs, compose_inputs, layer_inputs
from torch_dora import ops as torch_ops

DTYPE = "bfloat16"
ITEM = 2  # bytes
RANK = 384
RANKS = (64, 128, 256, 512, 768)
# in, out, rank: square projections, the up and down projections of wide MLPs, one square projection
# over ranks, and a device's part of k or v if two devices share 8 heads.
NORM_SHAPES = (
    *((*shape, RANK) for shape in ((4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192))),
    *((8192, 8192, rank) for rank in RANKS),
    *((4096, 512, rank) for rank in (64, RANK)),
)
# rows, out
SWIGLU_SHAPES = (
    *((512, 4096), (1024, 2048), (1024, 8960), (2048, 11008), (4096, 4096), (4096, 12288)),
    *((4096, 14336), (2049, 8200), (16384, 4096)),
)
QUICK = (3, 64)
COMPOSE_BASELINES = {"jax xla": "jax xla", "torch eager": "torch eager"}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields functions that make the pieces of work."""
    quick = settings.quick
    for shape in ((64, 48, 8),) if quick else NORM_SHAPES:
        yield functools.partial(norm, *shape, device)
    for rows, out in (QUICK,) if quick else PAPER_ACTIVATIONS:
        case = Case("operator", DTYPE, rows=rows, n_out=out)
        inputs = functools.cache(functools.partial(compose_inputs, case, device))
        yield functools.partial(compose, case, device, inputs)
        for with_lora in (True, False):
            yield functools.partial(compose_backward, case, device, inputs, with_lora)
    for shape in (QUICK,) if quick else SWIGLU_SHAPES:
        yield functools.partial(swiglu_backward, *shape, device)


def norm(n_in: int, n_out: int, rank: int, device: str, adapter_dtype: Any = DTYPE) -> Work:
    sizes: dict[str, Any] = {"n_in": n_in, "n_out": n_out, "rank": rank}
    case = Case("operator", DTYPE, **sizes, adapter_dtype=adapter_dtype, bias=False)
    s = case.scale
    drawn = layer_inputs(case, device)
    operands = (drawn.weight, drawn.lora_a, drawn.lora_b)
    sets = rotate(operands)
    jax_sets = to_jax([tuple(t.T.contiguous() for t in tensors) for tensors in sets])

    def in_jax(name: str, function: Callable, *, exact: bool = True, **options: Any) -> Variant:
        step = interpreted(functools.partial(function, scale=s, **options), device)
        return Variant("jax", name, step, jax_sets, exact=exact)

    def in_torch(name: str, function: Callable, *, exact: bool = True, **options: Any) -> Variant:
        step = torch.no_grad()(functools.partial(function, scale=s, **options))
        return Variant("torch", name, step, sets, exact=exact)

    return Work(
        "norm" if adapter_dtype == DTYPE else f"norm, {adapter_dtype} adapters",
        {"in": n_in, "out": n_out, "rank": rank},
        sum(t.numel() * t.element_size() for t in operands) + 4 * n_out,
        2 * n_in * n_out * rank,
        {"norm": Expectation(oracle.norm(*operands, s), tolerances.norm(*operands, s))},
        [
            in_jax("dense", baselines.dense_norm, exact=False),
            in_jax("factored", jax_ops.factored_norm, implementation="xla"),
            in_jax("mosaic", jax_ops.factored_norm, implementation="mosaic"),
            in_jax("triton", jax_ops.factored_norm, implementation="triton"),
            in_torch("the paper's", baselines.paper_norm, exact=False),
            in_torch("factored", torch_ops.factored_norm, implementation="eager"),
            in_torch("triton", torch_ops.factored_norm, implementation="triton"),
            in_torch("dense", baselines.torch_dense_norm, exact=False),
            in_torch("PEFT", baselines.peft_norm, exact=False),
        ],
        {"jax factored": "jax factored", "torch the paper's": "torch the paper's"},
    )


def compose(case: Case, device: str, inputs: Callable[[], ComposeInputs]) -> Work:
    """Returns the work of y, in inference."""
    drawn, s = inputs(), case.scale
    operands = (drawn.base, drawn.lora, drawn.g)
    sets = rotate(operands)
    jax_sets = to_jax(sets)

    def in_jax(name: str) -> Variant:
        step = interpreted(lambda base, lora, g: _compose(base, g, lora, s, name), device)
        return Variant("jax", name, step, jax_sets, exact=_is_exact(name, device))

    def in_torch(name: str) -> Variant:
        step = functools.partial(torch_ops.compose, scale=s, implementation=name)
        return _torch_variant(name, step, sets, device)

    expected = Expectation(oracle.compose(*operands, s), tolerances.compose(*operands, s, DTYPE))
    in_jax_too = [in_jax(name) for name in ("xla", "mosaic", "triton")]
    variants = [*in_jax_too, in_torch("eager"), in_torch("triton")]
    return _compose_work("compose", case, 3, {"y": expected}, variants)


def compose_backward(
    case: Case, device: str, inputs: Callable[[], ComposeInputs], with_lora: bool
) -> Work:
    """Returns the work of the gradients, computed from dy and the residuals alone."""
    drawn, s = inputs(), case.scale
    grads = oracle.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s)
    bounds = tolerances.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s, DTYPE)
    names = ("d_base", "d_g", "d_lora") if with_lora else ("d_base", "d_g")
    sets = rotate([drawn.dy, drawn.base, drawn.lora, drawn.g])

    def in_jax(name: str) -> Variant:
        def vjp(base, lora, g):
            if with_lora:
                return jax.vjp(functools.partial(_compose, s=s, name=name), base, g, lora)
            return jax.vjp(functools.partial(_compose, lora=lora, s=s, name=name), base, g)

        step, inputs = pullback(vjp, to_jax(sets), device)
        return Variant("jax", name, step, inputs, exact=_is_exact(name, device))

    def in_torch(name: str) -> Variant:
        def forward(dy, base, lora, g):
            leaves = [t.clone().requires_grad_() for t in (base, g)]
            lora = lora.clone().requires_grad_(with_lora)
            y = torch_ops.compose(leaves[0], lora, leaves[1], s, implementation=name)
            return y, [*leaves, lora] if with_lora else leaves, dy

        def step(y, leaves, dy):
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)

        try:
            return _torch_variant(name, step, [forward(*tensors) for tensors in sets], device)
        except Exception as error:
            return Variant("torch", name, raising(error), sets)

    expected = {name: Expectation(getattr(grads, name), getattr(bounds, name)) for name in names}
    in_jax_too = [in_jax(name) for name in ("xla", "mosaic", "triton")]
    variants = [*in_jax_too, in_torch("eager"), in_torch("triton")]
    if with_lora:
        return _compose_work("backward", case, 4, expected, variants)
    return _compose_work("backward, d_base", case, 3, expected, variants)


def _compose(base, g, lora, s: float, name: str) -> jax.Array:
    return jax_ops.compose(base, lora, g, s, implementation=name)


def _torch_variant(name: str, step: Callable, sets: list, device: str) -> Variant:
    return Variant("torch", name, step, sets, exact=_is_exact(name, device))


def _is_exact(name: str, device: str) -> bool:
    """Returns whether results are rounded to bf16: Triton's interpreter, which runs on a CPU,
    truncates."""
    return name != "triton" or device == "cuda"


def _compose_work(
    group: str, case: Case, tensors: int, expected: dict[str, Expectation], variants: list[Variant]
) -> Work:
    """Returns a piece of work that moves `tensors` tensors [rows, out]."""
    shape = {"rows": case.rows, "out": case.n_out}
    moved = tensors * case.rows * case.n_out * ITEM
    return Work(group, shape, moved, 0, expected, variants, COMPOSE_BASELINES)


def swiglu_backward(rows: int, out: int, device: str) -> Work:
    torch.manual_seed(0)
    dh, gate, up = (torch.randn(rows, out, device=device).bfloat16() for _ in range(3))
    gate_g, up_g = (1 + 0.1 * torch.randn(out, device=device) for _ in range(2))
    operands = (gate, up, gate_g, up_g)
    bounds, grads = tolerances.swiglu(dh, *operands, DTYPE), oracle.swiglu_grads(dh, *operands)
    names = ("d_gate", "d_up", "d_gate_g", "d_up_g")
    sets = to_jax(rotate([dh, *operands]))

    def variant(name: str) -> Variant:
        swiglu = functools.partial(jax_ops.swiglu, implementation=name)
        step, inputs = pullback(functools.partial(jax.vjp, swiglu), sets, device)
        return Variant("jax", name, step, inputs, exact=_is_exact(name, device))

    return Work(
        "SwiGLU's gradient",
        {"rows": rows, "out": out},
        5 * rows * out * ITEM,
        0,
        {
            name: Expectation(want, getattr(bounds, name))
            for name, want in zip(names, grads, strict=True)
        },
        [variant(name) for name in ("xla", "mosaic", "triton")],
        {"jax xla": "jax xla"},
    )
