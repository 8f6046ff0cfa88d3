"""torchao's quantised weights: creates them, splits them into codes and scales, and dequantises
them."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from jax_dora.ops.quantised import NF4


class Format(NamedTuple):
    """A format of quantised weights [out, in].

    Attributes:
      qtype: the name of the codes, as in jax_dora.
      tile: the rows and columns of W that share a scale; None for one scale per row.
    """

    qtype: str
    tile: tuple[int, int] | None = None

    @property
    def roundings(self) -> int:
        """Returns how often an element of W is rounded for a product: the codebook's number and
        its product with the scale, or the latter alone."""
        return 2 if self.qtype == "nf4" else 1

    def __str__(self) -> str:
        return self.qtype if self.tile is None else f"{self.qtype} in tiles of {_times(self.tile)}"


# float8 in tiles of several rows and columns is the format of block-wise FP8 checkpoints.
FORMATS = (
    Format("nf4", (1, 64)),
    Format("int4", (1, 64)),
    Format("int8"),
    Format("int8", (1, 128)),
    Format("float8_e4m3fn"),
    Format("float8_e4m3fn", (64, 128)),
)


class Parts(NamedTuple):
    """The arrays of a quantised weight: codes [out, in] (float8 codes as bytes), and fp32 scales,
    one per tile."""

    qtype: str
    codes: np.ndarray
    scale: np.ndarray


def quantised(weight: torch.Tensor, form: Format) -> Any:
    """Returns a float weight [out, in] quantised by torchao.

    torch_dora reads none of torchao's int4 tensors. The codes of int4 are therefore in an
    Int8Tensor, as PEFT and torch_dora read them; jax_dora gets them as int4.
    """
    import torchao.quantization
    from torchao.quantization.granularity import PerBlock, PerRow
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    tensors: Any = torchao.quantization
    granularity = PerRow() if form.tile is None else PerBlock(form.tile)
    match form.qtype:
        case "nf4":
            tensor = to_nf4(weight, 64, weight.numel() // 64)
            # torchao's codebook has only four digits.
            tensor.nf4 = torch.tensor(NF4, device=weight.device)
            return tensor
        case "int4":
            int4: Any = vars(torch)["int4"]  # pyright does not know it
            four = tensors.IntxUnpackedToInt8Tensor.from_hp(weight, form.tile, int4)
            arrays = four.qdata, four.scale.float(), list(four.block_size), weight.dtype
            tensor = tensors.Int8Tensor(*arrays, zero_point=four.zero_point)
            tensor.qtype = "int4"
            return tensor
        case "int8":
            return tensors.Int8Tensor.from_hp(weight, granularity)
        case _:
            float8 = {"float8_dtype": torch.float8_e4m3fn, "granularity": granularity}
            return tensors.Float8Tensor.from_hp(weight, **float8)


def is_quantised(weight: Any) -> bool:
    """Returns whether `weight` is a quantised tensor of torchao."""
    return type(weight).__module__.startswith("torchao.")


def parts(weight: Any) -> Parts:
    """Returns the codes and scales of a quantised weight, whose zero points are 0."""
    if not hasattr(weight, "qdata"):
        scales = weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
        packed = weight.quantized_data.cpu().numpy()
        codes = np.stack([packed >> 4, packed & 15], 1).reshape(tuple(weight.shape))
        return Parts("nf4", codes, scales.float().cpu().numpy().reshape(weight.shape[0], -1))
    scale = weight.scale.float().cpu().numpy()
    if weight.qdata.dtype == torch.int8:
        return Parts(getattr(weight, "qtype", "int8"), weight.qdata.cpu().numpy(), scale)
    return Parts("float8_e4m3fn", weight.qdata.view(torch.uint8).cpu().numpy(), scale)


def dequantised(weight: Parts) -> np.ndarray:
    """Returns the weight [out, in] in fp64."""
    values: Any = weight.codes
    if weight.qtype == "float8_e4m3fn":
        values = values.view(ml_dtypes.float8_e4m3fn)
    elif weight.qtype == "nf4":
        values = np.array(NF4, np.float32)[values]
    scale = weight.scale.astype(np.float64)
    for axis in (0, 1):
        scale = np.repeat(scale, values.shape[axis] // scale.shape[axis], axis)
    return values.astype(np.float64) * scale


def _times(sizes: tuple[int, int]) -> str:
    return "×".join(map(str, sizes))
