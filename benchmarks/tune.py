"""Level `tune`: the kernels of this card with candidate launch configs, compared with XLA.

For every kernel and shape of `benchmarks.kernels` the variants are the same computation by XLA
("xla"), the kernel with its own choice of a config ("mosaic, chosen: yes" or "no", or "triton, …",
by what the kernel's `wins` says of the shape), and the kernel with each candidate, named after its
fields that differ from the default. Results are compared with fp32. Device time has a cold L2
cache.

One line is one variant at one shape; `benchmarks.report` lists its fields. The results are for
reading: whoever changes a kernel's choices edits its `wins` and `config`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.arrays import NO_TRITON, interpreted, set_count
from benchmarks.kernels import KERNELS, Kernel, triton_kernels
from benchmarks.work import Expectation, Variant, Work
from jax_dora.ops.dispatch import choose
from jax_dora.ops.triton.kernel_call import is_installed
from parity.sides.jax.operators import to_torch

QUICK = {"rows": 64, "in": 128, "out": 128, "rank": 16, "tiles": 1}
QUICK |= {"groups": 2, "layers": 2, "slots": 4, "time": 128}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields functions that make the pieces of work, one for each kernel and shape."""
    kernels = [*KERNELS.values(), *(triton_kernels() if is_installed() else [])]
    for kernel in kernels:
        if device == "cuda" and choose.target().refuses(kernel.package):
            continue
        tiny = [{axis: QUICK[axis] for axis in kernel.shapes[0]}]
        for sizes in tiny if settings.quick else kernel.shapes:
            yield functools.partial(_work, kernel, sizes, device, settings.quick)


def _work(kernel: Kernel, sizes: Mapping[str, int], device: str, quick: bool) -> Work:
    inputs = [tuple(kernel.draw(sizes))]
    moved = kernel.bytes(inputs[0])
    count = 2 if quick else set_count(moved)
    inputs += [tuple(kernel.draw(sizes, seed)) for seed in range(1, count)]

    # Not exact: the kernels' own tests hold their results to the bounds.
    def variant(name: str, step: Callable[..., Any], **options: Any) -> Variant:
        step = interpreted(step, device)
        return Variant("jax", name, step, inputs, _results, exact=False, **options)

    wins = kernel.module.wins(*kernel.arguments(sizes))
    variants = [
        variant("xla", kernel.define, compiler_options=NO_TRITON),
        variant(f"{kernel.package}, chosen: {'yes' if wins else 'no'}", kernel.launch),
        *(
            variant(
                f"{kernel.package} {_name(config)}", functools.partial(kernel.launch, config=config)
            )
            for config in (kernel.candidates[:1] if quick else kernel.candidates)
        ),
    ]
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in inputs[0]]
    with jax.default_matmul_precision("highest"):
        wanted = _results(jax.jit(kernel.define)(*wide))
    expected = {name: Expectation(value.double()) for name, value in wanted.items()}
    shape = {axis: sizes[axis] for axis in QUICK if axis in sizes}
    group, baselines = kernel.name.replace("_", " "), {"jax xla": "jax xla"}
    return Work(group, shape, moved, kernel.flops(sizes), expected, variants, baselines)


def _name(config: Any) -> str:
    """Returns a variant's name: the fields of `config` that differ from the default."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}
    changed = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
    return " ".join(changed or ["by default"])


def _results(outputs: Any) -> dict[str, Any]:
    # torch takes no JAX arrays of 8-bit floats.
    wide = [
        array.astype(jnp.float32) if array.dtype.itemsize == 1 else array
        for array in jax.tree.leaves(outputs)
    ]
    return {str(i): to_torch(array) for i, array in enumerate(wide)}
