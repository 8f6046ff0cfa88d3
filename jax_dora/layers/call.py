"""The parts of a DoRA layer's call: norm, g, dropout, product and the sharding of the result.

These are functions rather than methods because `nnx.tabulate` lists and compiles every public
method that a call reaches.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from jax_dora import ops
from jax_dora.layers.layout import Layout
from jax_dora.layers.quantised_kernel import act_qtype_of
from jax_dora.ops import check
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dtypes import accumulator
from jax_dora.ops.linear import NORM_NAME, scaled_linear
from jax_dora.ops.norm import epsilon, norm_implementation, ratio
from jax_dora.ops.operands import Projection
from jax_dora.ops.quantised import stored

# The difference of the seeds of products that share a dropout. It is odd, so all multiples of it
# below 2**32 differ and every product has its own mask.
NEXT_SEED = 0x9E3779B9


def g_of_call(
    layer: Any,
    dtype: Any,
    arrays: Sequence[jax.Array] = (),
    layout: Layout | None = None,
    order: Callable[[jax.Array], jax.Array] = lambda array: array,
) -> jax.Array:
    """Returns g = magnitude / norm of a call with results of `dtype`, in the magnitude's shape.

    A frozen layer returns its stored g. Otherwise the norm is the given norm or, without one,
    computed here and tagged so that `jax_dora.remat_policy` keeps it.

    Args:
      arrays, layout: kernel, lora_a and lora_b, and how to view them as matrices; the layer's own
        by default.
      order: permutes the axes of the stored magnitude, norm and g to those of `arrays`.
    """
    if layer.given_g is not None:
        return order(layer.given_g[...])
    magnitude = order(layer.magnitude[...])
    if layer.given_norm is not None:
        norm = order(layer.given_norm[...])
    else:
        arrays = arrays or (layer.kernel_param[...], layer.lora_a[...], layer.lora_b[...])
        norm = checkpoint_name(layer_norm(layer, arrays, layout), NORM_NAME)
    check.is_float("magnitude", magnitude)
    check.has_shape("magnitude", magnitude, norm.shape, "the norm's shape")
    return ratio(magnitude, bounded_norm(norm, layer.result_dtype), dtype)


def layer_norm(layer: Any, arrays: Sequence[jax.Array], layout: Layout | None = None) -> jax.Array:
    """Returns ‖kernel + s·lora_a lora_b‖ of one layer's kernel, lora_a and lora_b, in its
    magnitude's shape."""
    layer_layout: Layout = layout or layer.layout
    implementation = norm_implementation(layer.implementation)
    if layer_layout.is_one_matrix:
        return ops.factored_norm(*arrays, scale=layer.scale, implementation=implementation)

    def compute(arrays: Sequence[jax.Array]) -> jax.Array:
        matrices = [
            axes.to_matrices(array) for axes, array in zip(layer_layout[:3], arrays, strict=True)
        ]
        norm = matrix_norm(*matrices, scale=layer.scale, implementation=implementation)
        return layer_layout.magnitude.from_matrices(norm[:, None])

    kernel = stored(arrays[0])

    def spec() -> jax.sharding.PartitionSpec:
        return jax.P(*layer_layout.adapter_axes(meshes.spec(kernel))["magnitude"])

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


def bounded_norm(norm: jax.Array, dtype: Any) -> jax.Array:
    """Returns the norm, clipped to a positive and finite range.

    The lower bound is the eps of `ops.magnitude_scale` for results of `dtype`, which is the
    smallest number that it divides by. The upper bound keeps the norm finite if the squares of
    finite numbers overflow. NaN stays NaN.

    A fresh layer's magnitude is this value, so its g is 1 for every finite kernel.
    """
    return jnp.clip(norm, epsilon(dtype), jnp.finfo(norm.dtype).max)


def fresh_magnitude(layer: Any) -> jax.Array:
    """Returns the magnitude with which a DoRA layer scales nothing: g = 1."""
    return bounded_norm(layer.norm(), layer.result_dtype)


def operands_of_call(
    layer: Any, inputs: jax.Array, dropout: ops.Dropout | None = None
) -> dict[str, Any]:
    """Returns the arrays of a call by name: x, kernel and bias as the base layer promotes them,
    lora_a, lora_b, g and the dropout.

    g is computed from the parameters as stored, so it does not depend on the dtype of the
    computation.
    """
    bias = None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)
    return {
        "x": x,
        "kernel": kernel,
        "bias": bias,
        "lora_a": layer.lora_a[...],
        "lora_b": layer.lora_b[...],
        "g": g_of_call(layer, x.dtype),
        "dropout": dropout,
    }


def dropout_of_call(
    layer: Any,
    deterministic: bool | None,
    rngs: nnx.Rngs | nnx.RngStream | jax.Array | None,
) -> ops.Dropout | None:
    """Returns the dropout of this call, or None if nothing is dropped.

    Args:
      deterministic, rngs: see `nnx.Dropout.__call__`; they take precedence over the layer's own.
    """
    dropout = layer.dropout
    if dropout is None:
        return None
    if deterministic is None:
        deterministic = dropout.deterministic
    if deterministic is None:
        raise ValueError(
            "deterministic is None in the call and in the layer; expected a bool in one of them: "
            "call model.train() or model.eval() first, or pass deterministic="
        )
    if deterministic or not dropout.rate:
        return None
    rngs = dropout.rngs if rngs is None else rngs
    if rngs is None:
        raise ValueError(
            "rngs is None in the call and in the layer; expected an nnx.Rngs, an nnx.RngStream "
            "or a key in one of them"
        )
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[dropout.rng_collection]
    key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
    return ops.Dropout(ops.draw_seed(key), dropout.rate, layer.dropout_mode)


def split_dropout(dropout: ops.Dropout | None, *counts: int) -> ops.Dropout | None:
    """Returns a dropout for `counts` matrices, with a different mask for each. The result's seed
    has these sizes as additional leading axes."""
    index = jnp.arange(math.prod(counts), dtype=jnp.uint32).reshape(*counts, 1)
    offsets = index * jnp.uint32(NEXT_SEED)
    return jax.tree.map(
        lambda seed: jnp.expand_dims(seed, tuple(range(len(counts)))) + offsets, dropout
    )


def product(layer: Any, operands: Mapping[str, Any]) -> jax.Array:
    """Returns g ∘ x (kernel + s·lora_a lora_b) + bias of matrices, with the layer's settings.

    Args:
      operands: x, kernel, lora_a, lora_b, g, and bias and dropout, which may be None.
    """
    arrays = dict(operands)
    dropout = arrays.pop("dropout")
    return scaled_linear(
        Projection(**arrays, scale=layer.scale),
        dropout,
        implementation=layer.implementation,
        precision=layer.precision,
        keep_inner=layer.keep_inner,
        act_qtype=act_qtype_of(layer),
    )


def times_transposed(
    x: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    g: jax.Array,
    scale: float,
    precision: Any = None,
) -> jax.Array:
    """Returns x W'ᵀ of x [..., out], as x̂ Wᵀ + s·(x̂ lora_bᵀ) lora_aᵀ with x̂ = g∘x."""
    dtype, dot = x.dtype, functools.partial(jnp.matmul, precision=precision)
    scaled = (x.astype(g.dtype) * g.reshape((1,) * (x.ndim - 1) + g.shape)).astype(dtype)
    wide = lora_b.astype(accumulator(lora_b.dtype, dtype))
    z = dot(scaled, (scale * wide).astype(dtype).T)
    return dot(scaled, kernel.T) + dot(z, lora_a.astype(dtype).T)


def with_out_sharding(
    out_sharding: Any, function: Callable[[Any], jax.Array], operands: Mapping[str, Any]
) -> jax.Array:
    """Returns `function(operands)` with the sharding that the caller asks for.

    Args:
      out_sharding: a PartitionSpec or NamedSharding over explicit axes of the operands' mesh. XLA
        partitions the computation accordingly. None leaves the sharding as it is.
      function: takes `operands`.
      operands: arrays by name, or None.

    Raises:
      ValueError: out_sharding names an axis that is not explicit.
    """
    if out_sharding is None:
        return function(operands)
    arrays = jax.tree.leaves(operands)
    mesh = meshes.explicit(*arrays) or jax.typeof(stored(operands["kernel"])).sharding.mesh
    spec = getattr(out_sharding, "spec", out_sharding)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = jax.tree.leaves(tuple(spec))
    if others := [name for name in names if types.get(name) is not AxisType.Explicit]:
        raise ValueError(
            f"out_sharding is {spec}; expected explicit axes of the kernel's mesh, but "
            f"{', '.join(others)} is not one of them: the mesh has {types}. For an axis that is "
            "left to XLA, use jax.lax.with_sharding_constraint on the result"
        )
    if AxisType.Explicit not in mesh.axis_types:
        return function(operands)
    return meshes.with_auto_axes(function, mesh, jax.P(*spec))(operands)
