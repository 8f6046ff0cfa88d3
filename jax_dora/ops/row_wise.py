"""Products in FP8 on both sides: a scale for each row of x, and one for each column of W.

    x W ≈ (x̂ Ŵ) ∘ (s_x ⊗ s_w)      x̂ = round(x / s_x)      s_x = max |x| / 448, of a row

x̂ and Ŵ are float8_e4m3fn, their products are added up in fp32, and both scales are applied to what
comes out, so that a magnitude over a norm, which scales columns too, costs nothing. The gradient
with respect to x is that of x W in x's dtype: what rounding adds has none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental.layout import Format, Layout

from jax_dora.ops import check, choose, quantised, residuals
from jax_dora.ops.compose import per_feature
from jax_dora.ops.mosaic import row_codes
from jax_dora.ops.reduction import dot_general
from jax_dora.ops.rounding import bound
from jax_dora.ops.shard import Shard

QTYPE = row_codes.QTYPE


def check_format(act_qtype: Any) -> None:
    """Raises ValueError unless a format of activations is None or "float8_e4m3fn"."""
    if act_qtype not in (None, QTYPE):
        raise ValueError(
            f"act_qtype is {act_qtype!r}; expected None, for activations as they are, or {QTYPE!r}"
        )


def check_act_qtype(act_qtype: Any, name: str, kernel: Any) -> None:
    """Checks that activations can be quantised beside a kernel.

    Args:
      act_qtype: as `jax_dora.ops.dora_linear`'s.
      name: of the kernel, for the message.
      kernel: [..., in, out].

    Raises:
      ValueError: `act_qtype` is neither None nor "float8_e4m3fn", or the kernel is not quantised to
        float8_e4m3fn with one scale for all inputs of an output feature.
    """
    check_format(act_qtype)
    if act_qtype is None:
        return
    told = "is not quantised"
    if quantised.is_quantised(kernel):
        whole = kernel.scale.shape[-2] == 1 and kernel.zero_point is None
        if whole and quantised.qtype_name(kernel) == QTYPE:
            return
        told = f"is quantised as {quantised.described(kernel)}"
    raise ValueError(
        f"act_qtype is {act_qtype!r} and {name} {told}; expected {QTYPE} with scales [1, out]: "
        "quantise it so by jax_dora.quantize, or leave act_qtype out"
    )


class Sums(NamedTuple):
    """The sums that a product adds up, and the scales that they are to be multiplied with.

    Attributes:
      total: x̂ Ŵ [..., out], bf16 where x is, else f32.
      rows, columns: s_x f32[...] and s_w [out].
    """

    total: Any
    rows: Any
    columns: Any

    @property
    def scaled(self) -> jax.Array:
        """Returns the product, f32[..., out]."""
        total = self.total.astype(jnp.float32) * self.rows[..., None]
        return total * per_feature(self.columns, total)


def sums(x: jax.Array, kernel: Any, shard: Shard, implementation: str | None) -> Sums:
    """Returns the parts of x W by quantised rows.

    Args:
      x: [..., in].
      kernel: [in, out], as `check_act_qtype` wants it.
      shard: how the devices share the operands; a row that lies on several has one scale.
      implementation: None or "mosaic" may round rows by a kernel, which has to lie on one device.
    """
    choice = None
    if not shard.summed:
        call = (x.size // max(x.shape[-1], 1), x.shape[-1], x.dtype)
        choice = choose.choose("row_codes", implementation, (row_codes, call), optional=True)
    if choice is not None:
        codes, rows = row_codes.launch(x, **choice.knobs)
    else:
        largest = shard.largest(jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32))
        # The least leaves a row of zeros zeros; NaN stays NaN.
        rows = jnp.maximum(largest * (1 / bound(QTYPE)), row_codes.LEAST)
        codes = (x.astype(jnp.float32) / rows[..., None]).astype(QTYPE)
    total = shard.sum(_multiplied(codes, kernel.qvalue, x.dtype))
    return Sums(total, rows, quantised.repeated(kernel.scale, 1, kernel.shape[1])[0])


def product(x: jax.Array, kernel: Any) -> jax.Array:
    """Returns x W by quantised rows, f32[..., out], for x [..., in] and kernel [in, out]."""
    # XLA may share this among devices, which it could not with a kernel.
    return sums(x, kernel, Shard(), "xla").scaled


def _multiplied(x: jax.Array, qvalue: jax.Array, dtype: Any) -> jax.Array:
    """Returns x qvalue of FP8 numbers, added up in fp32; in bf16 where `dtype` is that."""
    # cuBLAS takes columns that lie in one piece. Where they do not, XLA turns bytes several times
    # faster than numbers; where they do (`columns_in_one_piece`) this moves nothing.
    turned = lax.bitcast_convert_type(qvalue, jnp.int8).T
    turned = lax.bitcast_convert_type(lax.optimization_barrier(turned), qvalue.dtype)
    # fp16 has no room for sums of unscaled products.
    narrow = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, turned, axes, preferred_element_type=narrow)


class Product(NamedTuple):
    """The operands of a product: x [..., in], kernel [in, out]."""

    x: Any
    kernel: Any


def _linear(precision: Any, operands: Product) -> jax.Array:
    return product(*operands).astype(operands.x.dtype)


def _linear_fwd(precision: Any, operands: Product, wanted: Product) -> tuple[jax.Array, Any]:
    if wanted.kernel:
        check.not_differentiated(operands.kernel)
    return _linear(precision, operands), operands.kernel


def _linear_bwd(precision: Any, kernel: Any, dy: jax.Array) -> dict[str, jax.Array]:
    return {"x": dot_general(precision, dy, quantised.dense(kernel, dy.dtype), (-1, 1))}


linear = residuals.with_gradient(Product, _linear, _linear_fwd, _linear_bwd)
"""`(precision, operands) -> product` in x's dtype; the precision is that of the gradient's."""


def columns_in_one_piece(kernel: Any) -> Any:
    """Returns a quantised kernel [..., in, out] each of whose columns lies in one piece of memory.

    Its shape, sharding and numbers do not change. Arguments of a program keep such a layout, and
    results of one have JAX's own again. A kernel without numbers is returned as it is.
    """
    qvalue = kernel.qvalue
    if isinstance(qvalue, Tracer) or not isinstance(qvalue, jax.Array):
        return kernel
    *lead, rows, columns = range(qvalue.ndim)
    layout = Format(Layout((*lead, columns, rows)), qvalue.sharding)
    qvalue = jax.device_put(qvalue, layout)
    return type(kernel)(qvalue, kernel.scale, kernel.zero_point, kernel.qtype)
