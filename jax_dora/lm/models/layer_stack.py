"""Runs the layers of a stack, whose arrays have a leading axis of layers, one after the other.

XLA passes a slice of bytes to a kernel without a copy, but copies a slice of 4-bit elements one by
one, which takes longer than a decoding step of few rows (`benchmarks/results/h100/tried.jsonl`). In
inference, a layer's 4-bit arrays are therefore taken from the stack as bytes. In a training step,
XLA would copy the whole stack for that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.ops.dispatch import mesh as meshes


def scan(function: Callable[..., tuple[Any, Any]], x: Any, layers: Any) -> tuple[Any, Any]:
    """Returns the result of `lax.scan(function, x, layers)`, for inference."""
    views, restore = _as_bytes(layers)
    return lax.scan(lambda x, layer: function(x, restore(layer)), x, views)


def scan_parts(
    parts: Sequence[tuple[int, Callable[[Callable[..., Any]], Callable[..., Any]]]],
    function: Callable[..., tuple[Any, Any]],
    x: Any,
    layers: Any,
) -> tuple[Any, Any]:
    """Returns the result of `lax.scan(function, x, layers)`, by a scan for each of `parts`: pairs
    of a number of layers and a transformation of `function` for them, such as `jax.checkpoint`.

    Each scan slices codes out of the whole stack, because a part of a stack would be a copy. Unless
    nearly all bytes are codes, one scan with the last transformation runs all layers.
    """
    leaves, structure = jax.tree.flatten(layers)
    if len(parts) == 1 or not _has_little_but_codes(leaves):
        return lax.scan(parts[-1][1](function), x, layers)
    stacks = [leaf for leaf in leaves if _is_stack_of_codes(leaf)]
    others = [leaf for leaf in leaves if not _is_stack_of_codes(leaf)]

    def step(x: Any, layer: tuple[jax.Array, list[Any]]) -> tuple[Any, Any]:
        number, sliced = layer[0], iter(layer[1])
        codes = (lax.dynamic_index_in_dim(stack, number, keepdims=False) for stack in stacks)
        own = [next(codes if _is_stack_of_codes(leaf) else sliced) for leaf in leaves]
        return function(x, structure.unflatten(own))

    start, results = 0, []
    for count, transform in parts:
        # An array, because JAX would stack numbers of NumPy again for the backward pass; and a
        # constant, as XLA reads a slice in place only if it can compute the number itself.
        numbers = jnp.asarray(np.arange(start, start + count, dtype=np.int32))
        sliced = [lax.slice_in_dim(leaf, start, start + count) for leaf in others]
        x, result = lax.scan(transform(step), x, (numbers, sliced))
        results.append(result)
        start += count
    return x, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *results)


def _has_little_but_codes(leaves: Sequence[jax.Array]) -> bool:
    sizes = {True: 0, False: 0}
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            sizes[_is_stack_of_codes(leaf)] += leaf.size * jax.dtypes.itemsize_bits(leaf.dtype)
    return sizes[True] > 20 * sizes[False]


def _is_stack_of_codes(leaf: jax.Array) -> bool:
    """Returns whether a leaf is a stack of matrices of at most 8 bits a number."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    return leaf.ndim > 2 and jax.dtypes.itemsize_bits(leaf.dtype) <= 8


def unrolled_scan(
    function: Callable[..., tuple[Any, Any]], x: Any, layers: Iterable[Any]
) -> tuple[Any, Any]:
    """Returns the result of `scan`, for a list of layers and without a loop in the program."""
    results = []
    for layer in layers:
        x, result = function(x, layer)
        results.append(result)
    return x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *results)


def unstacked(tree: Any, count: int, *, inference: bool = False) -> list[Any]:
    """Returns the layers of a stack as a list.

    `lax.split` needs only one copy to stack the gradients again.
    """
    views, restore = _as_bytes(tree) if inference else (tree, lambda layer: layer)
    leaves, structure = jax.tree.flatten(views)
    parts = [[part[0] for part in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [restore(structure.unflatten(layer)) for layer in zip(*parts, strict=True)]


def _as_bytes(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a tree with bytes in place of 4-bit arrays, and the function that reverses this.

    The function takes trees of the same structure, whose arrays may lack leading axes.
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = [leaf.dtype if _is_packed(leaf) else None for leaf in leaves]

    def view(leaf: jax.Array, dtype: Any) -> jax.Array:
        if dtype is None:
            return leaf
        pairs = leaf.reshape(*leaf.shape[:-1], leaf.shape[-1] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint8)

    def original(leaf: jax.Array, dtype: Any) -> jax.Array:
        if dtype is None:
            return leaf
        return lax.bitcast_convert_type(leaf, dtype).reshape(*leaf.shape[:-1], -1)

    def restore(tree: Any) -> Any:
        viewed, structure = jax.tree.flatten(tree)
        return structure.unflatten(map(original, viewed, dtypes))

    return structure.unflatten(map(view, leaves, dtypes)), restore


def _is_packed(array: jax.Array) -> bool:
    """Returns whether bytes hold two elements of the array each, in the same row."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or jax.dtypes.itemsize_bits(dtype) != 4:
        return False
    # On explicit axes, JAX would require the sharding of the bytes.
    return array.ndim > 1 and array.shape[-1] % 2 == 0 and meshes.explicit(array) is None
