"""Builds, checks and times pieces of work, for the levels ops, layer, triton and tune."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from benchmarks import clock
from benchmarks.arrays import to_jax
from benchmarks.clock import Effort, device_clock
from benchmarks.results import Row
from benchmarks.work import Variant, Work, judge, matches
from parity.sides.jax.operators import to_torch

KIND = "benchmark"
# The ceilings come from a copy of this many elements, and a product of matrices of this width.
CEILING_ELEMENTS = 2**30
CEILING_WIDTH = 8192

Step = Callable[..., Any]


class Settings(NamedTuple):
    """The settings of a level.

    Attributes:
      works: yields functions that make the pieces of work, given a device and these settings.
      quick: whether to use tiny shapes and one step each.
      only: `fnmatch` patterns; a "<work> <variant>" that begins like none of them is skipped.
    """

    works: Callable[[str, Any], Iterable[Callable[[], Work]]]
    quick: bool = False
    only: tuple[str, ...] = ()


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields a row for every variant of every piece of work."""
    for make in settings.works(device, settings):
        work = make()
        for variant in work.variants:
            if matches(f"{work.name} {variant.label}", settings.only):
                yield measured(work, variant, device, settings.quick)
        del work
        free()


def facts(settings: Settings, device: str) -> Row:
    """Returns what the header says of the card: its ceilings."""
    return {"ceilings": ceilings()} if device == "cuda" else {}


def measured(work: Work, variant: Variant, device: str, quick: bool) -> Row:
    """Returns the row of one variant: built, checked against fp64, timed by both clocks.

    An exception becomes the row's `refused` or `failed`, so that one variant that cannot be built
    or run does not end the others' measurements.
    """
    row: Row = {"group": work.group, "shape": work.shape}
    row |= {"framework": variant.framework, "variant": variant.name}
    row |= {"bytes": work.bytes, "flops": variant.flops or work.flops}
    if variant.label in work.baselines:
        row["baseline"] = work.baselines[variant.label]
    known, effort = dict(row), clock.QUICK if quick or device == "cpu" else Effort()
    try:
        step, planned = _compile(variant)
        outputs, allocated = _first_run(step, variant, device)
        if memory := planned if variant.framework == "jax" else allocated:
            row["temp_bytes"] = memory
        expected = variant.expected or work.expected
        row["check"] = judge(_named(variant, outputs, expected), expected, variant.exact)
        del outputs
        spreads = {}
        if device == "cuda":
            times = device_clock().time(variant.framework, step, variant.inputs, effort)
            spreads["device"] = times
        spreads["wall"] = clock.wall_time(step, variant.inputs, effort)
        if device == "cuda":
            clock.check_clocks(variant.framework, **spreads)
        row |= {name: spread._asdict() for name, spread in spreads.items()}
    except NotImplementedError as error:
        return known | {"refused": str(error)[:200]}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:400]
    return row


def _named(variant: Variant, outputs: Any, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a step's results as torch tensors by name."""
    if variant.results is not None:
        return variant.results(outputs)
    if not isinstance(outputs, Mapping):
        outputs = dict(zip(expected, jax.tree.leaves(outputs), strict=True))
    return outputs if variant.framework == "torch" else jax.tree.map(to_torch, outputs)


def free() -> None:
    """Frees compiled programs and the memory that the allocators keep."""
    jax.clear_caches()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ceilings() -> Row:
    """Returns the card's rates of copying and of matrix products, the better of both frameworks."""
    elements, width = CEILING_ELEMENTS, CEILING_WIDTH
    source = torch.randn(elements, device="cuda").bfloat16()
    a, b = (torch.randn(width, width, device="cuda").bfloat16() for _ in range(2))
    works = {
        "copy": ([(source,), (source.clone(),)], jnp.negative, torch.neg, 2 * 2 * elements),
        "matmul": ([(a, b)], jnp.matmul, torch.matmul, 2 * width**3),
    }
    rates = {}
    for name, (inputs, in_jax, in_torch, amount) in works.items():
        both = ("jax", jax.jit(in_jax), to_jax(inputs)), ("torch", in_torch, inputs)
        rates[name] = amount / min(_seconds(*side) for side in both)
    free()
    return rates


def _seconds(framework: str, step: Step, inputs: list[tuple]) -> float:
    clock.synchronise(step(*inputs[0]))
    return device_clock().time(framework, step, inputs, Effort()).median * 1e-6


def _compile(variant: Variant) -> tuple[Step, int | None]:
    """Returns the step, compiled if it is JAX's, and the number of bytes that XLA plans for it."""
    if variant.framework == "torch":
        return variant.step, None
    lowered = jax.jit(variant.step).lower(*variant.inputs[0])
    options = dict(variant.compiler_options) if jax.default_backend() == "gpu" else {}
    compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return compiled, None if memory is None else memory.temp_size_in_bytes


def _first_run(step: Step, variant: Variant, device: str) -> tuple[Any, int | None]:
    """Returns the first result, and the largest number of bytes of torch's temporaries."""
    result = step(*variant.inputs[0])
    clock.synchronise(result)
    if variant.framework == "jax" or device == "cpu":
        return result, None
    # Read in a second run: autotuning, workspaces and compilation allocate memory in the first.
    del result
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = step(*variant.inputs[0])
    torch.cuda.synchronize()
    # Temporaries are all memory but arguments and results.
    return result, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
