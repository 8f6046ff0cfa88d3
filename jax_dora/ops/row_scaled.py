"""Products of FP8 activations and FP8 kernels, with one scale per row of x and per column of W.

    x W ≈ (x̂ Ŵ) ∘ (s_x ⊗ s_w)      x̂ = round(x / s_x)      s_x = max |x| / 448, per row

x̂ and Ŵ are float8_e4m3fn. Their products accumulate in fp32, and both scales multiply the result.
DoRA's g also scales columns, so it is applied at the same time, at no extra cost. The gradient with
respect to x ignores the rounding: it is the gradient of x W in x's dtype, or a product in FP8 too:

    (g∘dy) Wᵀ ≈ (d̂ Ŵᵀ) ∘ s_d      d̂ = round(d / s_d)      d = g∘dy∘s_w

s_w, and DoRA's g, scale the features that this product sums over, so they multiply dy before
rounding. d̂ is float8_e4m3fn or float8_e5m2. Ŵ is the same array in both products.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.tree_util import SequenceKey, register_pytree_with_keys

from jax_dora.ops import check, quantised, residuals
from jax_dora.ops.dispatch import choose, primitive
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import dot_general, per_feature
from jax_dora.ops.mosaic.rows import row_codes
from jax_dora.ops.operands import ProductSettings
from jax_dora.ops.rounding import bound

QTYPE = row_codes.QTYPE
BWD_QTYPES = (QTYPE, "float8_e5m2")
_ROWS = Layout((0, 1))  # Each row is contiguous.


def check_formats(act_qtype: Any, bwd_qtype: Any = None) -> None:
    """Raises ValueError unless the format of activations is None or "float8_e4m3fn", and that of
    gradients None or, with activations in FP8, one of `BWD_QTYPES`."""
    if act_qtype not in (None, QTYPE):
        raise ValueError(
            f"act_qtype is {act_qtype!r}; expected None, for activations as they are, or {QTYPE!r}"
        )
    if bwd_qtype not in (None, *BWD_QTYPES):
        raise ValueError(
            f"bwd_qtype is {bwd_qtype!r}; expected None, for gradients as they are, or one of "
            f"{', '.join(map(repr, BWD_QTYPES))}"
        )
    if bwd_qtype is not None and act_qtype is None:
        raise ValueError(
            f"bwd_qtype is {bwd_qtype!r} and act_qtype None; expected act_qtype={QTYPE!r} as well"
        )


def check_act_qtype(act_qtype: Any, name: str, kernel: Any, bwd_qtype: Any = None) -> None:
    """Raises ValueError unless activations can be quantised as `act_qtype` (None or
    "float8_e4m3fn") for their product with the kernel [..., in, out] that the message calls `name`:
    one that is quantised to float8_e4m3fn with one scale for all inputs of an output feature. It
    also raises the errors of `check_formats`."""
    check_formats(act_qtype, bwd_qtype)
    if act_qtype is None:
        return
    found, fix = "is not quantised", "quantise it that way with jax_dora.quantize"
    if quantised.is_quantised(kernel):
        per_column = kernel.scale.shape[-2] == 1 and kernel.zero_point is None
        if per_column and quantised.qtype_name(kernel) == QTYPE:
            return
        found = f"is quantised as {quantised.describe(kernel)}"
        fix = (
            f"quantise the weights in 16 bits that way, with quantize={QTYPE!r} for a model's "
            "folder (save_model writes a quantised model in floats)"
        )
    raise ValueError(
        f"act_qtype is {act_qtype!r} and {name} {found}; expected {QTYPE} with scales [1, out]: "
        f"{fix}, or leave act_qtype out"
    )


class RowScaled(NamedTuple):
    """Rows x [..., in] and their FP8 codes x̂ [..., in] and scales s_x f32[...], x ≈ codes ∘
    scales. A layer for which `layers.quantised_kernel.takes_codes` is true can be called with it
    instead of x.

    `again` is None, or x computed from what is kept for the backward pass, without the codes: the
    gradients of a rematerialised layer read it instead of x. `gated` is None, or the `Gating` whose
    `swiglu_of_results` x is: a projection may give the gradients of these arrays instead of x's."""

    x: Any
    codes: Any
    scales: Any
    again: Any = None
    gated: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def dtype(self) -> Any:
        return self.x.dtype


# `nnx.tabulate` requires that tuples among a layer's inputs have numbers as keys.
register_pytree_with_keys(
    RowScaled,
    lambda rows: (tuple((SequenceKey(i), array) for i, array in enumerate(rows)), None),
    lambda _, children: RowScaled(*children),
)


def plain(x: Any) -> Any:
    """Returns x [..., in] itself, of an array or of `RowScaled`."""
    return x.x if isinstance(x, RowScaled) else x


def for_gradients(x: Any) -> Any:
    """Returns the array [..., in] that gradients read, of an array or of `RowScaled`."""
    return plain(x) if getattr(x, "again", None) is None else x.again


class Rows(NamedTuple):
    """The operands of `ROW_CODES`: rows x [..., in], and columns [in], which multiply x before it
    is rounded, or None."""

    x: Any
    columns: Any = None


def coded(x: Any, implementation: str | None = None) -> RowScaled:
    """Returns x [..., in] with its codes, which have no gradient. Unless "xla" or "eager" is named,
    a Mosaic kernel may make them, if each row is on a single device. A row that devices share has
    one scale."""
    return RowScaled(x, *_codes(ProductSettings(implementation), Rows(x)))


def _codes(settings: ProductSettings, operands: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of rows in the format `settings.bwd_qtype`, or else float8_e4m3fn, and
    their scales."""
    if settings.implementation == "mosaic" and row_codes.refuses(*_call(operands.x)):
        settings = settings._replace(implementation=None)
    return primitive.call(ROW_CODES, settings, operands)


def coded_by(largest: jax.Array, x: jax.Array, qtype: str = QTYPE) -> RowScaled:
    """Returns x [..., in] with its codes, which have no gradient, by XLA. `largest` f32[...] is max
    |x| of each row, or nearly so; larger numbers are clipped."""
    largest, constant = lax.stop_gradient((largest, x))
    most = bound(qtype)
    # The lower bound avoids 0 / 0 for a row of zeros. jnp.maximum and jnp.clip propagate NaN.
    scales = jnp.maximum(largest * (1 / most), row_codes.LEAST)
    quotients = constant.astype(jnp.float32) / scales[..., None]
    return RowScaled(x, jnp.clip(quotients, -most, most).astype(qtype), scales)


def coded_by_xla(x: jax.Array, shard: Shard, qtype: str = QTYPE) -> RowScaled:
    """Returns x [..., in], of which a device may hold a part of each row, with its codes."""
    largest = shard.max(jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32))
    return coded_by(largest, x, qtype)


def _call(x: jax.Array) -> tuple[int, int, Any]:
    return x.size // max(x.shape[-1], 1), x.shape[-1], x.dtype


def _run_codes(
    settings: ProductSettings, shard: Shard, operands: Rows
) -> tuple[jax.Array, jax.Array]:
    (x, columns), qtype, choice = operands, settings.bwd_qtype or QTYPE, None
    if not shard.summed:
        candidate = (row_codes, _call(x))
        choice = choose.choose("row_codes", settings.implementation, candidate, optional=True)
    if choice is not None:
        return choice.launch(x, columns, qtype=qtype)
    if columns is not None:
        wide = x.astype(jnp.float32)
        x = wide * per_feature(columns.astype(jnp.float32), wide)
    return coded_by_xla(x, shard, qtype)[1:3]


ROW_CODES = Op(
    "row_codes",
    _run_codes,
    Rows("t i", "i"),
    ("t i", "t"),
    contracted="i",
    is_constant=True,
)


class Sums(NamedTuple):
    """A product x̂ Ŵ [..., out] (bf16 if x is bf16, else f32) before its scales, s_x f32[...] of
    the rows and s_w [out] of the columns, are applied."""

    total: Any
    rows: Any
    columns: Any

    @property
    def scaled(self) -> jax.Array:
        """Returns the scaled product, f32[..., out]."""
        total = self.total.astype(jnp.float32) * self.rows[..., None]
        return total * per_feature(self.columns, total)


def sums(
    rows: RowScaled,
    kernel: Any,
    shard: Shard,
    bwd_qtype: str | None = None,
    codes: jax.Array | None = None,
) -> Sums:
    """Returns x W of quantised rows [..., in] and a kernel [in, out] that `check_act_qtype`
    accepts, before the scales are applied. `bwd_qtype` is the format of gradients; `codes` are
    `transposed_codes`, if they exist."""
    codes = transposed_codes(kernel, bwd_qtype) if codes is None else codes
    total = shard.sum(_dot(rows.codes, codes, rows.dtype))
    return Sums(total, rows.scales, scales_of(kernel, total.shape[-1]))


def transposed_codes(kernel: Any, bwd_qtype: str | None = None) -> jax.Array:
    """Returns the codes [out, in] of a kernel [in, out] with contiguous rows. `bwd_qtype` is the
    format of gradients."""
    return transposed(kernel.qvalue, has_rows=bwd_qtype is not None)


def transposed(qvalue: jax.Array, has_rows: bool = True) -> jax.Array:
    """Returns FP8 codes [in, out] as [out, in] with contiguous rows. `has_rows` is whether theirs
    are contiguous, because a gradient reads them."""
    codes = lax.bitcast_convert_type(qvalue, jnp.int8)
    if has_rows:
        # Without the constraint XLA would transpose, and keep, the whole stack that a scan slices,
        # and not one layer at a time.
        codes = with_layout_constraint(codes, _ROWS)
    # Tensor cores require contiguous rows. If they are not, XLA transposes int8 several times
    # faster than FP8. The constraint makes it do so here, not in a product that is slower for it.
    rows = lax.optimization_barrier(with_layout_constraint(codes.T, _ROWS))
    return lax.bitcast_convert_type(rows, QTYPE)


def in_one_piece(codes: jax.Array) -> jax.Array:
    """Returns codes [n, k] that may be in parts, [parts, n, k / parts]."""
    return codes if codes.ndim == 2 else jnp.concatenate([*codes], axis=1)


def transposed_sums(rows: RowScaled, codes: jax.Array, shard: Shard | None = None) -> Sums:
    """Returns d Wᵀ [..., in] of `coded_gradient` and a kernel's codes [in, out] before its scales
    are applied."""
    # In the rows of Ŵ, as stored, the summed features are contiguous already.
    total = _dot(rows.codes, codes, rows.dtype)
    total = total if shard is None else shard.sum(total)
    return Sums(total, rows.scales, jnp.ones(codes.shape[0], jnp.float32))


def coded_gradient(
    settings: ProductSettings,
    d: jax.Array,
    kernel: Any,
    shard: Shard | None = None,
    g: jax.Array | None = None,
) -> RowScaled:
    """Returns d [..., out] with its codes for (g∘d) Wᵀ: its rows, multiplied by the kernel's scales
    and by g, unless that is None, rounded to `settings.bwd_qtype`, one of `BWD_QTYPES`. An operator
    gives the `shard` that it runs on."""
    columns = scales_of(kernel, d.shape[-1])
    rows = Rows(d, columns if g is None else g * columns.astype(g.dtype))
    make = _codes if shard is None else functools.partial(_run_codes, shard=shard)
    return RowScaled(d, *make(settings, operands=rows))


def scales_of(kernel: Any, out: int) -> jax.Array:
    """Returns the scale of each column of a kernel [in, out], of which a device may have a part."""
    return quantised.repeated(kernel.scale, 1, out)[0]


def _dot(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Returns x wᵀ of x [..., k] and w [n, k] in FP8, accumulated in fp32: bf16 if `dtype` is bf16,
    else f32."""
    # Not fp16, in which unscaled sums would overflow.
    result = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, axes, preferred_element_type=result)


class Factors(NamedTuple):
    """The operands of a product: x [..., in], or its `RowScaled`, and kernel [in, out]."""

    x: Any
    kernel: Any


def linear(settings: ProductSettings, operands: Factors) -> jax.Array:
    """Returns x W with quantised rows of x, in x's dtype; the precision and the format in
    `settings` are those of x's gradient."""
    x, kernel = operands
    return _linear(settings, Factors(x if isinstance(x, RowScaled) else coded(x), kernel))


def times_transposed(settings: ProductSettings, d: jax.Array, kernel: Any) -> jax.Array:
    """Returns d Wᵀ in d's dtype, with rows of d that are quantised as `settings` say."""
    if settings.bwd_qtype is None:
        return dot_general(settings.precision, d, quantised.dense(kernel, d.dtype), (-1, 1))
    rows = coded_gradient(settings, d, kernel)
    return transposed_sums(rows, kernel.qvalue).scaled.astype(d.dtype)


def _define(settings: ProductSettings, operands: Factors) -> jax.Array:
    return sums(*operands, Shard(), settings.bwd_qtype).scaled.astype(operands.x.dtype)


def _linear_fwd(
    settings: ProductSettings, operands: Factors, wanted: Factors
) -> tuple[jax.Array, Any]:
    if wanted.kernel:
        check.refuse_kernel_gradient(operands.kernel)
    return _define(settings, operands), operands.kernel


def _linear_bwd(settings: ProductSettings, kernel: Any, dy: jax.Array) -> dict[str, Any]:
    return {"x": RowScaled(times_transposed(settings, dy, kernel), None, None)}


_linear = residuals.with_gradient(Factors, _define, _linear_fwd, _linear_bwd)


def with_contiguous_columns(kernel: Any) -> Any:
    """Returns a quantised kernel [in, out] whose columns are contiguous in memory. A traced or
    abstract one is returned unchanged, and so is a stack: XLA would copy all of it into JAX's
    default layout, for a scan to slice. Codes are committed to their devices. An argument of a
    jitted function keeps this layout; a result has JAX's default layout again."""
    qvalue = kernel.qvalue
    if isinstance(qvalue, Tracer) or not isinstance(qvalue, jax.Array) or qvalue.ndim > 2:
        return kernel
    # This commits it to its devices: jax.jit reads an uncommitted array in the default layout.
    layout = Format(Layout((1, 0)), qvalue.sharding)
    qvalue = jax.device_put(qvalue, layout)
    return type(kernel)(qvalue, kernel.scale, kernel.zero_point, kernel.qtype)
