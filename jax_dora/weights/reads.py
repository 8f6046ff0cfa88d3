"""What reads each weight of a model, in one abstract call of it."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax

from jax_dora.ops import quantised
from jax_dora.weights.evaluate import scopes
from jax_dora.weights.module import public_methods
from jax_dora.weights.operations import Lookup, Product, Ragged
from jax_dora.weights.trace import weight_trace
from jax_dora.weights.view import View
from jax_dora.weights.weight import Weight

type Key = tuple[str, str]
"""A parameter: the path of its module, and its name there."""


@dataclasses.dataclass(frozen=True)
class Read:
    """One operation that reads a weight.

    Attributes:
      name: of the primitive.
      kind: "product", "lookup" or "other".
      axes: a letter for each axis of the weight as `Place.axes` has them; "" where it is no
        product and no lookup.
      features: of a product, the size of its features; of a lookup, the number of rows.
      scopes: the paths of the modules in whose methods it stands.
      order: its position among all reads of the call.
    """

    name: str
    kind: str
    axes: str
    features: int
    scopes: frozenset[str]
    order: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """What one call of a model reads.

    Attributes:
      reads: of each weight.
      results: the sizes of the last axes of what the call returns.
    """

    reads: Mapping[Key, tuple[Read, ...]]
    results: frozenset[int]


class Recorder:
    """Notes what reads one weight, and computes what the base would."""

    def __init__(
        self,
        shape: tuple[int, ...],
        paths: list[str],
        reads: list[Read],
        count: Callable[[], int],
    ) -> None:
        self.shape = shape
        self.paths = paths
        self.reads = reads
        self.count = count
        self.is_noted = False

    def product(self, weight: Weight, product: Product, x: jax.Array) -> jax.Array:
        contracted = {piece.axis for piece in weight.view.pieces(product.contracted)}
        batch = {piece.axis for piece in weight.view.pieces(product.batch)}
        self._note("dot_general", "product", weight, contracted, batch)
        numbers: Any = (
            (product.x_contracted, product.contracted),
            (product.x_batch, product.batch),
        )
        left, right = x, weight.base()
        if product.weight_first:
            numbers, left, right = (numbers[0][::-1], numbers[1][::-1]), right, left
        return lax.dot_general(
            left,
            right,
            numbers,
            precision=product.precision,
            preferred_element_type=product.dtype,
            out_sharding=product.out_sharding,
        )

    def ragged(self, weight: Weight, product: Ragged, x: jax.Array) -> None:
        contracted = {piece.axis for piece in weight.view.pieces(product.contracted)}
        batch = {piece.axis for piece in weight.view.pieces([product.group])}
        self._note("ragged_dot_general", "product", weight, contracted, batch)
        self.is_noted = True  # and the base's array is asked for next

    def lookup(self, weight: Weight, lookup: Lookup, indices: jax.Array) -> None:
        rows = {piece.axis for piece in weight.view.axes[lookup.axis]}
        self._note("gather", "lookup", weight, rows, set())
        self.is_noted = True

    def other(self, weight: Weight, name: str) -> jax.Array:
        if not self.is_noted:
            self.reads.append(Read(name, "other", "", 0, self._scopes(), self.count()))
        self.is_noted = False
        return weight.base()

    def _scopes(self) -> frozenset[str]:
        found = re.findall(r"dora\[(\d+)\]", scopes())
        return frozenset(self.paths[int(number)] for number in found)

    def _note(
        self, name: str, kind: str, weight: Weight, contracted: set[int], batch: set[int]
    ) -> None:
        seen = {piece.axis for axis in weight.view.axes for piece in axis}

        def role(axis: int) -> str:
            if axis in weight.stacked:
                return "s"
            if axis in contracted:
                return "i"
            one_of_many = axis not in seen and self.shape[axis] != 1
            return "b" if axis in batch or one_of_many else "o"

        axes = "".join(map(role, range(len(self.shape))))
        counted = "o" if kind == "product" else "i"
        sizes = [weight.kernel.shape[axis] for axis, one in enumerate(axes) if one == counted]
        features = math.prod(sizes)
        self.reads.append(Read(name, kind, axes, features, self._scopes(), self.count()))


def trace_reads(
    model: nnx.Module,
    modules_of: Callable[[Any], Mapping[str, Any]],
    weights_of: Callable[[Any], Mapping[Key, nnx.Param]],
    example: Any,
) -> Traced:
    """Calls a model abstractly, and returns what reads its weights.

    Args:
      model: without adapters; it is left as it is.
      modules_of: returns the modules of a model, each by one of its paths.
      weights_of: returns the parameters of a model whose reads are wanted.
      example: (arguments, keyword arguments), or a function of the model.

    Raises:
      Whatever the call raises.
    """
    copy = nnx.clone(model)
    paths = list(modules_of(copy))
    for number, module in enumerate(modules_of(copy).values()):
        if not isinstance(module, nnx.List | nnx.Dict):
            module.dora_scope = number
            module.__class__ = _scoped_type(type(module))
    keys = list(weights_of(copy))
    groups = _groups(weights_of(copy))
    reads: dict[Key, list[Read]] = {group[0]: [] for group in groups}
    count = functools.partial(next, iter(range(2**62)))
    results: set[int] = set()

    def run(arrays: Any) -> None:
        traced, given = together(arrays)
        weights = weights_of(traced)
        with weight_trace() as trace:
            for key in reads:
                raw = weights[key].get_raw_value()
                raw = quantised.dense(raw, raw.dtype)
                reader = Recorder(raw.shape, paths, reads[key], count)
                weight = Weight(View.of(raw.shape), None, {"kernel": raw}, reader)
                value = trace.lift(jax.typeof(raw), functools.partial(_same, weight))
                weights[key].set_raw_value(value, _unsafe_bypass_check=True)
            result = call_example(traced, given)
        for leaf in jax.tree.leaves(result):
            if getattr(leaf, "ndim", 0) and not isinstance(leaf, nnx.Variable):
                results.add(leaf.shape[-1])

    arrays, together = apart((copy, example))
    jax.eval_shape(run, arrays)
    found = {key: dict[Read, None]() for key in keys}
    for group in groups:
        for read in reads[group[0]]:
            inside = [key for key in group if key[0] in read.scopes]
            found[max(inside, key=lambda key: len(key[0]), default=group[0])][read] = None
    return Traced({key: tuple(one) for key, one in found.items()}, frozenset(results))


def _groups(weights: Mapping[Key, nnx.Param]) -> list[list[Key]]:
    """Returns the names of each parameter: several where modules share it."""
    groups: dict[int, list[Key]] = {}
    for key, variable in weights.items():
        groups.setdefault(id(variable), []).append(key)
    return list(groups.values())


def call_example(model: Any, example: Any) -> Any:
    """Returns what the model does with an example, as `trace_reads` takes it."""
    if callable(example):
        return example(model)
    args, kwargs = example
    return model(*args, **kwargs)


def apart(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the arrays of a pytree of arrays, modules and whatever else, and what puts such
    arrays into a copy of it."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_node)
    parts: list[Any] = []
    merges: list[Any] = []
    for leaf in leaves:
        if _is_node(leaf):
            graphdef, state = nnx.split(leaf)
            parts.append(state)
            merges.append(functools.partial(nnx.merge, graphdef))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            parts.append(leaf)
            merges.append(_same)
        else:
            parts.append(None)
            merges.append(lambda _, leaf=leaf: leaf)

    def together(parts: list[Any]) -> Any:
        made = [merge(part) for merge, part in zip(merges, parts, strict=True)]
        return jax.tree.unflatten(structure, made)

    return parts, together


@functools.cache
def _scoped_type(base: type[Any]) -> type[Any]:
    """Returns a subclass of a module's class whose methods run in a named scope of its own."""

    def scoped(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(f"dora[{self.dora_scope}]"):
                return method.__get__(self, type(self))(*args, **kwargs)

        return call

    methods = {name: scoped(method) for name, method in public_methods(base).items()}
    kind: Any = type(base)
    return kind(base.__name__, (base,), {"__module__": base.__module__, **methods})


def _same[T](value: T) -> T:
    return value


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)
