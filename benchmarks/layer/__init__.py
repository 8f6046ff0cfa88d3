"""Level `layer`: one adapted projection, norm included, beside LoRA and the base alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from benchmarks.layer import jax_side, torch_side
from benchmarks.problem import Problem
from benchmarks.work import Work

RANK = 384
RANKS = (64, 128, 256, 512, 768)
# rows, in, out
MAIN = (4096, 8192, 8192)
OTHERS = ((4096, 4096, 4096), (4096, 4096, 14336))
BEST_LORA = "the best jax LoRA"
QUICK = (24, 64, 48)
QUICK_RANK = 8
# What `--against` compares, at the shapes of rank `RANK`.
COMPARED = ("jax DoRA (no Triton)", "jax DoRA, norm kept (no Triton)", "jax LoRA (no Triton)")


def works(device: str, quick: bool, compared: bool = False) -> Iterator[Callable[[], Work]]:
    """Yields everything at the main shape; fewer variants at other shapes and over ranks.

    `compared` yields what two checkouts are compared by.
    """
    cases = [(QUICK, QUICK_RANK, True)] if quick else [(MAIN, RANK, not compared)]
    if not quick:
        cases += [(shape, RANK, False) for shape in OTHERS]
        cases += [(MAIN, other, False) for other in RANKS if not compared]
    for shape, r, every in cases:
        problem = functools.cache(functools.partial(Problem.draw, *shape, r, device))
        for backward in (False, True):
            yield functools.partial(_work, problem, every, backward, compared)


def _work(make: Callable[[], Problem], every: bool, backward: bool, compared: bool) -> Work:
    problem = make()
    variants = list(jax_side.variants(problem, every, backward))
    if compared:
        variants = [variant for variant in variants if variant.label in COMPARED]
    else:
        variants += torch_side.variants(problem, every, backward)
    return Work(
        "layer forward+backward" if backward else "layer forward",
        {"rows": problem.rows, "in": problem.n_in, "out": problem.n_out, "rank": problem.rank},
        problem.bytes(backward),
        problem.flops("DoRA", backward, with_norm=True),
        problem.dora_expected(backward),
        variants,
        {
            "jax LoRA": BEST_LORA,
            "jax LoRA (no Triton)": BEST_LORA,
            "torch PEFT DoRA, defaults": "torch PEFT DoRA, defaults",
        },
    )
