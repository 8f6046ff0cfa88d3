"""Layer norm of a residual sum, with dropout, as after each half of an encoder's layer.

    z = n∘scale + bias        n = (t - mean(t)) / sqrt(var(t) + epsilon),  t = drop(y) + x

In Triton, each pass is one kernel, which computes t and the mask of dropout from y and x: two
statistics of a row are all that is stored between the passes. XLA needs three passes over the rows
forward.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops.dispatch import choose
from jax_dora.ops.dropout import Dropout, drop
from jax_dora.ops.dtypes import accumulation_dtype, per_feature
from jax_dora.ops.triton import triton_residual_norm_backward as kernel_backward
from jax_dora.ops.triton import triton_residual_norm_forward as kernel_forward


class _Operands(NamedTuple):
    """The arrays of a call."""

    y: jax.Array
    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    seed: jax.Array | None


def residual_layer_norm(
    y: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    dropout: Dropout | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the normalised sum of drop(y) and x, [..., features], in y's dtype.

    Args:
      y, x: [..., features], of one dtype. Statistics are in fp32 for 16 bits.
      scale, bias: [features].
      epsilon: what is added to the variance.
      dropout: drops elements of y; its `mode` does not matter.
      implementation: None, "triton" where it was measured to be faster, or "xla"; "eager" is "xla".

    Raises:
      ValueError: the shapes or dtypes do not fit, or `implementation` has no valid value.
      NotImplementedError: the named implementation does not support the call.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"x is {x.dtype}{x.shape}, y is {y.dtype}{y.shape}; expected one type")
    features = y.shape[-1:]
    if scale.shape != features or bias.shape != features:
        raise ValueError(
            f"scale and bias have shapes {scale.shape}, {bias.shape}; expected {features}, y's last"
        )
    rate = 0.0 if dropout is None else dropout.rate
    operands = _Operands(y, x, scale, bias, None if dropout is None or not rate else dropout.seed)
    if _is_fused(y, implementation):
        return _fused(epsilon, rate, operands)
    return _define(epsilon, rate, operands)


def _is_fused(y: jax.Array, implementation: str | None) -> bool:
    """Returns whether Triton's kernels are taken."""
    if implementation is None:
        # On Hopper, where choose prefers Mosaic, which has no kernel; other cards: not measured.
        device = choose.target()
        is_better = device.compute_capability == "9.0" and not device.partitioned
        is_better = is_better and kernel_forward.wins(*_call(y))
        is_better = is_better and not device.interpreted and not device.refuses("triton")
        implementation = "triton" if is_better else "xla"
    return _choose(kernel_forward, y, implementation) is not None


def _call(y: jax.Array) -> Any:
    return (y.size // max(1, y.shape[-1]), y.shape[-1], y.dtype)


def _choose(kernel: Any, y: jax.Array, implementation: str | None) -> Any:
    return choose.choose("residual_layer_norm", implementation, (kernel, _call(y)))


def _define(epsilon: float, rate: float, operands: _Operands) -> jax.Array:
    """Returns the result in XLA."""
    y, x, scale, bias, seed = operands
    wide = accumulation_dtype(y.dtype)
    total = (x + (y if seed is None else drop(y, seed, rate))).astype(wide)
    mean = total.mean(-1, keepdims=True)
    # As in Flax, so that XLA computes both sums in one pass.
    variance = jnp.maximum((total * total).mean(-1, keepdims=True) - mean * mean, 0)
    normal = (total - mean) * jax.lax.rsqrt(variance + epsilon)
    return (normal * per_feature(scale, normal) + per_feature(bias, normal)).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(epsilon: float, rate: float, operands: _Operands) -> jax.Array:
    """Returns the result by Triton's kernels."""
    return _fused_fwd(epsilon, rate, operands)[0]


def _fused_fwd(epsilon: float, rate: float, operands: _Operands) -> tuple[jax.Array, Any]:
    y, x, scale, bias, seed = operands
    launch = _choose(kernel_forward, y, "triton").launch
    rows = _rows(y), _rows(x)
    z, *statistics = launch(*rows, scale, bias, _bits(seed), epsilon=epsilon, rate=rate)
    return z.reshape(y.shape), (operands, statistics)


def _fused_bwd(epsilon: float, rate: float, kept: Any, dz: jax.Array) -> Any:
    (y, x, scale, bias, seed), statistics = kept
    launch = _choose(kernel_backward, y, "triton").launch
    rows = _rows(dz), _rows(y), _rows(x)
    dy, dx, dscale, dbias = launch(*rows, scale, _bits(seed), *statistics, rate=rate)
    of_vectors = dscale.astype(scale.dtype), dbias.astype(bias.dtype)
    return (_Operands(dy.reshape(y.shape), dx.reshape(y.shape), *of_vectors, None),)


_fused.defvjp(_fused_fwd, _fused_bwd)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _bits(seed: jax.Array | None) -> jax.Array | None:
    return None if seed is None else jax.lax.bitcast_convert_type(seed, jnp.int32)
