"""Level `layer`: one adapted projection, norm included, beside LoRA and the base alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.problem import Problem
from benchmarks.work import Work

RANK = 384
RANKS = (64, 128, 256, 512, 768)
# rows, in, out
MAIN = (4096, 8192, 8192)
OTHERS = ((4096, 4096, 4096), (4096, 4096, 14336))
BEST_LORA = "the best jax LoRA"
QUICK = (24, 64, 48, 8)


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields everything at the main shape; fewer variants at other shapes and over ranks."""
    cases = [(*MAIN, RANK), *((*o, RANK) for o in OTHERS), *((*MAIN, rank) for rank in RANKS)]
    for sizes in [QUICK] if settings.quick else cases:
        problem = functools.cache(functools.partial(Problem.draw, *sizes, device))
        every = sizes in (QUICK, cases[0])
        for backward in (False, True):
            yield functools.partial(work, problem, every, backward)


def work(
    make: Callable[[], Problem],
    every: bool,
    backward: bool,
    frameworks: tuple[str, ...] = ("jax", "torch"),
) -> Work:
    """Returns the work of one problem, with all variants of those frameworks if `every`."""
    problem = make()
    c, variants = problem.case, []
    for framework in frameworks:
        # Where one framework is asked for, the other is not imported.
        side = importlib.import_module(f"benchmarks.layer.{framework}_side")
        variants += side.variants(problem, every, backward)
    return Work(
        "layer forward+backward" if backward else "layer forward",
        {"rows": c.rows, "in": c.n_in, "out": c.n_out, "rank": c.rank},
        problem.bytes(backward),
        problem.flops(backward, with_norm=True),
        problem.expected("DoRA", backward),
        variants,
        {
            "jax LoRA": BEST_LORA,
            "jax LoRA (no Triton)": BEST_LORA,
            "torch PEFT DoRA, defaults": "torch PEFT DoRA, defaults",
        },
    )
