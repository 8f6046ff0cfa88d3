"""Reads quantised weights of a Hugging Face folder in their own format.

A weight [out, in] becomes a `qwix.QArray` [in, out] with fp32 scales. Two formats are supported.

bitsandbytes NF4:
  weight: U8 [out·in / 2, 1]. Each byte holds two codes, the first in the upper half. The bytes can
    be stored as another dtype (bnb_4bit_quant_storage).
  weight.absmax: one scale for each block of 64 inputs; 0 for a block of zeros. With double
    quantisation, absmax is U8 and scale = nested_quant_map[absmax]·nested_absmax + nested_offset.
  weight.quant_state.bitsandbytes__nf4: JSON with the shape, the block sizes and the offset.

FP8, where value = weight · scale:
  weight: F8_E4M3 [out, in], without its codes of NaN.
  weight_scale: one scale for the tensor, [] or [1], or one per output feature, [out] or [out, 1];
    or, with strategy "block" of compressed-tensors, one for each block, as in weight_scale_inv.
  weight_scale_inv: instead of weight_scale, one scale for each block of 128 x 128, or of the size
    in config.json: [⌈out / 128⌉, ⌈in / 128⌉]. Despite the name, it is multiplied by as well.
"""

import functools
import itertools
import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.lm.models.config import USE_16_BITS
from jax_dora.lm.models.tensor_files import StoredTensor
from jax_dora.quantisation import NF4, make

STATE = ".quant_state.bitsandbytes__"
BLOCK = 128  # the block size if config.json has none


class QuantisedTensor(NamedTuple):
    """A quantised weight in a folder.

    Attributes:
      weight: the tensor of quantised values, as stored.
      parts: the tensors with its scales and metadata. Keys are the part of the tensor's name that
        follows the weight's name, such as ".absmax" or "_scale".
      shape: the shape of the weight, (out, in).
      block: the numbers of rows and columns of a block, if scales of blocks are possible.
    """

    weight: StoredTensor
    parts: dict[str, StoredTensor]
    shape: tuple[int, int]
    block: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, name: str, stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
    ) -> Self | None:
        """Returns the quantised weight `name`, or None if the weight is not quantised.

        Args:
          name: the name of the tensor.
          stored: all tensors of the folder.
          config: the contents of its config.json.

        Raises:
          NotImplementedError: the format is not supported.
          ValueError: the tensors do not have the shapes of the format, or scales are not finite.
        """
        weight = stored.get(name)
        if weight is None:
            return None
        parts = {
            part.removeprefix(name): tensor
            for part, tensor in stored.items()
            if part.startswith((f"{name}.", f"{name}_scale"))
        }
        if weight.dtype == np.uint8 or any(part.startswith(STATE) for part in parts):
            return cls._nf4(name, weight, parts)
        if weight.dtype.itemsize > 1:
            return None
        if len(weight.shape) != 2 or len({"_scale", "_scale_inv"} & parts.keys()) != 1:
            raise NotImplementedError(
                f"{name} in {weight.file} is {weight.dtype} {weight.shape} with "
                f"{sorted(parts) or 'no scales'}; expected [out, in] with either weight_scale "
                f"or weight_scale_inv: {USE_16_BITS}"
            )
        block = _block(name, _object(config.get("quantization_config")))
        if block is None and "_scale_inv" in parts:
            block = BLOCK, BLOCK
        tensor = cls(weight, parts, (weight.shape[0], weight.shape[1]), block)
        tensor._fp8_scales()  # raises an error if the scales are not valid
        return tensor

    @classmethod
    def _nf4(cls, name: str, weight: StoredTensor, parts: dict[str, StoredTensor]) -> Self:
        kinds = [part.removeprefix(STATE) for part in parts if part.startswith(STATE)]
        if kinds != ["nf4"] or ".absmax" not in parts or ".quant_map" not in parts:
            raise NotImplementedError(
                f"{name} in {weight.file} is {weight.dtype} with {sorted(parts)}; expected "
                "bitsandbytes NF4: absmax, quant_map and quant_state.bitsandbytes__nf4: "
                f"{USE_16_BITS}"
            )
        state = _state(parts)
        out, in_features = state.shape
        if state.blocksize != 64 or in_features % 64:
            raise NotImplementedError(
                f"{name} in {weight.file} has blocks of {state.blocksize} along {in_features} "
                "input features; expected blocks of 64 and a multiple of 64 features: "
                f"{USE_16_BITS}"
            )
        size = math.prod(weight.shape) * weight.dtype.itemsize
        if size * 2 != out * in_features:
            raise ValueError(
                f"{name} in {weight.file} has {size} bytes; expected "
                f"{out * in_features // 2} for its shape {[out, in_features]}: {USE_16_BITS}"
            )
        blocks = out * in_features // 64
        shapes = {".absmax": blocks, ".quant_map": len(NF4)}
        if parts[".absmax"].dtype == np.uint8:
            groups = -(-blocks // state.nested_blocksize)
            shapes |= {".nested_absmax": groups, ".nested_quant_map": 256}
        for part, count in shapes.items():
            if part not in parts:
                raise ValueError(
                    f"{name} in {weight.file} has no {part[1:]}, but its absmax is uint8; expected "
                    f"double quantisation with {part[1:]} of shape ({count},): {USE_16_BITS}"
                )
            _check_shape(parts[part], [(count,)], f"for a weight of shape {(out, in_features)}")
        if not np.allclose(parts[".quant_map"].read(), NF4, atol=1e-6):
            raise NotImplementedError(
                f"{name} in {weight.file} has a quant_map other than NF4's; expected NF4's: "
                f"{USE_16_BITS}"
            )
        return cls(weight, parts, (out, in_features))

    @property
    def is_nf4(self) -> bool:
        return ".absmax" in self.parts

    @property
    def names(self) -> set[str]:
        """The names of the weight and of all its parts."""
        return {self.weight.name, *(part.name for part in self.parts.values())}

    @property
    def abstract(self) -> Any:
        """The abstract `qwix.QArray` [in, out]."""
        (out, in_features), f32 = self.shape, jnp.dtype(jnp.float32)
        if self.is_nf4:
            stored, scales, qtype = jnp.uint4, (in_features // 64, out), "nf4"
        else:
            stored, qtype = jnp.float8_e4m3fn, "float8_e4m3fn"
            scales = self._fp8_scales().shape[::-1]
        qvalue = jax.ShapeDtypeStruct((in_features, out), stored)
        return make(qvalue, jax.ShapeDtypeStruct(scales, f32), qtype)

    def read(self) -> Any:
        """Returns the `qwix.QArray` [in, out] on the default device.

        The host holds the whole tensor while it is read.

        Raises:
          ValueError: a scale is not valid, or a code is that of NaN.
        """
        if self.is_nf4:
            packed = self.weight.read().reshape(-1).view(np.uint8)
            codes, scale = _unpack_nf4(packed, self._absmax(), self.shape)
            return make(codes, scale, "nf4")
        weight = self.weight.read()
        _check_fp8(self.weight, weight)
        return make(jnp.asarray(weight).T, jnp.asarray(self._fp8_scales().T), "float8_e4m3fn")

    def _absmax(self) -> np.ndarray:
        part = self.parts[".absmax"]
        absmax = part.read().reshape(-1)
        if absmax.dtype == np.uint8:
            state = _state(self.parts)
            scales = self.parts[".nested_absmax"].read().reshape(-1)
            # A block can be larger than the weight, and then has no need of its size in memory.
            size = min(state.nested_blocksize, absmax.size)
            scales = np.repeat(scales, size)[: absmax.size]
            levels = self.parts[".nested_quant_map"].read().reshape(-1)[absmax]
            absmax = levels * scales + np.float32(state.nested_offset)
        # Scales are not always positive: blocks of zeros have scale 0, and with double quantisation
        # a small number of either sign.
        _check_scales(part, np.isfinite(absmax), absmax, "finite numbers")
        return absmax.astype(np.float32)

    def _fp8_scales(self) -> np.ndarray:
        """Returns f32 scales of a shape that divides [out, in], one for each tile."""
        out, _ = self.shape
        part = self.parts.get("_scale") or self.parts["_scale_inv"]
        grid, expected = None, {}
        if "_scale" in self.parts:
            # A shape such as [1, in] means one scale for each input feature.
            shapes = [(), (1,), (1, 1), (out,), (out, 1)]
            expected["one scale, or one for each output feature"] = shapes
        if self.block is not None:
            grid = tuple(-(-n // width) for n, width in zip(self.shape, self.block, strict=True))
            expected[f"for blocks of {self.block}"] = [grid]
        reason = f"{', or '.join(expected)}, of a weight of shape {self.shape}"
        _check_shape(part, list(itertools.chain(*expected.values())), reason)
        scales = part.read().astype(np.float32)
        valid = np.isfinite(scales) & (scales > 0)
        _check_scales(part, valid, scales, "positive finite numbers")
        if self.block is None or part.shape != grid:
            return scales.reshape(-1, 1)
        for axis, (size, width) in enumerate(zip(self.shape, self.block, strict=True)):
            # A block can extend beyond the edge of the weight. Blocks are split into tiles that
            # divide the weight.
            tile = math.gcd(size, width)
            scales = np.repeat(scales, width // tile, axis)
            scales = np.take(scales, range(size // tile), axis)
        return scales


def _check_shape(part: StoredTensor, shapes: list[tuple[int, ...]], reason: str) -> None:
    if tuple(part.shape) not in shapes:
        raise ValueError(
            f"{part.name} in {part.file} has shape {part.shape}; expected "
            f"{' or '.join(map(str, shapes))}, {reason}: {USE_16_BITS}"
        )


def _check_scales(part: StoredTensor, valid: np.ndarray, scales: np.ndarray, expected: str) -> None:
    if not valid.all():
        raise ValueError(
            f"{part.name} in {part.file} has scales from {scales.min()} to {scales.max()}; "
            f"expected {expected}: copy the folder again, or quantise the model again"
        )


def _check_fp8(part: StoredTensor, codes: np.ndarray) -> None:
    """Raises ValueError if a code of a weight is NaN."""
    # NaN is 0x7F, the largest int8, or 0xFF, the largest uint8. Two maxima need no memory and much
    # less time than the reading does.
    if codes.view(np.int8).max() == 0x7F or codes.view(np.uint8).max() == 0xFF:
        raise ValueError(
            f"{part.name} in {part.file} has {np.count_nonzero(np.isnan(codes))} of {codes.size} "
            "codes that are NaN, 0x7F or 0xFF; expected finite numbers: copy the folder again, or "
            "quantise the model again"
        )


@functools.partial(jax.jit, static_argnums=2)
def _unpack_nf4(
    packed: jax.Array, absmax: jax.Array, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes uint4[in, out] and the scales [in / 64, out] of a weight [out, in].

    A block of scale 0 gets the scale 1 and the code of 0, since no scale of a `QArray` may be 0.
    """
    codes = jnp.stack([packed >> 4, packed & 15], axis=1).reshape(-1, 64)
    is_zero = absmax == 0
    codes = jnp.where(is_zero[:, None], NF4.index(0), codes).astype(jnp.uint4)
    scales = jnp.where(is_zero, 1, absmax)
    return codes.reshape(shape).T, scales.reshape(shape[0], -1).T


def _block(name: str, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block in a quantization_config, or None if it has none."""
    field = "weight_block_size"
    found: list[Any] = [settings[field]] if settings.get(field) is not None else []
    if settings.get("quant_method") == "compressed-tensors":
        field = "block_structure"
        groups = _object(settings.get("config_groups")).values()
        weights = [_object(_object(group).get("weights")) for group in groups]
        found = [one.get(field) for one in weights if one.get("strategy") == "block"]
    for block in found:
        if not _is_pair(block):
            raise ValueError(
                f"config.json has {field} {reprlib.repr(block)}; expected two positive integers, "
                f"the numbers of rows and columns of {name} that share a scale: {USE_16_BITS}"
            )
    if any(block != found[0] for block in found):
        raise NotImplementedError(
            f"config.json has {field} {' and '.join(map(str, found))}; expected the same in all "
            f"groups of layers: {USE_16_BITS}"
        )
    return (found[0][0], found[0][1]) if found else None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_positive, value))


class _State(NamedTuple):
    """The fields of a `quant_state`. Without double quantisation, the nested ones are not used."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = 1
    nested_offset: float = 0.0


def _is_float32(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= float(jnp.finfo(jnp.float32).max)


# What is expected of each field of a `quant_state`.
_FIELDS = {
    "shape": ("two positive integers, [out, in]", _is_pair),
    "blocksize": ("a positive integer", _is_positive),
    "nested_blocksize": ("a positive integer", _is_positive),
    "nested_offset": ("a finite number in the range of float32", _is_float32),
}


def _state(parts: Mapping[str, StoredTensor]) -> _State:
    """Returns the `quant_state` of an NF4 weight.

    Raises:
      ValueError: it is not a JSON object, or a field is missing or has an unexpected value.
    """
    part = parts[f"{STATE}nf4"]
    found, wanted = f"{part.name} in {part.file}", "a JSON object with the weight's shape"
    try:
        state = json.loads(part.read().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{found} is not JSON: {error}; expected {wanted}: {USE_16_BITS}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{found} holds a {type(state).__name__}; expected {wanted}: {USE_16_BITS}"
        )
    names = list(_FIELDS) if parts[".absmax"].dtype == np.uint8 else ["shape", "blocksize"]
    for name in names:
        expected, is_valid = _FIELDS[name]
        if not is_valid(state.get(name)):
            has = f"{name} {reprlib.repr(state[name])}" if name in state else f"no {name}"
            raise ValueError(f"{found} has {has}; expected {expected}: {USE_16_BITS}")
    return _State(**{name: state[name] for name in names})
