"""The norm ‖W + sBA‖: dense, factored, cached; its time over shapes, its memory over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import torch

from benchmarks import baselines
from benchmarks.ops.compose import triton_refuses
from benchmarks.ops.inputs import mosaic_refuses, rotate, to_jax, to_torch, tuned
from benchmarks.work import Expectation, Variant, Work
from jax_dora import ops as jax_ops
from jax_dora.ops import device as jax_device
from jax_dora.ops.mosaic import norm as mosaic_norm
from jax_dora.ops.mosaic.strips import StripConfig
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
QUICK = ((64, 48, 8),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    shapes = [(*shape, RANK) for shape in SHAPES]
    shapes += [(*RANK_SHAPE, rank) for rank in RANKS if rank != RANK]
    for n_in, n_out, rank in QUICK if quick else shapes:
        yield functools.partial(work, n_in, n_out, rank, "bfloat16", device)
    n_in, n_out, rank = QUICK[0] if quick else (*RANK_SHAPE, RANK)
    yield functools.partial(work, n_in, n_out, rank, "float32", device)


def work(
    n_in: int,
    n_out: int,
    rank: int,
    adapter_dtype: str,
    device: str,
    configs: Sequence[StripConfig] = (),
) -> Work:
    case = Case(
        "operator",
        DTYPE,
        n_in=n_in,
        n_out=n_out,
        rank=rank,
        adapter_dtype=adapter_dtype,
        bias=False,
    )
    s = case.scale
    drawn = layer_inputs(case, device)
    operands = (drawn.weight, drawn.lora_a, drawn.lora_b)
    expected = {"norm": Expectation(oracle.norm(*operands, s), tolerances.norm(*operands, s))}
    squared = torch_ops.squared_norm(drawn.weight)
    sets = rotate([*operands, squared])
    jax_sets = to_jax(
        [(w.T.contiguous(), a.T.contiguous(), b.T.contiguous(), q) for w, a, b, q in sets]
    )

    def factored(kernel, lora_a, lora_b, squared):
        return jax_ops.factored_norm(kernel, lora_a, lora_b, s, implementation="xla")

    def cached(kernel, lora_a, lora_b, squared):
        return jax_ops.factored_norm(
            kernel, lora_a, lora_b, s, kernel_sq_norm=squared, implementation="xla"
        )

    def mosaic(kernel, lora_a, lora_b, squared, config=None):
        return mosaic_norm.norm(
            kernel,
            lora_a,
            lora_b,
            jnp.float32(s),
            sm_count=jax_device.sm_count(),
            config=config,
        )

    def dense(kernel, lora_a, lora_b, squared):
        return baselines.dense_norm(kernel, lora_a, lora_b, s)

    def torch_cached(weight, lora_a, lora_b, squared):
        return torch_ops.factored_norm(
            weight, lora_a, lora_b, s, kernel_sq_norm=squared, implementation="eager"
        )

    plain = functools.partial(torch_ops.factored_norm, implementation="eager")
    one_pass = functools.partial(torch_ops.factored_norm, implementation="triton")

    def in_torch(norm: Callable) -> Callable:
        @torch.no_grad()
        def step(weight, lora_a, lora_b, squared):
            return norm(weight, lora_a, lora_b, s)

        return step

    def jax_results(found):
        return {"norm": to_torch(found)}

    def torch_results(found):
        return {"norm": found}

    item = torch.finfo(getattr(torch, adapter_dtype)).bits // 8
    refusal = mosaic_refuses(device) or mosaic_norm.refuses(
        n_in, rank, n_out, jnp.bfloat16, jnp.dtype(adapter_dtype)
    )
    variants = [
        Variant("jax", "dense", dense, jax_sets, jax_results, exact=False),
        Variant("jax", "factored", factored, jax_sets, jax_results),
        Variant("jax", "factored, ‖W‖² kept", cached, jax_sets, jax_results, cached=True),
        *tuned(
            Variant("jax", "mosaic", mosaic, jax_sets, jax_results, unless=refusal),
            configs,
            device,
        ),
        Variant(
            "torch", "dense", in_torch(baselines.torch_dense_norm), sets, torch_results, exact=False
        ),
        Variant("torch", "PEFT", in_torch(baselines.peft_norm), sets, torch_results, exact=False),
        Variant(
            "torch", "the paper's", in_torch(baselines.paper_norm), sets, torch_results, exact=False
        ),
        Variant("torch", "factored", in_torch(plain), sets, torch_results),
        Variant(
            "torch",
            "triton",
            in_torch(one_pass),
            sets,
            torch_results,
            unless=triton_refuses(device),
        ),
        Variant("torch", "factored, ‖W‖² kept", torch_cached, sets, torch_results, cached=True),
    ]
    if adapter_dtype != DTYPE:
        # A sum of bf16 and fp32 in torch is fp32: this is another computation, not PEFT's.
        variants = [v for v in variants if v.name not in ("dense", "PEFT")]
    return Work(
        "norm" if adapter_dtype == DTYPE else "norm, fp32 adapters",
        {"in": n_in, "out": n_out, "rank": rank},
        n_in * n_out * ITEM + rank * (n_in + n_out) * item + 4 * n_out,
        2 * n_in * n_out * rank,
        expected,
        variants,
        {"jax factored": "jax factored", "torch the paper's": "torch the paper's"},
    )
