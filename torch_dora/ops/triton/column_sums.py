"""Launches of :mod:`dora_common.triton.column_sums`.

The second stage of a reduction over rows: adds up partial sums, column by column.
"""

import functools
from typing import Literal

from torch import Tensor

from dora_common.triton.column_sums import ELEMENTS, MIN_COLUMNS, WARPS, kernel
from dora_common.triton.jit import cdiv, next_power_of_2
from torch_dora.ops.triton.jit import Launch


@functools.lru_cache(1024)
def prepared(parts: int, features: int, then: str, eps: float, elements: int = ELEMENTS) -> Launch:
    """Returns the launch for tensors of these sizes."""
    padded = next_power_of_2(parts)
    # Of few parts a thread adds up one column, so that more programs share them.
    columns = max(MIN_COLUMNS, min(elements // padded, 32 * WARPS))
    return Launch(
        kernel,
        (cdiv(features, columns),),
        (parts, features, eps),
        THEN=then,
        PARTS=padded,
        COLUMNS=columns,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def launch(
    partial: Tensor,
    then: Literal["sum", "root", "scale", "divide"] = "sum",
    factor: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Returns the sums over the parts, or what ``then`` makes of them."""
    parts, features = partial.shape
    shape = (2, features) if then == "scale" else (features,)
    result = partial.new_empty(shape)
    factor = None if factor is None else factor.contiguous()
    prepared(parts, features, then, eps, ELEMENTS)(partial, factor, result)
    return result
