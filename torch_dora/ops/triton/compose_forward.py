"""Launches of :mod:`dora_common.triton.compose_forward`.

Compose forward: y or ΔY in one pass, and also inner if g requires a gradient.
"""

import torch
from torch import Tensor

from dora_common.triton.compose_forward import CONFIG, kernel
from dora_common.triton.jit import cdiv, next_power_of_2
from torch_dora.ops.choose import Call
from torch_dora.ops.operator import operator
from torch_dora.ops.triton.jit import launch_kernel

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
    columns = min(CONFIG.columns, next_power_of_2(features))
    launch_kernel(
        kernel,
        (cdiv(rows, CONFIG.rows) * cdiv(features, columns),),
        base,
        lora.contiguous(),
        g,
        g if bias is None else bias.contiguous(),
        results[0],
        results[-1],
        rows,
        features,
        scale,
        DELTA=delta,
        HAS_BIAS=bias is not None,
        ADDS_BIAS=False,
        WITH_INNER=want_inner,
        ROWS=CONFIG.rows,
        COLUMNS=columns,
        num_warps=CONFIG.warps,
        enable_fp_fusion=True,
    )
    return results


@compose.fake
def _(base, lora, g, bias, scale, delta, want_inner):
    return [base.new_empty(base.shape) for _ in range(1 + want_inner)]
