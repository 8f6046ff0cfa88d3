"""Launches of :mod:`dora_common.triton.compose_forward`.

Compose forward: y or ΔY in one pass, and also inner if g requires a gradient.
"""

import functools

import torch
from torch import Tensor

from dora_common.triton.compose_forward import CONFIG, Config, kernel
from dora_common.triton.jit import cdiv, next_power_of_2
from torch_dora.ops.choose import Call
from torch_dora.ops.operator import operator
from torch_dora.ops.triton.jit import Launch

# Under torch.compile, which fuses the surrounding operations: below these sizes one launch takes
# longer than the memory traffic that the kernel saves (arXiv 2603.22276).
CROSSOVER_FEATURES = 2048
CROSSOVER_ELEMENTS = 2048 * 6144


def refuses(call: Call) -> str | None:
    """Returns the reason why this kernel or the backward kernel cannot run ``call``, or None."""
    base, lora, *_ = call.dtypes
    if base != lora:
        return f"base and lora must share a dtype; got {base} and {lora}"
    return None


def wins(call: Call) -> bool:
    """Returns whether the kernel is faster than torch's operators. In eager mode it always is: each
    operator is a launch and a pass over memory."""
    if not torch.compiler.is_compiling():
        return True
    elements = call.rows * call.features
    return call.features >= CROSSOVER_FEATURES and elements >= CROSSOVER_ELEMENTS


@operator("torch_dora::compose")
def compose(
    base: Tensor,
    lora: Tensor,
    g: Tensor,
    bias: Tensor | None,
    scale: float,
    delta: bool,
    want_inner: bool,
) -> list[Tensor]:
    """Returns [y, or ΔY if ``delta``; inner if ``want_inner``], contiguous and in base's dtype."""
    base, g = base.contiguous(), g.contiguous()
    results = [torch.empty_like(base) for _ in range(1 + want_inner)]
    features = base.shape[-1]
    rows = base.numel() // max(1, features)
    if rows == 0 or features == 0:
        return results
    prepared(rows, features, scale, bias is not None, delta, want_inner)(
        base,
        lora.contiguous(),
        g,
        g if bias is None else bias.contiguous(),
        results[0],
        results[-1],
    )
    return results


def prepared(
    rows: int,
    features: int,
    scale: float,
    has_bias: bool,
    delta: bool,
    want_inner: bool,
    adds: bool = False,
) -> Launch:
    """Returns the launch for contiguous tensors of these sizes. Inner may be written over base.

    Args:
        adds: whether the result is added to what is in its tensor.
    """
    return _launch(CONFIG, rows, features, scale, has_bias, delta, want_inner, adds)


@functools.lru_cache(1024)
def _launch(
    config: Config,
    rows: int,
    features: int,
    scale: float,
    has_bias: bool,
    delta: bool,
    want_inner: bool,
    adds: bool,
) -> Launch:
    columns = min(config.columns, next_power_of_2(features))
    return Launch(
        kernel,
        (cdiv(rows, config.rows) * cdiv(features, columns),),
        (rows, features, scale),
        DELTA=delta,
        ADDS=adds,
        HAS_BIAS=has_bias,
        ADDS_BIAS=False,
        WITH_INNER=want_inner,
        ROWS=config.rows,
        COLUMNS=columns,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )


@compose.fake
def _(base, lora, g, bias, scale, delta, want_inner):
    return [base.new_empty(base.shape) for _ in range(1 + want_inner)]
