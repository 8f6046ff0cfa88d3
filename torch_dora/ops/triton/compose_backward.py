"""Launches of :mod:`dora_common.triton.compose_backward`.

Compose backward: the cotangents of base, lora and g in one pass over dy and inner.
"""

import functools

import torch
from torch import Tensor

from dora_common.triton.compose_backward import CONFIG, Config, kernel, strips_of
from torch_dora.ops.operator import operator
from torch_dora.ops.triton import column_sums
from torch_dora.ops.triton.jit import Launch


def prepared(rows: int, features: int, scale: float, *flags: bool) -> tuple[int, Launch]:
    """Returns the number of strips, and the launch for tensors of these sizes. The flags are those
    of `launch`, then whether the magnitude's gradient is wanted."""
    return _launch(CONFIG, rows, features, scale, *flags)


@functools.lru_cache(1024)
def _launch(
    config: Config,
    rows: int,
    features: int,
    scale: float,
    delta: bool,
    with_base: bool,
    with_lora: bool,
    with_g: bool,
) -> tuple[int, Launch]:
    """Returns the number of strips, and the launch."""
    strips, programs, constants = strips_of(config, rows, features)
    return strips, Launch(
        kernel,
        (programs,),
        (rows, features, strips, scale),
        DELTA=delta,
        WITH_BASE=with_base,
        WITH_LORA=with_lora,
        WITH_G=with_g,
        **constants,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )


def launch(
    dy: Tensor,
    inner: Tensor | None,
    g: Tensor,
    scale: float,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    divisor: Tensor | None = None,
) -> list[Tensor]:
    """Returns d_base if ``want_base``, d_lora if ``want_lora``, then d_g if ``inner`` is given,
    divided by ``divisor``, f32[out], if that is given."""
    dy, g = dy.contiguous(), g.contiguous()
    options = {"device": dy.device, "dtype": dy.dtype}
    d_base = torch.empty(dy.shape, **options) if want_base else None
    d_lora = torch.empty(dy.shape, **options) if want_lora else None
    gradients = [d for d in (d_base, d_lora) if d is not None]
    features = dy.shape[-1]
    rows = dy.numel() // max(1, features)
    if rows == 0 or features == 0:
        return (
            gradients
            if inner is None
            else [*gradients, dy.new_zeros(features, dtype=torch.float32)]
        )
    flags = delta, want_base, want_lora, inner is not None
    strips, run_kernel = prepared(rows, features, scale, *flags)
    partial = g
    if inner is not None:
        partial = torch.empty((strips, features), device=dy.device, dtype=torch.float32)
    run_kernel(
        dy,
        dy if inner is None else inner.contiguous(),
        g,
        dy if d_base is None else d_base,
        dy if d_lora is None else d_lora,
        partial,
    )
    if inner is None:
        return gradients
    if divisor is not None:
        return [*gradients, column_sums.launch(partial, "divide", divisor)]
    # A single strip needs no second stage: its partial sum is the result.
    return [*gradients, partial[0] if strips == 1 else column_sums.launch(partial)]


compose_backward = operator("torch_dora::compose_backward")(launch)


@compose_backward.fake
def _(dy, inner, g, scale, delta, want_base, want_lora, divisor=None):
    gradients = [dy.new_empty(dy.shape) for want in (want_base, want_lora) if want]
    if inner is not None:
        gradients.append(dy.new_empty(dy.shape[-1], dtype=torch.float32))
    return gradients
