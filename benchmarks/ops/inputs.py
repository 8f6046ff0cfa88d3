"""Rotating sets of inputs, shared between the frameworks without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.work import Variant
from jax_dora.ops.tuning import Config

# Together the sets exceed the L2 (60 MB on an H200), so that back-to-back steps find none of it
# there; two sets at least, so that no step reads what it just read.
ROTATION_BYTES = 128 * 2**20
MOST_SETS = 8
# As in a layer: what cuBLAS is asked for without Triton's products.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def draw(device: str, *shape: int, size: float = 1.0) -> torch.Tensor:
    """bf16 normal numbers of deviation `size`, the same for the same shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (size * torch.randn(shape, device=device, generator=generator)).bfloat16()


def rotate(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """The given tensors, and copies of them at other addresses."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = max(2, min(MOST_SETS, -(-ROTATION_BYTES // max(size, 1))))
    return [tuple(tensors)] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]


def to_jax(sets: Sequence[Sequence[torch.Tensor]]) -> list[tuple[jax.Array, ...]]:
    """The same memory as JAX arrays; tensors must be contiguous."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [tuple(jax.dlpack.from_dlpack(t) for t in tensors) for tensors in sets]


def to_torch(array: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(array))


def interpreted(step: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`step`, its Mosaic kernels run by Pallas' interpreter where there is no GPU."""
    if device == "cuda":
        return step

    def run(*arguments: Any) -> Any:
        with _interpreter():
            return step(*arguments)

    return run


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    with plgpu.force_gpu_interpret_mode():
        yield


def tuned(mosaic: Variant, configs: Sequence[Config], device: str) -> list[Variant]:
    """`mosaic`, and beside it one variant for each config that its step takes as `config=`; run by
    Pallas' interpreter where there is no GPU."""
    variants = [dataclasses.replace(mosaic, step=interpreted(mosaic.step, device))]
    for config in configs:
        knobs = {
            knob.name: value
            for knob in dataclasses.fields(config)
            if (value := getattr(config, knob.name)) is not None
        }
        variants.append(
            dataclasses.replace(
                mosaic,
                name=" ".join([mosaic.name, *(f"{knob}={value}" for knob, value in knobs.items())]),
                step=interpreted(functools.partial(mosaic.step, config=config), device),
                config=knobs,
            )
        )
    return variants


def mosaic_refuses(device: str) -> str | None:
    """Why no Mosaic kernel runs on this device, or None."""
    if device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        return None
    return "Mosaic kernels here need a Hopper GPU (compute capability 9.0)"


def same_function(
    name: str, step: Callable[..., Any], inputs: list[tuple], result: str, unless: str | None = None
) -> Variant:
    """A variant of one product: parity's tolerances are for whole layers, and each product's own
    bound would be meant, so what is asked is the same function."""
    return Variant(
        "jax",
        name,
        step,
        inputs,
        lambda found: {result: to_torch(found)},
        exact=False,
        unless=unless,
        compiler_options=NO_TRITON,
    )
