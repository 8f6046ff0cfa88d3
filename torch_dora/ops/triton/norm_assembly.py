"""Launches of :mod:`dora_common.triton.norm_assembly`.

Norm assembly: computes the norm from three sums per output feature, in one small launch.
"""

import torch
from torch import Tensor

from dora_common.triton.jit import cdiv
from dora_common.triton.norm_assembly import COLUMNS, WARPS, kernel
from torch_dora.ops.triton.jit import launch_kernel


def launch(base_sq: Tensor, cross: Tensor, ba_sq: Tensor, scale: float) -> Tensor:
    """Returns the norm f32[out] for three sums f32[out]."""
    norm = torch.empty_like(base_sq)
    features = norm.shape[0]
    if features:
        launch_kernel(
            kernel,
            (cdiv(features, COLUMNS),),
            base_sq.contiguous(),
            cross.contiguous(),
            ba_sq.contiguous(),
            norm,
            features,
            2 * scale,
            scale * scale,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return norm
