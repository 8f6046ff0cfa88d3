"""Quantised weights: torchao's tensors, as rows of floats, a few at a time.

    Int8Tensor      W = (qdata - zero_point)∘scale, a scale for each block
    Float8Tensor    W = qdata∘scale
    NF4Tensor       W = codebook[code]·scale, two codes a byte, a scale for each run of 64 inputs

Nothing here imports torchao: whoever makes such a weight has.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# The floats of a block of rows, and what is computed beside them.
BLOCK_BYTES = 32 * 2**20
_BLOCKWISE = ("Int8Tensor", "Float8Tensor")


def is_quantised(weight: Any) -> bool:
    """Returns whether ``weight`` is a tensor of torchao's, of bitsandbytes' or another quantised
    one, whose memory does not hold the floats that it stands for."""
    # Asked first: torch.compile cannot read the name of a plain parameter's module.
    if type(weight) in (Tensor, nn.Parameter):
        return False
    package = type(weight).__module__.partition(".")[0]
    return isinstance(weight, Tensor) and package in ("torchao", "bitsandbytes")


def check(name: str, weight: Any) -> None:
    """Raises TypeError unless ``weight`` is a quantised matrix of a kind that is read here."""
    kind = type(weight).__name__
    if getattr(weight, "act_pre_scale", None) is not None:
        raise TypeError(
            f"{name} is torchao's {kind} with an act_pre_scale, by which its layer multiplies what "
            "it reads; expected a weight that stands for itself, as Int8WeightOnlyConfig makes it"
        )
    if kind in _BLOCKWISE and all(size > 0 for size in weight.block_size):
        return
    if kind == "NF4Tensor" and weight.shape[1] % weight.block_size == 0:
        return
    raise TypeError(
        f"{name} is a {type(weight).__module__}.{kind} of shape {tuple(weight.shape)}; expected "
        f"torchao's {', '.join(_BLOCKWISE)}, or an NF4Tensor whose blocks divide its rows: "
        "quantise it by Int8WeightOnlyConfig, Float8WeightOnlyConfig or to_nf4, or dequantise it"
    )


def check_activations(name: str, weight: Any) -> None:
    """Raises TypeError if a layer with ``weight`` quantises what it reads, as no adapted one
    does."""
    if getattr(weight, "act_quant_kwargs", None) is not None:
        raise TypeError(
            f"{name} is torchao's {type(weight).__name__} with act_quant_kwargs, by which its "
            "layer quantises what it reads, and an adapted one would not; expected a weight that "
            "is quantised alone, as by Int8WeightOnlyConfig or Float8WeightOnlyConfig"
        )


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight in ``dtype``; of a quantised one a copy, each element rounded once."""
    if not is_quantised(weight):
        return weight if weight.dtype == dtype else weight.to(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for start, rows in blocks(weight, torch.float64 if dtype == torch.float64 else torch.float32):
        out[start : start + rows.shape[0]] = rows
    return out


def blocks(weight: Any, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, some rows of a quantised weight [out, in]) in ``dtype``."""
    out_features, in_features = weight.shape
    scales = _nf4_scales(weight).to(dtype) if type(weight).__name__ == "NF4Tensor" else None
    height = max(1, BLOCK_BYTES // max(1, 4 * in_features * dtype.itemsize))
    for start in range(0, out_features, height):
        stop = min(start + height, out_features)
        if scales is None:
            yield start, _blockwise_rows(weight, start, stop, dtype)
        else:
            yield start, _nf4_rows(weight, scales, start, stop, dtype)


def _blockwise_rows(weight: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    values = weight.qdata[start:stop].to(dtype)

    def spread(tiles: Tensor) -> Tensor:
        """Returns for each element of the rows the number of its tile, in ``dtype``."""
        height = weight.shape[0] // tiles.shape[0]
        rows = torch.arange(start, stop, device=tiles.device) // height
        width = weight.shape[1] // tiles.shape[1]
        return tiles[rows].to(dtype).repeat_interleave(width, dim=1)

    zero_point = getattr(weight, "zero_point", None)
    if zero_point is not None:
        values = values - spread(zero_point)
    return values * spread(weight.scale)


def _nf4_scales(weight: Any) -> Tensor:
    return weight.dequantize_scalers(
        weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
    )


def _nf4_rows(weight: Any, scales: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    width, block = weight.shape[1], weight.block_size
    packed = weight.quantized_data[start * width // 2 : stop * width // 2]
    codes = torch.stack([packed >> 4, packed & 15], dim=1).long()
    runs = weight.nf4.to(dtype)[codes].reshape(-1, block)
    of_rows = scales[start * width // block : stop * width // block]
    return (runs * of_rows[:, None]).reshape(stop - start, width)


def norm(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, dtype: Any) -> Tensor:
    """Returns ‖weight + scale · lora_b @ lora_a‖ per row of a quantised weight, in ``dtype``, block
    by block: no [out, in] tensor of floats is made."""
    found = torch.empty(weight.shape[0], dtype=dtype, device=weight.device)
    a = lora_a.to(dtype)
    for start, rows in blocks(weight, dtype):
        part = slice(start, start + rows.shape[0])
        if scale != 0:
            rows = torch.addmm(rows, lora_b[part].to(dtype), a, alpha=scale)
        found[part] = torch.linalg.vector_norm(rows, dim=1)
    return found
