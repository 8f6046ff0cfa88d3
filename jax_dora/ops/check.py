"""Checks of what callers pass in: every error names the argument, its value and the fix."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops import quantised

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def is_float(name: str, array: jax.Array) -> None:
    """Raises TypeError unless `array` holds fp16, bf16, fp32 or fp64."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(
            f"{name} must be an array, got {type(array).__name__}; pass a jax.Array or wrap the "
            "value in jnp.asarray"
        )
    if quantised.is_quantised(array):
        raise TypeError(
            f"{name} is quantised as {quantised.qtype_name(array)}, which a kernel alone can be; "
            "expected an array of float16, bfloat16, float32 or float64: dequantise it"
        )
    if array.dtype not in FLOATS:
        way_on = ", or hand over a qwix.QArray of it and its scales" if name == "kernel" else ""
        raise TypeError(
            f"{name} has dtype {array.dtype}; expected float16, bfloat16, float32 or float64: "
            f"cast it{way_on}"
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
    """Raises ValueError unless `array.shape` equals `shape`, where None stands for any size."""
    is_right = len(array.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    if not is_right:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected ({wanted}) = {meaning}. "
            "Flax layout: kernel [in, out], lora_a [in, r], lora_b [r, out], magnitude [out]; "
            "transpose what comes from torch"
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
    """Checks kernel [in, out], perhaps quantised, against lora_a [in, r], lora_b [r, out]."""
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


def not_differentiated(kernel: Any) -> None:
    """Raises TypeError for a quantised kernel that is differentiated."""
    raise TypeError(
        f"a kernel quantised as {quantised.qtype_name(kernel)} is being differentiated; it is "
        "frozen: take the gradient with respect to the adapter alone, as with wrt=nnx.LoRAParam, "
        "or wrap the kernel in jax.lax.stop_gradient"
    )
