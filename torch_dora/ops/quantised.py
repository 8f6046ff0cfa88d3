"""Quantised weights (torchao's, and bitsandbytes' 4 bits), read as floats a few rows at a time.

    Int8Tensor      W = (qdata - zero_point)∘scale, one scale per block
    Float8Tensor    W = qdata∘scale
    NF4Tensor       W = codebook[code]·scale, two codes a byte, one scale per run of 64 inputs
    Params4bit      the same in bitsandbytes' NF4 or FP4, one scale per run of the flattened weight;
                    represented here by a `Bits4`, which has the weight's shape

This module imports neither torchao nor bitsandbytes: whoever created such a weight has imported it.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dora.ops.shards import is_sharded

# The size of a block of rows in floats, with its temporaries. It keeps a GPU busy for longer than
# the host needs to launch the work.
BLOCK_BYTES = 128 * 2**20
_BLOCKWISE = ("Int8Tensor", "Float8Tensor")


class Bits4:
    """The weight [out, in] of bitsandbytes' Params4bit, whose own shape is that of its bytes: u8
    with two codes each, the first in the upper half; its QuantState, the format and the scales; and
    its nominal dtype. It is no tensor, so that torch.compile can create one inside a graph, but has
    the attributes that operators read from a frozen weight."""

    requires_grad = False
    ndim = 2

    def __init__(self, packed: Tensor, state: Any, dtype: torch.dtype) -> None:
        self.packed, self.state, self.dtype = packed, state, dtype
        self.shape, self.device = state.shape, packed.device

    def detach(self) -> "Bits4":
        """Returns the weight itself: it has no gradient."""
        return self


class Codes(NamedTuple):
    """A weight [out, in] as 4-bit codes: packed u8, two codes a byte, row by row, the first in the
    upper half; the value of each code, f32[16]; f32 scales, one per run of the flattened weight;
    and the run's length, an even number."""

    packed: Tensor
    levels: Tensor
    scales: Tensor
    run: int


def as_matrix(weight: Any) -> Any:
    """Returns a `Bits4` for bitsandbytes' Params4bit, and any other weight unchanged.

    Raises:
        TypeError: the weight is not quantised yet.
        NotImplementedError: its layer has reordered it for CPUs.
    """
    if type(weight) in (Tensor, nn.Parameter) or type(weight).__name__ != "Params4bit":
        return weight
    return bits4(weight.data, weight.quant_state, None)


def bits4(packed: Tensor, state: Any, dtype: torch.dtype | None) -> Bits4:
    """Returns the `Bits4` for these bytes and their QuantState, with `dtype` or else the dtype
    before quantisation. Raises the errors of `as_matrix`."""
    refuse_sharded_codes(packed, are_codes=True)
    if state is None:
        raise TypeError(
            f"weight is a Params4bit of shape {tuple(packed.shape)} that is not quantised yet; "
            "move its layer to a device first, by layer.to, which quantises it"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise NotImplementedError(
            f"weight is a Params4bit of shape {tuple(state.shape)} whose codes and scales "
            "bitsandbytes has put into another order, since its layer was called in evaluation on "
            "a CPU; expected the original order: load the model again and adapt it before it is "
            "called, or call it on a GPU or in training"
        )
    packed = packed if packed.dtype == torch.uint8 else packed.view(torch.uint8)
    return Bits4(packed.reshape(-1), state, dtype or state.dtype)


def is_quantised(weight: Any) -> bool:
    """Returns whether ``weight`` is a quantised tensor, of torchao, bitsandbytes or any other kind:
    the memory does not hold the floats that it represents."""
    # This check comes first because torch.compile cannot read the module name of a plain
    # parameter's class.
    if type(weight) in (Tensor, nn.Parameter):
        return False
    if isinstance(weight, Bits4):
        return True
    package = type(weight).__module__.partition(".")[0]
    return isinstance(weight, Tensor) and package in ("torchao", "bitsandbytes")


def refuse_sharded_codes(weight: Any, *, are_codes: bool = False) -> None:
    """Raises NotImplementedError if ``weight`` is a DTensor of codes. ``are_codes`` says that it
    is, even if the codes' dtype does not show it."""
    if not is_sharded(weight):
        return
    part = weight.to_local()
    if are_codes or is_quantised(part) or not part.is_floating_point():
        raise NotImplementedError(
            f"weight is a DTensor of quantised parts, {type(part).__name__} {part.dtype}; expected "
            "the full weight, as FSDP gathers it for a call: let every call compute its norms, or "
            "call torch_dora.freeze before fully_shard"
        )


def check(name: str, weight: Any) -> None:
    """Raises TypeError unless ``weight`` is a quantised matrix of a supported kind."""
    kind = type(weight).__name__
    if kind in ("Bits4", "Params4bit"):
        return
    if getattr(weight, "act_pre_scale", None) is not None:
        raise TypeError(
            f"{name} is torchao's {kind} with an act_pre_scale, by which its layer multiplies its "
            "input; expected a weight without one, as from Int8WeightOnlyConfig"
        )
    if kind in _BLOCKWISE and all(size > 0 for size in weight.block_size):
        return
    if kind == "NF4Tensor" and weight.shape[1] % weight.block_size == 0:
        return
    raise TypeError(
        f"{name} is a {type(weight).__module__}.{kind} of shape {tuple(weight.shape)}; expected "
        f"torchao's {', '.join(_BLOCKWISE)}, or an NF4Tensor whose blocks divide its rows, or "
        "bitsandbytes' Params4bit: quantise it with Int8WeightOnlyConfig, Float8WeightOnlyConfig, "
        "to_nf4 or Linear4bit, or dequantise it"
    )


def act_qtype(weight: Any) -> str | None:
    """Returns the format to which a layer with ``weight`` quantises the rows of its input, or None.

    Raises TypeError if it quantises its input in another way, which an adapted layer would not."""
    settings = getattr(weight, "act_quant_kwargs", None)
    if settings is None:
        return None
    granularity = type(getattr(settings, "granularity", None)).__name__
    dtype = getattr(settings, "float8_dtype", None)
    if (granularity, dtype) == ("PerRow", torch.float8_e4m3fn):
        return "float8_e4m3fn"
    raise TypeError(
        f"base.weight is torchao's {type(weight).__name__} with act_quant_kwargs, by which its "
        "layer quantises its input, and an adapted layer would not; expected rows in FP8, as from "
        "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), or weight-only "
        "quantisation, as from Int8WeightOnlyConfig or Float8WeightOnlyConfig"
    )


def check_scales(weight: Any) -> None:
    """Raises ValueError if scales of a quantised weight are infinite or NaN, or not positive in a
    format where even zeros have a positive scale."""
    is_blockwise = type(weight).__name__ in _BLOCKWISE
    scales = weight.scale if is_blockwise else codes(as_matrix(weight)).scales
    if type(scales) not in (Tensor, nn.Parameter) or scales.is_meta:
        return
    # In 4-bit formats the scale of zeros is 0, or a small number of either sign if the scale itself
    # is quantised.
    are_right = (scales > 0) & scales.isfinite() if is_blockwise else scales.isfinite()
    if not are_right.all():
        expected = "positive finite numbers" if is_blockwise else "finite numbers"
        raise ValueError(
            f"base.weight is a {type(weight).__name__} with scales from {scales.min()} to "
            f"{scales.max()}; expected {expected}: quantise it again, from finite weights"
        )


def check_norm(weight: Any, norm: Tensor) -> None:
    """Raises ValueError if the norm of a quantised weight is NaN."""
    # Its scales have been checked.
    if is_quantised(weight) and not norm.is_meta and norm.isnan().any():
        raise ValueError(
            f"base.weight is a {type(weight).__name__} with codes or zero points that are NaN; "
            "expected numbers: quantise it again, from finite weights"
        )


def dense(weight: Any, dtype: torch.dtype, *, again: bool = False) -> Tensor:
    """Returns a weight in ``dtype``; for a quantised weight a copy, with each element rounded once.
    ``again`` says that the forward pass made the same copy and freed it."""
    if not is_quantised(weight):
        return weight if weight.dtype == dtype else weight.to(dtype)
    stored = _codes_tensor(weight, again)
    if isinstance(weight, Bits4) and dtype != torch.float64:
        return _bits4_rows(weight, stored, _bits4_scales(weight), 0, weight.shape[0], dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for start, rows in _blocks(weight, stored, wide):
        out[start : start + rows.shape[0]] = rows
    return out


def has_codes(weight: Any) -> bool:
    """Returns whether `codes` accepts a quantised weight: it has 4 bits, and each row and run
    begins with a byte."""
    is_even = weight.shape[1] % 2 == 0
    if type(weight).__name__ == "NF4Tensor":
        return is_even and weight.block_size % 2 == 0
    return is_even and isinstance(weight, Bits4)


def codes(weight: Any) -> Codes:
    """Returns the codes and the scales of a 4-bit weight; quantised scales are dequantised."""
    if isinstance(weight, Bits4):
        levels, run = weight.state.code, weight.state.blocksize
        return Codes(weight.packed, levels.float(), _bits4_scales(weight), run)
    scales = _nf4_scales(weight).float()
    return Codes(weight.quantized_data, weight.nf4.float(), scales, weight.block_size)


def _codes_tensor(weight: Any, again: bool) -> Tensor:
    """Returns the tensor of codes of a quantised weight."""
    if isinstance(weight, Bits4):
        stored = weight.packed
    else:
        stored = weight.quantized_data if type(weight).__name__ == "NF4Tensor" else weight.qdata
    if again and torch.compiler.is_compiling():
        # Read the codes through a different expression than the forward pass. A compiler would
        # merge two equal expressions and keep the forward pass's copy of every weight for the
        # backward pass.
        return stored[None][0]
    return stored


def _blocks(weight: Any, stored: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first row, a block of rows in ``dtype``) of a quantised weight [out,
    in]."""
    (out_features, in_features), scales, step = weight.shape, None, 1
    if isinstance(weight, Bits4):
        # This many rows always contain whole runs.
        step = weight.state.blocksize // math.gcd(weight.state.blocksize, in_features)
        scales = _bits4_scales(weight)
    elif type(weight).__name__ == "NF4Tensor":
        scales = _nf4_scales(weight).to(dtype)
    height = max(1, BLOCK_BYTES // max(1, 4 * in_features * dtype.itemsize) // step) * step
    for start in range(0, out_features, height):
        stop = min(start + height, out_features)
        if isinstance(weight, Bits4):
            yield start, _bits4_rows(weight, stored, scales, start, stop, torch.float32).to(dtype)
        elif scales is not None:
            yield start, _nf4_rows(weight, stored, scales, start, stop, dtype)
        else:
            yield start, _blockwise_rows(weight, stored, start, stop, dtype)


def _blockwise_rows(
    weight: Any, stored: Tensor, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    values = stored[start:stop].to(dtype)

    def expand_tiles(tiles: Tensor) -> Tensor:
        """Returns for each element of the rows the value of its tile, in ``dtype``."""
        height = weight.shape[0] // tiles.shape[0]
        rows = torch.arange(start, stop, device=tiles.device) // height
        width = weight.shape[1] // tiles.shape[1]
        return tiles[rows].to(dtype).repeat_interleave(width, dim=1)

    zero_point = getattr(weight, "zero_point", None)
    if zero_point is not None:
        values = values - expand_tiles(zero_point)
    return values * expand_tiles(weight.scale)


def _nf4_scales(weight: Any) -> Tensor:
    return weight.dequantize_scalers(
        weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
    )


def _nf4_rows(
    weight: Any, stored: Tensor, scales: Tensor, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    width, block = weight.shape[1], weight.block_size
    packed = stored[start * width // 2 : stop * width // 2]
    codes = torch.stack([packed >> 4, packed & 15], dim=1).long()
    runs = weight.nf4.to(dtype)[codes].reshape(-1, block)
    run_scales = scales[start * width // block : stop * width // block]
    return (runs * run_scales[:, None]).reshape(stop - start, width)


def _bits4_scales(weight: Bits4) -> Tensor:
    state = weight.state
    if not state.nested:
        return state.absmax.float()
    functional: Any = sys.modules["bitsandbytes"].functional
    return (functional.dequantize_blockwise(state.absmax, state.state2) + state.offset).float()


def _bits4_rows(
    weight: Bits4, stored: Tensor, scales: Any, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    width, block = weight.shape[1], weight.state.blocksize
    first, last = start * width, stop * width
    rows = torch.ops.bitsandbytes.dequantize_4bit(
        stored[first // 2 : (last + 1) // 2, None],
        scales[first // block : -(-last // block)],
        block,
        weight.state.quant_type,
        # A run may span two rows, which the CPU kernel does not support: pass one long row.
        (1, last - first),
        dtype,
    )
    return rows.reshape(stop - start, width)


def norm(weight: Any, lora_a: Tensor, lora_b: Tensor, scale: float, dtype: Any) -> Tensor:
    """Returns ‖weight + scale · lora_b @ lora_a‖ per row of a quantised weight, in ``dtype``, in
    blocks of rows whose floats and temporaries take about ``BLOCK_BYTES``."""
    norms = [torch.empty(0, dtype=dtype, device=weight.device)]
    a = lora_a.to(dtype)
    for start, rows in _blocks(weight, _codes_tensor(weight, False), dtype):
        if scale != 0:
            b = lora_b[start : start + rows.shape[0]].to(dtype)
            rows = torch.addmm(rows, b, a, alpha=scale)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.cat(norms)
