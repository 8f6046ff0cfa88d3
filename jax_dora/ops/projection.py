"""The custom gradient of an adapted projection.

With z = x (s·A), d = g∘dy and g from `magnitude_scale`:

    y  = g∘(base + zB) + bias     dz = d Bᵀ     dx = d Wᵀ + dz (s·A)ᵀ
    dA = s·(xᵀ dz)     dB = zᵀ d     d_g = Σ_rows dy∘(base + zB)     dbias = Σ_rows dy

s·A is computed once, in fp32, and cast to x's dtype. Both directions then gather or sum the same
array over devices, in the activations' dtype.

inner = base + zB equals y / g, so d_g = Σ_rows dy∘y / g and only y is kept for it. With a bias, and
in fp16, whose range is small, inner is kept instead.

The products are ordered such that none is [in, out], except the kernel's own gradient xᵀ d, which
is computed only if the kernel is differentiated.

A quantised kernel is kept for the backward pass in its quantised form. Quantised activations do not
change the gradients above. Quantised gradients make d Wᵀ a product in FP8, and g multiplies in its
codes. Unless x is dropped, d is then not written, and the other gradients are computed as

    dz = dy (g∘B)ᵀ     dB = g∘(zᵀ dy)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_dora.ops import check, projection_products, quantised, residuals, row_scaled
from jax_dora.ops.compose import (
    COMPOSE_BACKWARD,
    ComposeBackward,
    ComposeBackwardSettings,
    refuse_scale_gradient,
)
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dropout import drop
from jax_dora.ops.dtypes import accumulation_dtype, divisible, dot_general
from jax_dora.ops.operands import Gating, ProductSettings, Projection, ProjectionSettings
from jax_dora.ops.projection_products import BACK, FORWARD, Back, ForwardSettings
from jax_dora.ops.reduction import REDUCE, REDUCE_BACK, Reduction, ReductionSettings
from jax_dora.ops.saved_inner import named_copy, save_inner
from jax_dora.ops.saved_norm import save_g
from jax_dora.ops.swiglu import gradients_and_result

INNER_NAME = "dora_inner"
RESULT_NAME = "dora_result"
"""The checkpoint name of a DoRA layer's result, for policies of `jax.checkpoint`."""
Z_NAME = "dora_z"
"""The checkpoint name of z = x (s·A) [..., rank], which lora_b's gradient reads."""


def define(settings: ProjectionSettings, operands: Projection) -> jax.Array:
    """Returns y, or inner if g is None."""
    forward = _with_z(settings, operands, _scaled_lora_a(operands))
    return primitive.call(FORWARD, _forward_settings(settings), forward)[0]


def _forward_settings(
    settings: ProjectionSettings, want_inner: bool = False, want_copy: bool = False
) -> ForwardSettings:
    return ForwardSettings(*settings[:3], settings.bwd_qtype, want_inner, want_copy)


def _result_holds_inner(operands: Projection, dtype: Any) -> bool:
    """Returns whether y / g has the precision of inner in `dtype`, so that only y is kept."""
    return operands.bias is None and dtype != jnp.float16


def _with_g_of_gradient(operands: Projection) -> Projection:
    """Returns the operands with a g that `jax.checkpoint` keeps, with |g| at least
    `dtypes.LEAST_G` if the gradient divides by it."""
    g = operands.g
    if g is None:
        return operands
    if _result_holds_inner(operands, operands.x.dtype):
        g = divisible(g)
    return operands._replace(g=save_g(g))


def _scaled_lora_a(operands: Projection) -> jax.Array:
    """Returns s·A in x's dtype."""
    return projection_products.scaled_lora_a(operands.lora_a, operands.scale, operands.x.dtype)


def _with_z(settings: ProjectionSettings, operands: Projection, scaled: jax.Array) -> Projection:
    """Returns the operands of `FORWARD`, with z = drop(x) (s·A)."""
    x, seed = row_scaled.plain(operands.x), operands.seed
    reduction = Reduction(x, scaled, seed, operands.kernel)
    (z,) = primitive.call(REDUCE, _reduction_settings(settings, x), reduction)
    # `FORWARD` may compute z again from lora_a, but not the z of a dropped x, which has kernels of
    # its own, nor that of an FP8 product, which sums its parts over devices itself.
    lora_a = operands.lora_a if seed is None and x is operands.x else None
    if isinstance(operands.x, row_scaled.RowScaled):
        operands = operands._replace(x=operands.x._replace(again=None, gated=None))
    return operands._replace(lora_a=lora_a, seed=None, z=z)


def _reduction_settings(
    settings: ProjectionSettings, x: jax.Array, dtype: Any = None
) -> ReductionSettings:
    """Returns the settings of `REDUCE` and `REDUCE_BACK`."""
    implementation = settings.implementation
    # Without dropout no kernel exists, and with it none of Triton: naming one would always raise.
    if implementation == "triton":
        implementation = "xla"
    elif implementation == "mosaic" and not settings.rate:
        implementation = None
    return ReductionSettings(implementation, settings.precision, settings.rate, x.shape, dtype)


def _projection_fwd(
    settings: ProjectionSettings, operands: Projection, wanted: Projection
) -> tuple[jax.Array, Any]:
    refuse_scale_gradient(wanted.scale)
    if wanted.kernel and quantised.is_quantised(operands.kernel):
        check.refuse_kernel_gradient(operands.kernel)
    operands = _with_g_of_gradient(operands)
    from_y, scaled = _result_holds_inner(operands, operands.x.dtype), _scaled_lora_a(operands)
    forward = _with_z(settings, operands, scaled)
    z = forward.z
    if settings.bwd_qtype is not None:
        # Otherwise XLA computes z again for each result that a scan stacks and reads.
        z = lax.optimization_barrier(z)
    forward = forward._replace(z=jnp.asarray(checkpoint_name(z, Z_NAME)))
    want_inner = wanted.g is not None and not from_y
    in_features, out = operands.kernel.shape
    # These results a scan may stack; those of other layers are computed again fastest.
    want_copy = settings.bwd_qtype is not None and not want_inner and out != in_features
    forward_settings = _forward_settings(settings, want_inner, want_copy)
    y, inner = primitive.call(FORWARD, forward_settings, forward)
    name = INNER_NAME if settings.keep_inner else RESULT_NAME
    if want_copy:
        y, inner = named_copy(y, inner, name)
    elif wanted.g is not None and from_y:
        y = inner = jnp.asarray(checkpoint_name(y, name))
    elif wanted.g is not None:
        # The layers that follow need y too: keeping inner alone would not save computing y again.
        y = jnp.asarray(checkpoint_name(y, RESULT_NAME))
        inner = jnp.asarray(checkpoint_name(inner, name))
    elif settings.bwd_qtype is not None:
        y = jnp.asarray(checkpoint_name(y, name))
    if wanted.g is not None and settings.keep_inner is not False:
        y, inner = save_inner(y, inner)
    # The bias stays, because it determines whether `inner` holds inner or y.
    x = row_scaled.for_gradients(operands.x) if wanted.lora_a or wanted.kernel else None
    if wanted.x and wanted.lora_a and operands.seed is None and settings.bwd_qtype is not None:
        x = x if operands.x.gated is None else operands.x.gated
    kept = operands._replace(x=x, codes=None)
    z = forward.z if wanted.lora_b else None
    inner = inner if wanted.g else None
    return y, (kept, wanted, z, inner, scaled if wanted.x else None)


def _projection_bwd(settings: ProjectionSettings, kept: Any, dy: jax.Array) -> dict[str, jax.Array]:
    operands, wanted, z, inner, scaled = kept
    x, kernel, _, lora_b, g, scale, bias, *_ = operands
    wide = accumulation_dtype(dy.dtype)
    dot = functools.partial(dot_general, settings.precision)
    rows = tuple(range(dy.ndim - 1))
    d, gradients, folded = dy, {}, None
    if g is not None and not settings.of_inner:
        if settings.bwd_qtype is not None and operands.seed is None:
            folded = g  # Nothing that reads d is large but its codes, so g can multiply later.
        if folded is None or inner is not None:
            back = ComposeBackwardSettings(settings.op, settings.implementation, folded is None)
            operands_of_back = ComposeBackward(dy, inner, g, scale)
            made, _, d_g = primitive.call(COMPOSE_BACKWARD, back, operands_of_back)
            d = dy if made is None else made
            if d_g is not None:
                if _result_holds_inner(operands, dy.dtype):
                    d_g = d_g / g
                gradients["g"] = d_g.astype(g.dtype)
    if wanted.x or wanted.lora_a:
        b = lora_b if folded is None else _times(folded, lora_b).astype(dy.dtype)
        dz = dot(d, b, (-1, 1))
        if wanted.x:
            dx = _dx(settings, operands, scaled, d, dz, folded)
            if choose.target().partitioned and settings.bwd_qtype is None:
                # Under tensor parallelism devices sum dz and z for the adapters' gradients alone.
                # Without this XLA would join the sums of all layers, and write a kernel for each
                # array that it cuts out of the result.
                dx, dz, z = lax.optimization_barrier((dx, dz, z))
            if isinstance(x, Gating):
                # The pass that computes the gradients of gate and up computes x, too.
                d_gated, x = gradients_and_result(dx, x)
                operands = operands._replace(x=x)
                gradients["x"] = row_scaled.RowScaled(None, None, None, gated=d_gated)
            else:
                is_coded = settings.act_qtype is not None
                gradients["x"] = row_scaled.RowScaled(dx, None, None) if is_coded else dx
        if wanted.lora_a:
            d_lora_a = _d_scaled_lora_a(settings, operands, dz)
            d_lora_a = scale.astype(wide) * d_lora_a.astype(wide)
            gradients["lora_a"] = d_lora_a.astype(operands.lora_a.dtype)
    if wanted.kernel:
        gradients["kernel"] = dot(x, d, (rows, rows), kernel.dtype)
    if wanted.lora_b:
        dtype = lora_b.dtype if folded is None else _dtype_of_sums(d, lora_b)
        d_lora_b = dot(z, d, (rows, rows), dtype)
        d_lora_b = d_lora_b if folded is None else _times(folded, d_lora_b)
        gradients["lora_b"] = d_lora_b.astype(lora_b.dtype)
    if wanted.bias:
        gradients["bias"] = jnp.sum(dy.astype(wide), axis=rows).astype(bias.dtype)
    return gradients


projection = residuals.with_gradient(Projection, define, _projection_fwd, _projection_bwd)
"""`define` with a custom gradient."""


def _times(g: jax.Array, b: jax.Array) -> jax.Array:
    """Returns g∘b of g [out] and b [r, out], in g's dtype."""
    return g[None] * b.astype(g.dtype)


def _dx(
    settings: ProjectionSettings,
    operands: Projection,
    scaled: jax.Array,
    d: jax.Array,
    dz: jax.Array,
    g: jax.Array | None = None,
) -> jax.Array:
    """Returns (g∘d) Wᵀ + drop(dz (s·A)ᵀ), with x's dropout mask; with dropout, g is None."""
    kernel, seed = operands.kernel, operands.seed
    back = ProductSettings(settings.implementation, settings.precision, settings.bwd_qtype)
    if seed is None:
        return primitive.call(BACK, back, Back(d, kernel, dz, scaled, operands.lora_b, g))[0]
    through_adapter = drop(
        dot_general(settings.precision, dz, scaled, (-1, 1)), seed, settings.rate
    )
    return row_scaled.times_transposed(back, d, kernel) + through_adapter


def _d_scaled_lora_a(
    settings: ProjectionSettings, operands: Projection, dz: jax.Array
) -> jax.Array:
    """Returns drop(x)ᵀ dz in the dtype of `_dtype_of_sums`."""
    x, seed = operands.x, operands.seed
    dtype = _dtype_of_sums(x, operands.lora_a)
    if seed is None:
        rows = tuple(range(x.ndim - 1))
        return dot_general(settings.precision, x, dz, (rows, rows), dtype)
    back = _reduction_settings(settings, x, dtype)
    return primitive.call(REDUCE_BACK, back, Reduction(x, dz, seed))[0]


def _dtype_of_sums(rows: jax.Array, adapter: jax.Array) -> Any:
    """Returns the dtype of an adapter's gradient before it is multiplied by s or g: the
    accumulator's; bf16 if several devices may sum it and the rows and the adapter are bf16, so that
    as many bytes are sent as for LoRA."""
    if choose.target().partitioned and rows.dtype == adapter.dtype == jnp.bfloat16:
        return rows.dtype
    return jnp.dtype(accumulation_dtype(rows.dtype))
