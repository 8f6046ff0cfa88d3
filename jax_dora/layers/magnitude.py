"""A layer's norm, and g = magnitude / norm."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from jax_dora import ops
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.quantised_kernel import formats_of, takes_codes
from jax_dora.ops import check, quantised
from jax_dora.ops import norm as ops_norm
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dtypes import accumulation_dtype
from jax_dora.ops.norm import epsilon, norm_implementation
from jax_dora.ops.quantised import stored
from jax_dora.ops.saved_norm import save_norm


def g_of_call(
    layer: Any,
    dtype: Any,
    arrays: Sequence[jax.Array] = (),
    contraction: Contraction | None = None,
    order: Callable[[jax.Array], jax.Array] = lambda array: array,
    norm: jax.Array | None = None,
    later: bool = False,
) -> Any:
    """Returns g = magnitude / norm of a call with results of `dtype`, in the magnitude's shape: a
    frozen layer's stored g, else by the given norm or one computed here, once also under
    rematerialisation.

    `arrays` (kernel, lora_a, lora_b) and `contraction` are the layer's own by default; `order`
    permutes stored magnitude, norm and g to the axes of `arrays`. `norm` is that of `arrays`, if it
    has been computed. With `later`, a g that is computed here is returned as a function without
    arguments, a pytree, for a jitted function that calls it.
    """
    check_rank(layer)
    if layer.given_g is not None:
        return order(layer.given_g[...])
    magnitude = order(layer.magnitude[...])
    dtypes = layer.result_dtype, dtype
    if layer.given_norm is not None:
        given = lax.stop_gradient(order(layer.given_norm[...]))
        return _divided(magnitude, bounded_norm(given, *dtypes), dtype)
    if norm is None:
        arrays = arrays or (layer.kernel_param[...], layer.lora_a[...], layer.lora_b[...])
    settings = contraction or layer.contraction, layer.scale, layer.implementation
    g = Partial(_Quotient(dtypes, *settings), magnitude, tuple(arrays), norm)
    return g if later else g()


def check_rank(layer: Any) -> None:
    """Raises ValueError if a layer's arrays have another rank than its rule, by which the scale
    would be wrong: a restored state can have them. With layers stacked along later axes, those of
    a single layer are checked when it is called."""
    if layer.stack.is_leading and (rank := layer.lora_a.shape[-1]) != layer.rank:
        raise ValueError(
            f"lora_a has the rank {rank}; expected {layer.rank}, that of the layer's rule, by "
            "which its scale is computed: adapt the base model by a rule with the adapter's rank "
            "and alpha, or load the adapter by jax_dora.set_adapter or jax_dora.peft.load_adapter"
        )


class _Quotient(NamedTuple):
    """Computes g from a magnitude, and the arrays of the norm or the norm itself."""

    dtypes: tuple[Any, Any]
    contraction: Contraction
    scale: float
    implementation: Any

    def __call__(self, magnitude: jax.Array, arrays: Any, norm: jax.Array | None) -> jax.Array:
        if norm is None:
            norm = layer_norm(arrays, self.contraction, self.scale, self.implementation)
        norm = save_norm(bounded_norm(norm, *self.dtypes))
        return _divided(magnitude, norm, self.dtypes[1])


def _divided(magnitude: jax.Array, norm: jax.Array, dtype: Any) -> jax.Array:
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, norm.shape, "the norm's shape")
    wide = accumulation_dtype(dtype)
    return lax.div(magnitude.astype(wide), norm.astype(wide))


def norm_with_codes(layer: Any) -> tuple[Any, Any]:
    """Returns (the norm, the transposed codes) if a kernel computes both at once, for a layer whose
    call computes its norm and, with gradients in FP8, reads transposed codes; else (None, None)."""
    if layer.given_g is not None or layer.given_norm is not None or not reads_codes(layer):
        return None, None
    arrays = layer.kernel_param[...], layer.lora_a[...], layer.lora_b[...]
    return _norm_with_codes(arrays, layer.scale)


def reads_codes(layer: Any) -> bool:
    """Returns whether calls of the layer read transposed codes, and so may take its norm from the
    kernel that makes them."""
    can_read = layer.implementation is None and takes_codes(layer)
    return can_read and formats_of(layer)["bwd_qtype"] is not None


def _norm_with_codes(arrays: Sequence[Any], scale: float) -> tuple[Any, Any]:
    kernel, lora_a, lora_b = arrays
    if kernel.ndim != 2 or not quantised.is_quantised(kernel):
        return None, None
    return ops_norm.norm_with_codes(kernel, lora_a, lora_b, scale) or (None, None)


def layer_norm(
    arrays: Sequence[jax.Array],
    contraction: Contraction,
    scale: float,
    implementation: Any,
    reads_codes: bool = False,
) -> jax.Array:
    """Returns ‖kernel + s·lora_a lora_b‖ of one layer's arrays, in its magnitude's shape.
    `implementation` is the layer's. With its `reads_codes`, the norm has the bits of its calls,
    which another kernel may compute, with other sums."""
    if reads_codes and (norm := _norm_with_codes(arrays, scale)[0]) is not None:
        return norm
    implementation = norm_implementation(implementation)
    if contraction.is_one_matrix:
        return ops.factored_norm(*arrays, scale=scale, implementation=implementation)

    def compute(arrays: Sequence[jax.Array]) -> jax.Array:
        named = dict(zip(("kernel", "lora_a", "lora_b"), arrays, strict=True))
        matrices = contraction.matrices(**named)
        norm = matrix_norm(**matrices, scale=scale, implementation=implementation)
        return contraction.magnitude.from_matrices(norm[:, None])

    kernel = stored(arrays[0])

    def spec() -> jax.sharding.PartitionSpec:
        return jax.P(*contraction.adapter_axes([*meshes.spec(kernel)])["magnitude"])

    return meshes.on_explicit_axes(compute, spec, kernel)(tuple(arrays))


def matrix_norm(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the norm of every column of kernel + scale·lora_a lora_b: f32[n, out] for a kernel
    [n, in, out], lora_a [n, in, r] and lora_b [n, r, out]."""
    norm = functools.partial(ops.factored_norm, scale=scale, implementation=implementation)
    if kernel.shape[0] == 1:
        return norm(kernel[0], lora_a[0], lora_b[0])[None]
    return jax.vmap(norm)(kernel, lora_a, lora_b)


def bounded_norm(norm: jax.Array, *dtypes: Any) -> jax.Array:
    """Returns the norm, clipped to a positive and finite range; NaN stays NaN. The bounds are the
    largest eps of `ops.magnitude_scale` for results of `dtypes`, and the largest number, in case
    the squares of finite numbers overflow. A fresh layer's magnitude is this value, so its g is
    1."""
    least, most = max(map(epsilon, dtypes)), jnp.finfo(norm.dtype).max
    return lax.clamp(norm.dtype.type(least), norm, norm.dtype.type(most))


def fresh_magnitude(layer: Any) -> jax.Array:
    """Returns the magnitude with which a DoRA layer scales nothing: g = 1."""
    return bounded_norm(layer.norm(), layer.result_dtype)
