"""The parts of a call of a DoRA layer: its norm, its dropout, the product, its sharding.

Functions, and not methods: `nnx.tabulate` lists every public method that a call reaches, and
compiles it.
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
from jax_dora.layers.quantised import act_qtype_of
from jax_dora.ops import check
from jax_dora.ops import mesh as meshes
from jax_dora.ops.compose import accumulator
from jax_dora.ops.linear import NORM_NAME, scaled_linear
from jax_dora.ops.norm import epsilon, norm_implementation, ratio
from jax_dora.ops.operands import Projection
from jax_dora.ops.quantised import stored

# Odd, so that the masks of products that share a seed differ.
NEXT_SEED = 0x9E3779B9


def g_of_call(
    layer: Any,
    dtype: Any,
    arrays: Sequence[jax.Array] = (),
    layout: Layout | None = None,
    order: Callable[[jax.Array], jax.Array] = lambda array: array,
) -> jax.Array:
    """Returns g of a call with a result of `dtype`, in the magnitude's shape: a frozen layer's own,
    else by the given norm, or by a computed one that `jax_dora.remat_policy` keeps.

    Args:
      arrays, layout: kernel, lora_a and lora_b, and how they are matrices; the layer's by default.
      order: lays what the layer holds of magnitude, norm and g out as `arrays` are.
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
    """Returns ‖kernel + s·lora_a lora_b‖ of the three arrays of one layer, as its magnitude."""
    its: Layout = layout or layer.layout
    by = norm_implementation(layer.implementation)
    if its.is_one_matrix:
        return ops.factored_norm(*arrays, scale=layer.scale, implementation=by)

    def of_matrices(arrays: Sequence[jax.Array]) -> jax.Array:
        matrices = [axes.to_matrices(array) for axes, array in zip(its[:3], arrays, strict=True)]
        norm = matrix_norm(*matrices, scale=layer.scale, implementation=by)
        return its.magnitude.from_matrices(norm[:, None])

    kernel = stored(arrays[0])
    if mesh := meshes.explicit(kernel):
        names = its.adapter_axes(meshes.spec(kernel))["magnitude"]
        return meshes.with_auto_axes(of_matrices, mesh, jax.P(*names))(tuple(arrays))
    return of_matrices(arrays)


def matrix_norm(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Returns ‖kernel + scale·lora_a lora_b‖ of every column: f32[n, out] of [n, in, out] etc."""
    norm = functools.partial(ops.factored_norm, scale=scale, implementation=implementation)
    if kernel.shape[0] == 1:
        return norm(kernel[0], lora_a[0], lora_b[0])[None]
    return jax.vmap(norm)(kernel, lora_a, lora_b)


def bounded_norm(norm: jax.Array, dtype: Any) -> jax.Array:
    """Returns the norm, at least the eps that `ops.magnitude_scale` divides by for results of
    `dtype`, and finite where the squares of finite numbers overflow; NaN stays NaN.

    A fresh layer's magnitude is this, so that its g is 1 for every finite kernel.
    """
    return jnp.clip(norm, epsilon(dtype), jnp.finfo(norm.dtype).max)


def fresh_magnitude(layer: Any) -> jax.Array:
    """Returns the magnitude of a DoRA layer with which it scales nothing."""
    return bounded_norm(layer.norm(), layer.result_dtype)


def operands_of_call(
    layer: Any, inputs: jax.Array, dropout: ops.Dropout | None = None
) -> dict[str, Any]:
    """Returns the arrays of a call: x, kernel and bias as the base layer promotes them, the
    adapter, g by the norm of the stored parameters, so that it does not depend on the dtype of the
    computation, and the dropout."""
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
    """Returns the dropout of this call, or None for none.

    Args:
      deterministic, rngs: as `nnx.Dropout.__call__`'s; they take precedence over the layer's.
    """
    dropout = layer.dropout
    if dropout is None:
        return None
    if deterministic is None:
        deterministic = dropout.deterministic
    if deterministic is None:
        raise ValueError(
            "deterministic is None in the call and in the layer; expected a bool from either, "
            "or model.train() or model.eval() before"
        )
    if deterministic or not dropout.rate:
        return None
    rngs = dropout.rngs if rngs is None else rngs
    if rngs is None:
        raise ValueError(
            "rngs is None in the call and in the layer; expected an nnx.Rngs, an nnx.RngStream "
            "or a key from either"
        )
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[dropout.rng_collection]
    key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
    return ops.Dropout(ops.draw_seed(key), dropout.rate, layer.dropout_mode)


def dropout_of_each(dropout: ops.Dropout | None, *counts: int) -> ops.Dropout | None:
    """Returns the dropout of so many matrices, each of which has a mask of its own: its seed has
    further leading axes of these sizes."""
    index = jnp.arange(math.prod(counts), dtype=jnp.uint32).reshape(*counts, 1)
    more = index * jnp.uint32(NEXT_SEED)
    return jax.tree.map(
        lambda seed: jnp.expand_dims(seed, tuple(range(len(counts)))) + more, dropout
    )


def product(layer: Any, operands: Mapping[str, Any]) -> jax.Array:
    """Returns g ∘ x (kernel + s·lora_a lora_b) + bias of matrices by the layer's settings.

    Args:
      operands: x, kernel, lora_a, lora_b, g, bias and dropout, or None for the last two.
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
    """Returns x W'ᵀ = x̂ Wᵀ + s·(x̂ lora_bᵀ) lora_aᵀ with x̂ = g∘x, of x [..., out]."""
    dtype, dot = x.dtype, functools.partial(jnp.matmul, precision=precision)
    scaled = (x.astype(g.dtype) * g.reshape((1,) * (x.ndim - 1) + g.shape)).astype(dtype)
    wide = lora_b.astype(accumulator(lora_b.dtype, dtype))
    z = dot(scaled, (scale * wide).astype(dtype).T)
    return dot(scaled, kernel.T) + dot(z, lora_a.astype(dtype).T)


def sharded_as(
    out_sharding: Any, function: Callable[[Any], jax.Array], operands: Mapping[str, Any]
) -> jax.Array:
    """Returns `function(operands)`, sharded as a call asks for.

    Args:
      out_sharding: a PartitionSpec or NamedSharding over explicit axes of the operands' mesh,
        which XLA then partitions the call over; None leaves it as it is.
      function: of arrays.
      operands: arrays by name, or None.
    """
    if out_sharding is None:
        return function(operands)
    arrays = jax.tree.leaves(operands)
    mesh = meshes.explicit(*arrays) or jax.typeof(stored(operands["kernel"])).sharding.mesh
    spec = getattr(out_sharding, "spec", out_sharding)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    named = jax.tree.leaves(tuple(spec))
    if others := [name for name in named if types.get(name) is not AxisType.Explicit]:
        raise ValueError(
            f"out_sharding is {spec}; expected explicit axes of the kernel's mesh, which "
            f"{', '.join(others)} is not among {types}: use jax.lax.with_sharding_constraint on "
            "the result for an axis that is left to XLA"
        )
    if AxisType.Explicit not in mesh.axis_types:
        return function(operands)
    return meshes.with_auto_axes(function, mesh, jax.P(*spec))(operands)
