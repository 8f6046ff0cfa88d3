"""Adapted products, whichever axes of which operand the weight brings.

With W [in, out], g = magnitude / ‖W + s·AB‖ per column and · a product over the last axis of x:

    x W'    = xW + ((g-1)∘xW + g∘(s·xAB))           `jax_dora.ops.dora_linear`
    x W'ᵀ   = x̂ Wᵀ + s·(x̂ Bᵀ) Aᵀ   with x̂ = g∘x    for a weight that is tied to a head
    W'[ids] = W[ids] + ((g-1)∘W[ids] + g∘(s·A[ids] B))
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora import ops
from jax_dora.layers.rule import DoRARule
from jax_dora.ops import mesh as meshes
from jax_dora.ops.dropout import Dropout, drop
from jax_dora.weights.follow import Lookup, Product, Ragged
from jax_dora.weights.view import Piece
from jax_dora.weights.weight import Weight, effective

# Odd, so that the masks of products that share a seed differ.
_NEXT_SEED = 0x9E3779B9


class AdaptedReader:
    """Reads a weight with its adapter.

    Attributes:
      rule: the adapter's settings.
      dropout: of what lora_a reads, or None; each product draws a mask of its own.
    """

    def __init__(self, rule: DoRARule, dropout: Dropout | None) -> None:
        self.rule = rule
        self.dropout = dropout
        self._products = 0

    def product(self, weight: Weight, product: Product, x: jax.Array) -> jax.Array | None:
        plan = _plan(weight, product, x)
        if plan is None:
            return None
        dropout = self._next_dropout()
        multiply = functools.partial(self._multiply, product, plan.is_transposed)

        def compute(x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
            return plan(x.astype(product.dtype), arrays, multiply, dropout)

        mesh = meshes.explicit(x, weight.kernel)
        if mesh is not None:
            sharding = product.out_sharding or _base_sharding(weight, product, x)
            compute = meshes.left_to_xla(compute, mesh, getattr(sharding, "spec", sharding))
        return compute(x, dict(weight.cast(product.dtype).arrays))

    def ragged(self, weight: Weight, product: Ragged, x: jax.Array) -> jax.Array | None:
        i, o = weight.axes("i"), weight.axes("o")
        contracted = {piece.axis for piece in weight.view.pieces(product.contracted)}
        whole = weight.view.whole(product.group)
        out = [
            axis
            for axis in range(len(weight.view.axes))
            if axis != product.group and axis not in product.contracted
        ]
        shape = tuple(weight.view.shape[axis] for axis in out)
        in_order = weight.view.pieces(out) == _whole(weight, o) and weight.view.pieces(
            product.contracted
        ) == _whole(weight, i)
        if whole is None or weight.axes("b") != (whole,) or contracted != _long(weight, i):
            return None
        if not in_order:
            return None
        arrays = _matrices(weight, weight.arrays, (whole,), (), i, o)
        dtype, s = product.dtype, self.rule.scale
        g = _g(weight, dtype).reshape(weight.kernel.shape[whole], -1)
        rows = jnp.repeat(g, product.sizes, axis=0, total_repeat_length=x.shape[0])
        dot = functools.partial(
            lax.ragged_dot,
            group_sizes=product.sizes,
            precision=product.precision,
            preferred_element_type=dtype,
        )

        def stack(name: str) -> jax.Array:
            return arrays[name][:, 0].astype(x.dtype)

        def correction(x: jax.Array, base: jax.Array, seen: jax.Array) -> jax.Array:
            lora = dot(dot(seen, stack("lora_a")).astype(x.dtype), stack("lora_b"))
            wide = rows.astype(jnp.promote_types(dtype, jnp.float32))
            return (wide - 1) * base.astype(wide.dtype) + wide * (s * lora.astype(wide.dtype))

        base, dropped = dot(x, stack("kernel")), self._dropped(x)
        with_base = base if self.rule.dropout_mode == "adapter" else dot(dropped, stack("kernel"))
        change = correction(x, with_base, dropped)
        return (base.astype(change.dtype) + change).astype(dtype).reshape(x.shape[0], *shape)

    def lookup(self, weight: Weight, lookup: Lookup, indices: jax.Array) -> jax.Array | None:
        i, o = weight.axes("i"), weight.axes("o")
        if weight.axes("b") or weight.view.whole(lookup.axis) not in i or len(i) != 1:
            return None
        arrays = _matrices(weight, weight.arrays, (), (), i, o)
        others = [axis for axis in range(len(weight.view.axes)) if axis != lookup.axis]
        pieces = weight.view.pieces(others)
        if pieces != _whole(weight, o):
            return None
        take = functools.partial(_rows, indices, lookup)
        dtype = weight.kernel.dtype
        base, a = take(arrays["kernel"][0, 0]), take(arrays["lora_a"][0, 0]).astype(dtype)
        lora = a @ arrays["lora_b"][0, 0].astype(dtype)
        g = _g(weight, dtype).reshape(-1)
        y = ops.compose(base, lora, g, self.rule.scale, implementation=self.rule.implementation)
        count = indices.ndim - 1
        y = y.reshape(*y.shape[:count], *(weight.view.shape[axis] for axis in others))
        free = [axis for axis in range(y.ndim) if axis not in lookup.offset_dims]
        return jnp.moveaxis(y, range(y.ndim), [*free, *lookup.offset_dims])

    def other(self, weight: Weight, name: str) -> jax.Array:
        return effective(weight, _g(weight, weight.kernel.dtype), self.rule.scale)

    def _multiply(
        self,
        product: Product,
        is_transposed: bool,
        x: jax.Array,
        arrays: dict[str, jax.Array],
        seed: jax.Array | None,
    ) -> jax.Array:
        """Returns x W', or x W'ᵀ, of x [..., in] and matrices."""
        if is_transposed:
            return _times_transposed(x, arrays, self.rule.scale, product.precision)
        dropout = None
        if seed is not None and self.dropout is not None:
            dropout = Dropout(seed, self.dropout.rate, self.dropout.mode)
        return ops.dora_linear(
            x,
            **arrays,
            scale=self.rule.scale,
            implementation=self.rule.implementation,
            precision=product.precision,
            dropout=dropout,
            keep_inner=self.rule.keep_inner,
        )

    def _next_dropout(self) -> Dropout | None:
        if self.dropout is None:
            return None
        seed = self.dropout.seed + jnp.uint32(self._products * _NEXT_SEED % 2**32)
        self._products += 1
        return Dropout(seed, self.dropout.rate, self.dropout.mode)

    def _dropped(self, x: jax.Array) -> jax.Array:
        dropout = self._next_dropout()
        return x if dropout is None else drop(x, dropout.seed, dropout.rate)


class _Plan:
    """How x, the weight and the result of one product are matrices."""

    def __init__(self, weight: Weight, product: Product, x: jax.Array, *, is_transposed: bool):
        view, self.is_transposed = weight.view, is_transposed
        self.weight = weight
        axes = range(len(view.axes))
        free = [a for a in axes if a not in product.contracted and a not in product.batch]
        rows = [
            a for a in range(x.ndim) if a not in product.x_contracted and a not in product.x_batch
        ]
        contracted = view.pieces(product.contracted)
        batch = view.pieces(product.batch)
        roles = weight.roles
        assert roles is not None
        summed = [piece for piece in _sorted(contracted) if roles[piece.axis] == "b"]
        both = _sorted([*summed, *batch])
        self.lone = _sorted([piece for piece in view.pieces(free) if roles[piece.axis] == "b"])
        self.inner = [piece for piece in _sorted(contracted) if roles[piece.axis] != "b"]
        outer = [piece for piece in _sorted(view.pieces(free)) if roles[piece.axis] != "b"]
        self.both = both
        # x: its axes apart, then as matrices.
        apart: list[Any] = [("row", axis) for axis in range(x.ndim)]
        for mine, its in zip(
            (*product.x_contracted, *product.x_batch),
            (*product.contracted, *product.batch),
            strict=True,
        ):
            apart[mine] = view.axes[its]
        labels: list[Any] = []
        sizes: dict[Any, int] = {}
        for axis, label in enumerate(apart):
            if isinstance(label, tuple) and label[:1] == ("row",):
                labels.append(label)
                sizes[label] = x.shape[axis]
            else:
                labels += label
                sizes |= {piece: piece.size for piece in label}
        row_labels = [("row", axis) for axis in rows]
        self.x_split = tuple(sizes[label] for label in labels)
        self.x_order = tuple(labels.index(one) for one in (*both, *row_labels, *self.inner))
        count = math.prod(piece.size for piece in both)
        self.x_shape = (count, *(sizes[row] for row in row_labels), _size(self.inner))
        # y: [both, lone, *rows, outer] to what the product gives.
        of_y = [*both, *self.lone, *row_labels, *outer]
        sizes |= {piece: piece.size for piece in (*self.lone, *outer)}
        self.y_split = tuple(sizes[label] for label in of_y)
        self.y_sum = tuple(place for place, label in enumerate(of_y) if label in summed)
        left = [label for label in of_y if label not in summed]
        of_rows = [[row] for row in row_labels]
        of_free = [list(view.axes[axis]) for axis in free]
        parts = [*(list(view.axes[axis]) for axis in product.batch)]
        parts += [*of_free, *of_rows] if product.weight_first else [*of_rows, *of_free]
        self.y_order = tuple(left.index(label) for part in parts for label in part)
        self.y_shape = tuple(math.prod(sizes[label] for label in part) for part in parts)

    def __call__(
        self,
        x: jax.Array,
        arrays: dict[str, jax.Array],
        multiply: Callable[..., jax.Array],
        dropout: Dropout | None,
    ) -> jax.Array:
        weight = self.weight
        x = x.reshape(self.x_split).transpose(self.x_order).reshape(self.x_shape)
        b = tuple(dict.fromkeys(piece.axis for piece in self.both))
        others = tuple(axis for axis in weight.axes("b") if axis not in b)
        matrices = _matrices(weight, arrays, b, others, weight.axes("i"), weight.axes("o"))
        lone = matrices["kernel"].shape[1]
        seeds = None
        if dropout is not None:
            index = jnp.arange(x.shape[0] * lone, dtype=jnp.uint32).reshape(x.shape[0], lone, 1)
            seeds = dropout.seed[None, None] + index * jnp.uint32(_NEXT_SEED)
        if lone == 1 and x.shape[0] == 1:
            one = {name: array[0, 0] for name, array in matrices.items()}
            y = multiply(x[0], one, None if seeds is None else seeds[0, 0])[None, None]
        else:
            y = jax.vmap(jax.vmap(multiply, in_axes=(None, 0, 0)))(x, matrices, seeds)
        y = y.reshape(self.y_split)
        if self.y_sum:
            y = y.sum(self.y_sum)
        return y.transpose(self.y_order).reshape(self.y_shape)


def _plan(weight: Weight, product: Product, x: jax.Array) -> _Plan | None:
    """Returns how to compute the product with matrices; None where its contracted axes are neither
    all of the weight's contracted ones nor all of its features."""
    view = weight.view
    contracted = {piece.axis for piece in view.pieces(product.contracted)}
    batch = {piece.axis for piece in view.pieces(product.batch)}
    free = {
        piece.axis
        for axis in range(len(view.axes))
        if axis not in (*product.contracted, *product.batch)
        for piece in view.axes[axis]
    }
    b, i, o = (_long(weight, weight.axes(role)) for role in "bio")
    if contracted & free or contracted & batch or batch & free or batch - b:
        return None
    if contracted - b == i and free - b == o:
        return _Plan(weight, product, x, is_transposed=False)
    if contracted - b == o and free - b == i:
        return _Plan(weight, product, x, is_transposed=True)
    return None


def _times_transposed(
    x: jax.Array, arrays: dict[str, jax.Array], scale: float, precision: Any
) -> jax.Array:
    dtype = x.dtype
    g = ops.magnitude_scale(arrays["magnitude"], arrays["norm"], dtype)
    g = g.reshape((1,) * (x.ndim - 1) + g.shape)
    scaled = (x.astype(g.dtype) * g).astype(dtype)
    dot = functools.partial(jnp.matmul, precision=precision)
    z = dot(scaled, (scale * arrays["lora_b"]).astype(dtype).T)
    return dot(scaled, arrays["kernel"].T) + dot(z, arrays["lora_a"].astype(dtype).T)


def _matrices(
    weight: Weight,
    arrays: Any,
    b: Sequence[int],
    others: Sequence[int],
    i: Sequence[int],
    o: Sequence[int],
) -> dict[str, jax.Array]:
    """Returns kernel [b, others, in, out], lora_a [b, others, in, r], lora_b [b, others, r, out],
    magnitude and norm [b, others, out]."""
    sizes = weight.kernel.shape

    def size(axes: Sequence[int]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    lead = (size(b), size(others))
    kernel = arrays["kernel"].transpose((*b, *others, *i, *o))
    rank = arrays["lora_a"].shape[-1]
    batch = weight.axes("b")
    order = tuple(batch.index(axis) for axis in (*b, *others))

    def ordered(array: jax.Array) -> jax.Array:
        return array.transpose((*order, *range(len(order), array.ndim)))

    return {
        "kernel": kernel.reshape(*lead, size(i), size(o)),
        "lora_a": ordered(arrays["lora_a"]).reshape(*lead, size(i), rank),
        "lora_b": ordered(arrays["lora_b"]).reshape(*lead, rank, size(o)),
        "magnitude": ordered(arrays["magnitude"]).reshape(*lead, size(o)),
        "norm": ordered(arrays["norm"]).reshape(*lead, size(o)),
    }


def _g(weight: Weight, dtype: Any) -> jax.Array:
    """Returns g [*b, *o]."""
    return _magnitude_scale(weight.arrays["magnitude"], weight.arrays["norm"], dtype)


def _magnitude_scale(magnitude: jax.Array, norm: jax.Array, dtype: Any) -> jax.Array:
    flat = ops.magnitude_scale(magnitude.reshape(-1), norm.reshape(-1), dtype)
    return flat.reshape(magnitude.shape)


def _base_sharding(weight: Weight, product: Product, x: jax.Array) -> Any:
    """Returns how JAX shards the product of x and the base."""
    contracted, batch = (
        (product.x_contracted, product.contracted),
        (product.x_batch, product.batch),
    )
    left, right = x, weight.base()
    if product.weight_first:
        contracted, batch, left, right = contracted[::-1], batch[::-1], right, left
    numbers = (contracted, batch)
    found = jax.eval_shape(lambda a, b: lax.dot_general(a, b, numbers), left, right)
    return found.sharding


def _rows(indices: jax.Array, lookup: Lookup, matrix: jax.Array) -> jax.Array:
    """Returns the rows of a matrix at `indices` [..., 1]."""
    count = indices.ndim - 1
    numbers = lax.GatherDimensionNumbers((count,), (0,), (0,))
    return lax.gather(
        matrix,
        indices,
        numbers,
        (1, matrix.shape[1]),
        mode=lookup.mode,
        fill_value=lookup.fill_value,
    )


def _sorted(pieces: Sequence[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (piece.axis, -piece.stride))


def _size(pieces: Sequence[Piece]) -> int:
    return math.prod(piece.size for piece in pieces)


def _long(weight: Weight, axes: Sequence[int]) -> set[int]:
    return {axis for axis in axes if weight.kernel.shape[axis] != 1}


def _whole(weight: Weight, axes: Sequence[int]) -> list[Piece]:
    """Returns the pieces of these axes of the weight, whole and in its order."""
    sizes = weight.kernel.shape
    return [Piece(axis, 1, sizes[axis]) for axis in axes if sizes[axis] != 1]
