"""Weights that a Hugging Face folder holds quantised already, read as they are.

    bitsandbytes NF4   weight U8 [out·in / 2, 1], two codes a byte, the first in the upper half, or
                       the same bytes as numbers of another dtype (bnb_4bit_quant_storage);
                       weight.absmax, a scale for each run of 64 inputs; weight.quant_state…, JSON.
                       Of doubly quantised scales, absmax is U8 and
                       scale = nested_quant_map[absmax]·nested_absmax + nested_offset
    FP8                weight F8_E4M3 [out, in] with weight_scale, for all of it ([], [1]) or for
                       each output feature ([out], [out, 1]); or with weight_scale_inv
                       [⌈out / 128⌉, ⌈in / 128⌉], which is multiplied by too

A weight [out, in] becomes a `qwix.QArray` [in, out], with scales in fp32.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.models.weights import StoredTensor
from jax_dora.ops.quantised import NF4
from jax_dora.ops.rounding import make

STATE = ".quant_state.bitsandbytes__"
BLOCK = 128  # where config.json does not say


class QuantisedTensor(NamedTuple):
    """A quantised weight of a folder.

    Attributes:
      weight: its qvalues, as stored.
      parts: what else it takes, by the part of their names that follows the weight's.
      shape: [out, in].
      block: the rows and columns that share a `weight_scale_inv`.
    """

    weight: StoredTensor
    parts: dict[str, StoredTensor]
    shape: tuple[int, int]
    block: tuple[int, int] = (BLOCK, BLOCK)

    @classmethod
    def of(
        cls, name: str, stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
    ) -> Self | None:
        """Returns the quantised weight `name`, or None where it is a float one.

        Args:
          stored: the folder's tensors.
          config: the contents of its config.json.
        """
        weight = stored.get(name)
        if weight is None:
            return None
        parts = {
            one.removeprefix(name): tensor
            for one, tensor in stored.items()
            if one.startswith((f"{name}.", f"{name}_scale"))
        }
        if weight.dtype == np.uint8 or any(one.startswith(STATE) for one in parts):
            return cls._nf4(name, weight, parts)
        if weight.dtype.itemsize > 1:
            return None
        if len(weight.shape) != 2 or not {"_scale", "_scale_inv"} & parts.keys():
            raise NotImplementedError(
                f"{name} in {weight.file} is {weight.dtype} {weight.shape} with "
                f"{sorted(parts) or 'nothing beside it'}; expected [out, in] with a weight_scale "
                "or weight_scale_inv"
            )
        settings = config.get("quantization_config") or {}
        rows, columns = settings.get("weight_block_size") or (BLOCK, BLOCK)
        found = cls(weight, parts, (weight.shape[0], weight.shape[1]), (rows, columns))
        found._fp8_scales()
        return found

    @classmethod
    def _nf4(cls, name: str, weight: StoredTensor, parts: dict[str, StoredTensor]) -> Self:
        kinds = [one.removeprefix(STATE) for one in parts if one.startswith(STATE)]
        if kinds != ["nf4"] or ".absmax" not in parts or ".quant_map" not in parts:
            raise NotImplementedError(
                f"{name} in {weight.file} is {weight.dtype} with {sorted(parts)}; expected "
                "bitsandbytes NF4: absmax, quant_map and quant_state.bitsandbytes__nf4"
            )
        state = _state(parts)
        out, in_features = state["shape"]
        if state["blocksize"] != 64 or in_features % 64:
            raise NotImplementedError(
                f"{name} in {weight.file} has blocks of {state['blocksize']} along {in_features} "
                "input features; expected blocks of 64 that divide them"
            )
        if not np.allclose(parts[".quant_map"].whole(), NF4, atol=1e-6):
            raise NotImplementedError(f"{name} in {weight.file} has a quant_map other than NF4's")
        size = math.prod(weight.shape) * weight.dtype.itemsize
        if size * 2 != out * in_features:
            raise ValueError(
                f"{name} in {weight.file} has {size} bytes; expected "
                f"{out * in_features // 2} for its shape {[out, in_features]}"
            )
        return cls(weight, parts, (out, in_features))

    @property
    def is_nf4(self) -> bool:
        return ".absmax" in self.parts

    @property
    def names(self) -> set[str]:
        """Returns the names of all tensors that it is made of."""
        return {self.weight.name, *(one.name for one in self.parts.values())}

    @property
    def abstract(self) -> Any:
        """Returns the `qwix.QArray` [in, out], of shapes alone."""
        (out, in_features), f32 = self.shape, jnp.dtype(jnp.float32)
        if self.is_nf4:
            stored, scales, qtype = jnp.uint4, (in_features // 64, out), "nf4"
        else:
            stored, qtype = jnp.float8_e4m3fn, "float8_e4m3fn"
            scales = self._fp8_scales().shape[::-1]
        qvalue = jax.ShapeDtypeStruct((in_features, out), stored)
        return make(qvalue, jax.ShapeDtypeStruct(scales, f32), qtype)

    def read(self) -> Any:
        """Returns the `qwix.QArray` [in, out] on the default device; the host holds this tensor."""
        if self.is_nf4:
            packed = self.weight.whole().reshape(-1).view(np.uint8)
            codes, scale = _unpacked(packed, self._absmax(), self.shape)
            return make(codes, scale, "nf4")
        qvalue = jnp.asarray(self.weight.whole()).T
        return make(qvalue, jnp.asarray(self._fp8_scales().T), "float8_e4m3fn")

    def _absmax(self) -> np.ndarray:
        part = self.parts[".absmax"]
        absmax = part.whole().reshape(-1)
        if absmax.dtype == np.uint8:
            state = _state(self.parts)
            size = state["nested_blocksize"]
            tops = np.repeat(self.parts[".nested_absmax"].whole().reshape(-1), size)[: absmax.size]
            levels = self.parts[".nested_quant_map"].whole().reshape(-1)[absmax]
            absmax = levels * tops + np.float32(state["nested_offset"])
        # Tiles of zeros have 0 there, or when it is quantised too a small number of either sign.
        _check_scales(part, np.isfinite(absmax), absmax, "finite numbers")
        return absmax.astype(np.float32)

    def _fp8_scales(self) -> np.ndarray:
        """Returns f32 scales that tile [out, in]."""
        out, in_features = self.shape
        if "_scale" in self.parts:
            part = self.parts["_scale"]
            count = math.prod(part.shape)
            if count not in (1, out):
                raise ValueError(
                    f"{part.name} in {part.file} has shape {part.shape}; expected one scale, or "
                    f"{out}, one for each output feature"
                )
            return self._positive(part).reshape(count, 1)
        part = self.parts["_scale_inv"]
        wanted = tuple(
            -(-size // width) for size, width in zip(self.shape, self.block, strict=True)
        )
        if tuple(part.shape) != wanted:
            raise ValueError(
                f"{part.name} in {part.file} has shape {part.shape}; expected {wanted}, for blocks "
                f"of {self.block} of {self.shape}"
            )
        scales = self._positive(part)
        for axis, (size, width) in enumerate(zip((out, in_features), self.block, strict=True)):
            # Blocks that stand over the edge are cut into tiles that do not.
            tile = math.gcd(size, width)
            scales = np.repeat(scales, width // tile, axis)
            scales = np.take(scales, range(size // tile), axis)
        return scales

    @staticmethod
    def _positive(part: StoredTensor) -> np.ndarray:
        scales = part.whole().astype(np.float32)
        are_right = np.isfinite(scales) & (scales > 0)
        _check_scales(part, are_right, scales, "positive finite numbers")
        return scales


def _check_scales(
    part: StoredTensor, are_right: np.ndarray, scales: np.ndarray, expected: str
) -> None:
    if not are_right.all():
        raise ValueError(
            f"{part.name} in {part.file} has scales from {scales.min()} to {scales.max()}; "
            f"expected {expected}: copy the folder again, or quantise the model again"
        )


@functools.partial(jax.jit, static_argnums=2)
def _unpacked(
    packed: jax.Array, absmax: jax.Array, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    codes = jnp.stack([packed >> 4, packed & 15], axis=1).astype(jnp.uint4)
    return codes.reshape(shape).T, absmax.reshape(shape[0], -1).T


def _state(parts: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return json.loads(bytes(parts[f"{STATE}nf4"].whole()))
