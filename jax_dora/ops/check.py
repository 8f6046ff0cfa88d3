"""Checks of arguments. Every error names the argument, its value, the expectation and the fix."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_dora.ops import quantised

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def is_float(name: str, array: jax.Array) -> None:
    """Raises TypeError unless `array` is an array of fp16, bf16, fp32 or fp64."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(
            f"{name} must be an array, got {type(array).__name__}; pass a jax.Array or wrap the "
            "value in jnp.asarray"
        )
    if quantised.is_quantised(array):
        raise TypeError(
            f"{name} is quantised as {quantised.qtype_name(array)}, but only a kernel can be "
            "quantised; expected an array of float16, bfloat16, float32 or float64: dequantise it"
        )
    if array.dtype not in FLOATS:
        quantise = ", or pass a qwix.QArray of it and its scales" if name == "kernel" else ""
        raise TypeError(
            f"{name} has dtype {array.dtype}; expected float16, bfloat16, float32 or float64: "
            f"cast it{quantise}"
        )


def is_float_dtype(name: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype` is fp16, bf16, fp32 or fp64."""
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:  # no dtype at all
        dtype = repr(dtype)
    if dtype not in FLOATS:
        raise TypeError(f"{name} is {dtype}; expected float16, bfloat16, float32 or float64")


def has_shape(name: str, array: jax.Array, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raises ValueError unless `array` has the given shape, in which None means any size."""
    matches = len(array.shape) == len(shape) and all(
        expected in (None, size) for size, expected in zip(array.shape, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected ({wanted}) = {meaning}. "
            "Flax layout: kernel [in, out], lora_a [in, r], lora_b [r, out], magnitude [out]; "
            "transpose arrays from torch"
        )


def scale_array(scale: Any) -> jax.Array:
    """Returns `scale` as a float scalar array, or raises TypeError or ValueError."""
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        if not math.isfinite(scale):
            raise ValueError(
                f"scale is {scale}; expected a finite number, alpha/r or alpha/sqrt(r)"
            )
        return jnp.asarray(scale, dtype=jnp.result_type(float))
    if not hasattr(scale, "shape") or not hasattr(scale, "dtype"):
        raise TypeError(f"scale must be a number, got {scale!r}; it is alpha/r, or alpha/sqrt(r)")
    if jnp.issubdtype(scale.dtype, jnp.integer):
        scale = scale.astype(jnp.result_type(float))
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"scale must be one real number, got shape {scale.shape} and dtype {scale.dtype}; "
            "apply one scale per adapter"
        )
    return jnp.asarray(scale)


def adapter(kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array) -> None:
    """Raises unless kernel [in, out], lora_a [in, r] and lora_b [r, out] are float arrays of
    matching shapes; the kernel may be quantised."""
    for name, array in (("kernel", kernel), ("lora_a", lora_a), ("lora_b", lora_b)):
        if array is not kernel or not quantised.is_quantised(kernel):
            is_float(name, array)
    has_shape("kernel", kernel, (None, None), "[in, out]")
    if quantised.is_quantised(kernel):
        quantised_matrix("kernel", kernel)
    has_shape("lora_a", lora_a, (kernel.shape[0], None), "[in, r]")
    rank = lora_a.shape[1]
    if rank == 0:
        raise ValueError("lora_a has shape [in, 0]: rank is 0; expected a rank of at least 1")
    has_shape("lora_b", lora_b, (rank, kernel.shape[1]), "[r, out]")


def refuse_kernel_gradient(kernel: Any) -> None:
    """Raises TypeError: `kernel` is quantised and must not be differentiated."""
    raise TypeError(
        f"a kernel quantised as {quantised.qtype_name(kernel)} is being differentiated; it is "
        "frozen: take the gradient with respect to the adapter alone, as with wrt=nnx.LoRAParam, "
        "or wrap the kernel in jax.lax.stop_gradient"
    )


def quantised_array(name: str, kernel: Any) -> None:
    """Checks a quantised array of two axes or more. Raises TypeError if an array does not have the
    dtype of one of `quantised.FORMATS`; ValueError if tiles do not divide it, zero points have
    another shape, or a scale that is not traced is zero or not finite."""
    qtype = quantised.qtype_name(kernel)
    found = f"{name} is quantised as {qtype}"
    fix = "quantise it with jax_dora.quantize"
    if qtype not in quantised.FORMATS:
        raise TypeError(
            f"{found}; expected one of {', '.join(quantised.FORMATS)}: {fix}, or dequantise it"
        )
    wanted = quantised.stored_dtype(qtype)
    if kernel.qvalue.dtype != wanted:
        raise TypeError(f"{found} and stored as {kernel.qvalue.dtype}; expected {wanted}: {fix}")
    if kernel.scale.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"{found} with scales of {kernel.scale.dtype}; expected float32 or bfloat16: cast them"
        )
    shape, tiles = kernel.qvalue.shape, kernel.scale.shape
    divides = len(shape) == len(tiles) and all(
        count and size % count == 0 for size, count in zip(shape, tiles, strict=True)
    )
    if not divides:
        raise ValueError(
            f"{found}, of shape {tuple(shape)}, with scales of shape {tuple(tiles)}, whose tiles "
            "do not divide it; expected scales with as many axes, each of a size that divides its "
            f"axis: {fix} and a tile_size that divides its input features"
        )
    if (zeros := kernel.zero_point) is not None:
        if not jnp.isdtype(zeros.dtype, ("integral", "real floating")):
            raise TypeError(
                f"{found} with zero points of {zeros.dtype}; expected integers or real numbers: "
                f"{fix}"
            )
        if zeros.shape != tiles:
            raise ValueError(
                f"{found} with zero points of shape {tuple(zeros.shape)}; expected the scales' "
                f"{tuple(tiles)}: {fix}"
            )
    _check_scales(found, kernel.scale)


def quantised_matrix(name: str, kernel: Any) -> None:
    """Checks a quantised matrix [in, out] like `quantised_array`; its tiles must not lie along the
    output axis."""
    quantised_array(name, kernel)
    shape, tiles = kernel.qvalue.shape, kernel.scale.shape
    if tiles[0] == shape[0] > 1 and tiles[1] < shape[1]:
        raise ValueError(
            f"{name} is quantised as {quantised.qtype_name(kernel)} along its output axis: scales "
            f"of shape {tuple(tiles)} for kernel [in, out] {tuple(shape)} give every input feature "
            "scales of its own; expected tiles along the input axis, [in / tile, out] or [1, out]: "
            "quantise the transpose, or quantise it with jax_dora.quantize"
        )


def rounded(name: str, kernel: Any) -> None:
    """Raises ValueError if the weights that `round_to` made a kernel of are not finite: then its
    scales are not. Traced scales are not checked."""
    scales = _invalid_scales(kernel.scale)
    if scales is not None:
        raise ValueError(
            f"{name} has weights that are not finite, in {np.count_nonzero(~np.isfinite(scales))} "
            f"of its {scales.size} tiles; expected finite numbers: replace the NaN and infinite "
            "weights, or copy or train the model again"
        )


def quantised_norm(name: str, kernel: Any, norm: Any) -> None:
    """Raises ValueError if the norm of a quantised kernel is NaN, though its scales have been
    checked. A traced norm is not checked."""
    if not (quantised.is_quantised(kernel) and _is_known(norm)):
        return
    with jax.ensure_compile_time_eval():
        is_nan = bool(jnp.isnan(norm).any())
    if is_nan:
        raise ValueError(
            f"{name} is quantised as {quantised.describe(kernel)}, with codes or zero points "
            "that are NaN; expected numbers: quantise it again, from weights that are finite"
        )


def _check_scales(found: str, scale: Any) -> None:
    """Raises ValueError if a scale is zero, infinite or NaN; traced ones pass, and negative ones,
    as bitsandbytes' double quantisation makes them."""
    values = _invalid_scales(scale)
    if values is None:
        return
    # NumPy's minimum of NaN and numbers is NaN; XLA's is a number on some CPUs.
    least, most, zeros = values.min(), values.max(), np.count_nonzero(values == 0)
    raise ValueError(
        f"{found} with scales from {least} to {most}, of which {zeros} are 0; expected finite "
        "numbers other than 0: give a tile of zeros the scale 1, or quantise the kernel again from "
        "weights that are finite"
    )


def _invalid_scales(scale: Any) -> np.ndarray | None:
    """Returns the scales in fp64 if one is zero, infinite or NaN, else None, as if traced."""
    if not _is_known(scale):
        return None
    # The scales may be a constant inside a traced function.
    with jax.ensure_compile_time_eval():
        return None if bool(_are_valid(scale)) else np.asarray(scale, np.float64)


def _is_known(array: Any) -> bool:
    """Returns whether this process can read the values of an array: it is not traced, and is on no
    other process's devices."""
    if isinstance(array, Tracer) or not isinstance(array, jax.Array | np.ndarray):
        return False
    return isinstance(array, np.ndarray) or array.is_fully_addressable


@jax.jit
def _are_valid(scale: jax.Array) -> jax.Array:
    return jnp.all((scale != 0) & jnp.isfinite(scale))
