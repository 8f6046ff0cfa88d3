"""Checks of arguments. Every error names the argument, its value, the expectation and the fix."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

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
        quantised.check_matrix("kernel", kernel)
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
