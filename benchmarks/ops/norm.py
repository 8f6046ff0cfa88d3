"""The norm ‖W + sBA‖: dense and factored, over shapes and ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.arrays import interpreted, rotate, to_jax
from benchmarks.work import Expectation, Variant, Work
from jax_dora import ops as jax_ops
from parity import oracle, tolerances
from parity.cases import Case, layer_inputs
from torch_dora import ops as torch_ops

DTYPE = "bfloat16"
ITEM = 2
RANKS = (64, 128, 256, 384, 512, 768)
RANK = 384
# in, out: square projections, and the up and down projections of wide MLPs.
SHAPES = ((4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192))
RANK_SHAPE = (8192, 8192)
# A device's part of k or v, where two share 8 heads.
PART = (4096, 512)
QUICK = ((64, 48, 8),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    shapes = [(*shape, RANK) for shape in SHAPES]
    shapes += [(*RANK_SHAPE, rank) for rank in RANKS if rank != RANK]
    shapes += [(*PART, rank) for rank in (64, RANK)]
    for shape in QUICK if quick else shapes:
        yield functools.partial(work, *shape, device)


def work(n_in: int, n_out: int, rank: int, device: str) -> Work:
    sizes: dict[str, Any] = {"n_in": n_in, "n_out": n_out, "rank": rank}
    case = Case("operator", DTYPE, **sizes, adapter_dtype=DTYPE, bias=False)
    s = case.scale
    drawn = layer_inputs(case, device)
    operands = (drawn.weight, drawn.lora_a, drawn.lora_b)
    expected = {"norm": Expectation(oracle.norm(*operands, s), tolerances.norm(*operands, s))}
    sets = rotate(operands)
    jax_sets = to_jax([tuple(t.T.contiguous() for t in one) for one in sets])

    def in_jax(name: str, norm: Callable, *, exact: bool = True, **options: Any) -> Variant:
        def step(kernel, lora_a, lora_b):
            return norm(kernel, lora_a, lora_b, s, **options)

        return Variant("jax", name, interpreted(step, device), jax_sets, exact=exact)

    def in_torch(name: str, norm: Callable, *, exact: bool = True, **options: Any) -> Variant:
        @torch.no_grad()
        def step(weight, lora_a, lora_b):
            return norm(weight, lora_a, lora_b, s, **options)

        return Variant("torch", name, step, sets, exact=exact)

    ours, theirs = jax_ops.factored_norm, torch_ops.factored_norm
    variants = [
        in_jax("dense", baselines.dense_norm, exact=False),
        in_jax("factored", ours, implementation="xla"),
        in_jax("mosaic", ours, implementation="mosaic"),
        in_torch("the paper's", baselines.paper_norm, exact=False),
        in_torch("factored", theirs, implementation="eager"),
        in_torch("triton", theirs, implementation="triton"),
        in_torch("dense", baselines.torch_dense_norm, exact=False),
        in_torch("PEFT", baselines.peft_norm, exact=False),
    ]
    return Work(
        "norm",
        {"in": n_in, "out": n_out, "rank": rank},
        ITEM * (n_in * n_out + rank * (n_in + n_out)) + 4 * n_out,
        2 * n_in * n_out * rank,
        expected,
        variants,
        {"jax factored": "jax factored", "torch the paper's": "torch the paper's"},
    )
