"""Level `triton`: the Triton kernels of jax_dora, compared with the Mosaic kernels of a Hopper.

    norm                   ‖W + sAB‖ with adapters in bf16, and in fp32
    expand and compose     y = g ⊙ (base + z B), and with the sum beside it ("with inner")
    backward, d_base       the gradients of y = g ⊙ (base + s·lora) by base and g
    SwiGLU's gradient      from dh, gate and up to the gradients of two DoRA layers

"mosaic" and "triton" are named for the same call, with the operands of level `ops`. One line is one
of them at one shape; `benchmarks.report` lists its fields. The page "Which GPU" shows the results.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import ops
from benchmarks.arrays import interpreted, set_count
from benchmarks.kernels import KERNELS, Kernel, triton_kernels
from benchmarks.work import Expectation, Variant, Work
from parity.cases import Case, compose_inputs
from parity.sides.jax.operators import to_torch

BASELINES = {"jax mosaic": "jax mosaic"}
NORMS = (
    *((8192, 64, "bfloat16"), (8192, 384, "bfloat16"), (4096, 384, "bfloat16")),
    *((8192, 64, "float32"), (8192, 128, "float32"), (8192, 192, "float32")),
    (4096, 384, "float32"),
)
EXPANSIONS = ((8192, 64, False), (8192, 384, False), (8192, 384, True), (4096, 384, False))
BACKWARDS, SWIGLUS = (8192, 4096), (8192, 12288, 14336)
ROWS = 4096


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields functions that make the pieces of work."""
    quick = settings.quick
    rows = 3 if quick else ROWS
    for size, rank, dtype in ((64, 8, "float32"),) if quick else NORMS:
        yield _both(functools.partial(ops.norm, size, size, rank, device, adapter_dtype=dtype))
    for out, rank, with_inner in ((64, 16, True),) if quick else EXPANSIONS:
        yield functools.partial(expand, rows, out, rank, device, with_inner)
    for out in (64,) if quick else BACKWARDS:
        case = Case("operator", ops.DTYPE, rows=rows, n_out=out)
        inputs = functools.cache(functools.partial(compose_inputs, case, device))
        yield _both(functools.partial(ops.compose_backward, case, device, inputs, False))
    for out in (64,) if quick else SWIGLUS:
        yield _both(functools.partial(ops.swiglu_backward, rows, out, device))


def _both(make: Callable[[], Work]) -> Callable[[], Work]:
    """Returns a function that makes the work with the variants "mosaic" and "triton" alone."""

    def made() -> Work:
        work = make()
        variants = [one for one in work.variants if one.label in ("jax mosaic", "jax triton")]
        return dataclasses.replace(work, variants=variants, baselines=BASELINES)

    return made


def expand(rows: int, out: int, rank: int, device: str, with_inner: bool) -> Work:
    sizes = {"rows": rows, "out": out, "rank": rank}
    (in_triton,) = (one for one in triton_kernels() if one.name == "expand_compose")
    in_mosaic = KERNELS["expand_compose"]
    moved = in_mosaic.bytes(in_mosaic.draw(sizes)) + with_inner * ops.ITEM * rows * out
    inputs = [tuple(in_mosaic.draw(sizes, seed)) for seed in range(set_count(moved))]
    base, z, b, g = (to_torch(array).double() for array in inputs[0])
    expected = {"y": Expectation(g * (base + z @ b)), "inner": Expectation(base + z @ b)}

    def variant(kernel: Kernel) -> Variant:
        kernel = dataclasses.replace(kernel, options={"want_inner": with_inner})
        step = interpreted(lambda *operands: kernel.launch(*operands), device)
        return Variant("jax", kernel.package, step, inputs, exact=False)

    group = "expand and compose" + ", with inner" * with_inner
    expected = dict([*expected.items()][: 1 + with_inner])
    variants = [variant(in_mosaic), variant(in_triton)]
    return Work(group, sizes, moved, in_mosaic.flops(sizes), expected, variants, BASELINES)
