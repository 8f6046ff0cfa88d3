"""Level `tune`: each Mosaic kernel with candidate configs, beside its own choice and XLA.

It prints; what the kernels go by stands in their `wins` and `config`. "chosen" is what `wins` says
of the shape, to be compared with the time over XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.arrays import MOST_SETS, NO_TRITON, ROTATION_BYTES, interpreted, to_torch
from benchmarks.kernel import Kernel
from benchmarks.kernels import KERNELS
from benchmarks.work import Expectation, Variant, Work

QUICK = {"rows": 64, "in": 64, "out": 128, "rank": 16, "tiles": 1}
QUICK |= {"groups": 2, "layers": 2, "slots": 4, "time": 128}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields every kernel at its shapes."""
    for name, kernel in KERNELS.items():
        shapes = (
            [{axis: QUICK[axis] for axis in kernel.shapes[0]}] if settings.quick else kernel.shapes
        )
        for sizes in shapes:
            yield functools.partial(_work, name, kernel, sizes, device, settings.quick)


def _work(name: str, kernel: Kernel, sizes: Mapping[str, int], device: str, quick: bool) -> Work:
    inputs = [tuple(kernel.draw(sizes))]
    moved = kernel.bytes(inputs[0])
    count = 2 if quick else max(2, min(MOST_SETS, -(-ROTATION_BYTES // moved)))
    inputs += [tuple(kernel.draw(sizes, seed)) for seed in range(1, count)]

    # What is asked is the same function; the kernels' own tests hold them to their bounds.
    def variant(label: str, step: Callable[..., Any], **options: Any) -> Variant:
        step = interpreted(step, device)
        return Variant("jax", label, step, inputs, _results, exact=False, **options)

    candidates = kernel.candidates[:1] if quick else kernel.candidates
    wins = kernel.module.wins(*kernel.arguments(sizes))
    variants = [
        variant("xla", kernel.define, compiler_options=NO_TRITON),
        variant(f"mosaic, chosen: {'yes' if wins else 'no'}", kernel.launch),
        *(
            variant(_name(config), functools.partial(kernel.launch, config=config))
            for config in candidates
        ),
    ]
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in inputs[0]]
    with jax.default_matmul_precision("highest"):
        wanted = _results(jax.jit(kernel.define)(*wide))
    expected = {name: Expectation(value.double()) for name, value in wanted.items()}
    shape = {axis: sizes[axis] for axis in QUICK if axis in sizes}
    baselines = {"jax xla": "jax xla"}
    group = name.replace("_", " ")
    return Work(group, shape, moved, kernel.flops(sizes), expected, variants, baselines)


def _name(config: Any) -> str:
    """Returns the fields of `config` that differ from the default."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}
    knobs = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
    return " ".join(["mosaic", *(knobs or ["by default"])])


def _results(found: Any) -> dict[str, Any]:
    # torch takes no arrays of 8-bit floats.
    wide = [
        one.astype(jnp.float32) if one.dtype.itemsize == 1 else one
        for one in jax.tree.leaves(found)
    ]
    return {str(i): to_torch(array) for i, array in enumerate(wide)}
