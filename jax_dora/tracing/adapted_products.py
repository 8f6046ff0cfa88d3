"""Adapted products and lookups of a weight, whatever their axes and whichever operand the weight
is.

With W [in, out], g = magnitude / ‖W + s·AB‖ per column, and products over the last axis of x:

    x W'    = xW + ((g-1)∘xW + g∘(s·xAB))           `jax_dora.ops.linear`
    x W'ᵀ   = x̂ Wᵀ + s·(x̂ Bᵀ) Aᵀ   with x̂ = g∘x    for a weight that is tied to a head
    W'[ids] = W[ids] + ((g-1)∘W[ids] + g∘(s·A[ids] B))
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora import ops
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.seeds import NEXT_SEED
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dropout import Dropout, drop_for
from jax_dora.ops.dtypes import accumulation_dtype
from jax_dora.ops.linear import scaled_linear, times_transposed
from jax_dora.tracing.weight_view import DotGeneral, Lookup, RaggedDot, Weight, effective_weight


class AdaptedReader:
    """Computes the operations that read a weight, with its adapter: by a rule's settings, and with
    a dropout of lora_a's input, or None, of which each product has its own mask."""

    def __init__(self, rule: DoRARule, dropout: Dropout | None) -> None:
        self.rule = rule
        self.dropout = dropout
        self._products = 0

    def dot_general(self, weight: Weight, product: DotGeneral, x: jax.Array) -> jax.Array | None:
        found = _contraction_of(weight, product, x.ndim)
        if found is None:
            return None
        contraction, is_transposed = found
        dropout = self._next_dropout()
        multiply = functools.partial(self._multiply, product, is_transposed)

        def compute(x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
            matrices = contraction.matrices(**arrays)
            return contraction(multiply, x.astype(product.dtype), matrices, dropout)

        def spec() -> jax.sharding.PartitionSpec:
            if product.out_sharding is not None:
                return getattr(product.out_sharding, "spec", product.out_sharding)
            return meshes.result_spec(product, x, weight.base())

        compute = meshes.on_explicit_axes(compute, spec, x, weight.kernel)
        return compute(x, dict(weight.cast(product.dtype).arrays))

    def ragged_dot(self, weight: Weight, product: RaggedDot, x: jax.Array) -> jax.Array | None:
        group = weight.whole_part(product.group)
        used = (product.group, *product.contracted)
        out = [axis for axis in range(len(weight.view)) if axis not in used]
        in_order = weight.parts_of_axes(product.contracted) == weight.nontrivial_parts("i")
        in_order = in_order and weight.parts_of_axes(out) == weight.nontrivial_parts("o")
        if group is None or weight.parts("b") != (group,) or not in_order:
            return None
        arrays = weight.contraction().matrices(**weight.arrays)
        dtype, s = product.dtype, self.rule.scale
        rows = jnp.repeat(arrays["g"], product.sizes, axis=0, total_repeat_length=x.shape[0])
        dot = functools.partial(
            lax.ragged_dot,
            group_sizes=product.sizes,
            precision=product.precision,
            preferred_element_type=dtype,
        )

        def matrices(name: str) -> jax.Array:
            return arrays[name].astype(x.dtype)

        base, dropped = dot(x, matrices("kernel")), x
        if (dropout := self._next_dropout()) is not None:
            dropped = drop_for(self.rule.implementation)(x, dropout.seed, dropout.rate)
        corrected = base
        if self.rule.dropout_mode != "adapter":
            corrected = dot(dropped, matrices("kernel"))
        lora = dot(dot(dropped, matrices("lora_a")).astype(x.dtype), matrices("lora_b"))
        g = rows.astype(accumulation_dtype(dtype))
        base, corrected, lora = (array.astype(g.dtype) for array in (base, corrected, lora))
        y = base + ((g - 1) * corrected + g * (s * lora))
        return y.astype(dtype).reshape(x.shape[0], *(weight.shape[axis] for axis in out))

    def lookup(self, weight: Weight, lookup: Lookup, indices: jax.Array) -> jax.Array | None:
        others = [axis for axis in range(len(weight.view)) if axis != lookup.axis]
        is_row = weight.parts("i") == (weight.whole_part(lookup.axis),) and not weight.axes("b")
        if not is_row or weight.parts_of_axes(others) != weight.nontrivial_parts("o"):
            return None
        arrays = weight.contraction().matrices(**weight.arrays)
        count = indices.ndim - 1
        numbers = lax.GatherDimensionNumbers((count,), (0,), (0,))

        def take(matrix: jax.Array) -> jax.Array:
            options = {"mode": lookup.mode, "fill_value": lookup.fill_value}
            return lax.gather(matrix, indices, numbers, (1, matrix.shape[1]), **options)

        dtype = weight.kernel.dtype
        base, a = take(arrays["kernel"][0]), take(arrays["lora_a"][0]).astype(dtype)
        lora = a @ arrays["lora_b"][0].astype(dtype)
        y = ops.compose(
            base, lora, arrays["g"][0], self.rule.scale, implementation=self.rule.implementation
        )
        y = y.reshape(*y.shape[:count], *(weight.shape[axis] for axis in others))
        free = [axis for axis in range(y.ndim) if axis not in lookup.offset_dims]
        return jnp.moveaxis(y, range(y.ndim), [*free, *lookup.offset_dims])

    def other(self, weight: Weight, name: str) -> jax.Array:
        return effective_weight(weight, self.rule.scale)

    def _multiply(
        self,
        product: DotGeneral,
        is_transposed: bool,
        x: jax.Array,
        arrays: dict[str, Any],
        dropout: Dropout | None,
    ) -> jax.Array:
        """Returns x W', or x W'ᵀ if `is_transposed`, of x [..., in] and matrices."""
        if is_transposed:
            return times_transposed(x, **arrays, scale=self.rule.scale, precision=product.precision)
        return scaled_linear(
            x,
            **arrays,
            scale=self.rule.scale,
            dropout=dropout,
            implementation=self.rule.implementation,
            precision=product.precision,
            keep_inner=self.rule.keep_inner,
        )

    def _next_dropout(self) -> Dropout | None:
        if self.dropout is None:
            return None
        seed = self.dropout.seed + jnp.uint32(self._products * NEXT_SEED % 2**32)
        self._products += 1
        return dataclasses.replace(self.dropout, seed=seed)


def _contraction_of(
    weight: Weight, product: DotGeneral, ndim: int
) -> tuple[Contraction, bool] | None:
    """Returns the contraction of an x of `ndim` axes and a weight, and whether it contracts the
    weight's features instead of its inputs; None if it contracts neither exactly. Its labels are
    the numbers of the weight's parts, and -1, -2, … for the row axes of x."""
    view = product.contraction(ndim, len(weight.view))
    batch, inner, outer = ({*weight.parts_of_axes(view.labels(role))} for role in "bio")
    b, i, o = ({*weight.nontrivial_parts(role)} for role in "bio")
    contracted = inner - b, outer - b
    if not batch <= b or contracted not in ((i, o), (o, i)):
        return None
    parts = {axis: tuple(weight.parts_of_axes([axis])) for axis in view.weight}
    x, y = (tuple(parts.get(label, label) for label in axes) for axes in (view.x, view.y))
    return weight.contraction(x, y), contracted != (i, o)
