"""torchao's quantised weights: creates them, splits them into codes and scales, and dequantises
them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from jax_dora.ops.quantised import NF4

FORMATS = ("nf4", "int8", "float8_e4m3fn")


class Parts(NamedTuple):
    """The arrays of a quantised weight: codes [out, in] (float8 codes as bytes), and fp32 scales,
    one per tile."""

    qtype: str
    codes: np.ndarray
    scale: np.ndarray


def quantised(weight: torch.Tensor, qtype: str) -> Any:
    """Returns a float weight [out, in] quantised by torchao."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    if qtype == "nf4":
        tensor = to_nf4(weight, 64, weight.numel() // 64)
        # torchao's codebook has only four digits.
        tensor.nf4 = torch.tensor(NF4, device=weight.device)
        return tensor
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device)
    layer.weight = torch.nn.Parameter(weight.clone())
    quantize_(layer, Int8WeightOnlyConfig() if qtype == "int8" else Float8WeightOnlyConfig())
    return layer.weight.detach()


def is_quantised(weight: Any) -> bool:
    """Returns whether `weight` is a quantised tensor of torchao."""
    return type(weight).__module__.startswith("torchao.")


def parts(weight: Any) -> Parts:
    """Returns the codes and scales of a quantised weight."""
    if not hasattr(weight, "qdata"):
        scales = weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
        packed = weight.quantized_data.cpu().numpy()
        codes = np.stack([packed >> 4, packed & 15], 1).reshape(tuple(weight.shape))
        return Parts("nf4", codes, scales.float().cpu().numpy().reshape(weight.shape[0], -1))
    scale = weight.scale.float().cpu().numpy()
    if weight.qdata.dtype == torch.int8:
        return Parts("int8", weight.qdata.cpu().numpy(), scale)
    return Parts("float8_e4m3fn", weight.qdata.view(torch.uint8).cpu().numpy(), scale)


def dequantised(weight: Parts) -> np.ndarray:
    """Returns the weight [out, in] in fp64."""
    values: Any = weight.codes
    if weight.qtype == "float8_e4m3fn":
        values = values.view(ml_dtypes.float8_e4m3fn)
    elif weight.qtype == "nf4":
        values = np.array(NF4, np.float32)[values]
    width = values.shape[1] // weight.scale.shape[1]
    return values.astype(np.float64) * np.repeat(weight.scale.astype(np.float64), width, 1)
