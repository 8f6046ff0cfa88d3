"""Records which operations read each weight in one abstract call of a model."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jax_dora.layers.base_layer import is_node
from jax_dora.layers.stack import STACK_LETTERS
from jax_dora.tracing.jaxpr_interpreter import current_scopes
from jax_dora.tracing.trace import WeightTrace
from jax_dora.tracing.weight_view import DotGeneral, Lookup, RaggedDot, Weight

type Key = tuple[str, str]
"""A parameter: the path of its module, and its name there."""


@dataclasses.dataclass(frozen=True)
class Read:
    """One operation that reads a weight.

    Attributes:
      name: of the primitive.
      kind: "product", "lookup" or "other".
      axes: one letter for each axis of the weight, as in `jax_dora.register`; "" for "other".
      features, width: of a product, its output features, 0; of a lookup, its rows, their size.
      scopes: the paths of the modules whose methods contain the operation.
      order: its position among all reads of the call.
    """

    name: str
    kind: str
    axes: str
    features: int
    width: int
    scopes: frozenset[str]
    order: int


@dataclasses.dataclass(frozen=True)
class Example:
    """The inputs to call a model with: a pytree whose leaves are the arrays. Arguments for
    `method`: arrays, `jax.ShapeDtypeStruct`s, modules or any other values; or instead a function
    that takes the model and calls it."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    function: Callable[[Any], Any] | None = None
    method: str = "__call__"

    @classmethod
    def of(cls, example: Any) -> "Example":
        """Returns the `Example` for `apply_dora`'s argument `example`."""
        if isinstance(example, Mapping):
            return cls(kwargs=dict(example))
        if isinstance(example, tuple | list):
            return cls(tuple(example))
        if callable(example):
            return cls(function=example)
        raise TypeError(
            f"example is a {type(example).__name__}; expected a tuple of arguments such as "
            "(tokens,), a dict of keyword arguments, or a function that takes the model and calls "
            "it"
        )

    @classmethod
    def of_arguments(cls, *args: Any, **kwargs: Any) -> "Example":
        """Returns the `Example` for `coverage`'s arguments."""
        is_function = len(args) == 1 and callable(args[0]) and not kwargs
        return cls(function=args[0]) if is_function else cls(args, kwargs)

    def call(self, model: Any) -> Any:
        """Calls the model with these inputs."""
        if self.function is not None:
            return self.function(model)
        return getattr(model, self.method)(*self.args, **self.kwargs)


jax.tree_util.register_dataclass(
    Example, data_fields=["args", "kwargs"], meta_fields=["function", "method"]
)


class ReadLog:
    """Collects the reads of a model's call.

    Attributes:
      paths: the modules' paths. The index of a module is the number in its scope's name, "dora[3]".
      reads: the reads of each weight.
      method_shapes: the shape of each parameter in its module's methods; if it varies, the one with
        the fewest axes.
      results: the sizes of the last axes of the call's results.
      input_lookups: the orders of the lookups whose indices depend on the call's integer inputs,
        such as tokens, unlike the indices of positions that the model counts itself.
    """

    def __init__(self, keys: Iterable[Key], paths: Iterable[str]) -> None:
        self.paths = list(paths)
        self.reads: dict[Key, tuple[Read, ...]] = dict.fromkeys(keys, ())
        self.method_shapes: dict[Key, tuple[int, ...]] = {}
        self.results: frozenset[int] = frozenset()
        self.input_lookups: frozenset[int] = frozenset()
        self.count = itertools.count().__next__

    def run(
        self, call: Callable[[Any, Any], None], model: Any, inputs: Any, example: Example
    ) -> None:
        """Traces `call(model, inputs)` of the arrays of the model and the example, a call that uses
        tracers of `traced`."""
        jaxpr = jax.make_jaxpr(call)(model, inputs)
        flags = [False] * len(jax.tree.leaves(model))
        flags += [is_integer(leaf) for leaf in jax.tree.leaves(inputs)]
        names, _ = dependent_names(jaxpr, flags, has_constant_inputs=example.function is not None)
        numbers = (re.fullmatch(r"dora_lookup\[(\d+)\]", name) for name in names)
        self.input_lookups = frozenset(int(number[1]) for number in numbers if number)

    def traced(self, trace: WeightTrace, key: Key, array: jax.Array) -> Any:
        """Returns a tracer of `trace` for a weight's array that records what reads it."""
        reader = Recorder(self, key, array.shape)
        weight = Weight.of(None, {"kernel": array}, reader)
        return trace.lift(jax.typeof(array), lambda: weight)

    def record_shape(self, number: int, name: str, shape: tuple[int, ...]) -> None:
        """Records the shape of a parameter in a method of module `number`."""
        key = self.paths[number], name
        self.method_shapes[key] = min(self.method_shapes.get(key, shape), shape, key=len)

    def record_result(self, result: Any) -> None:
        """Records the shapes of the call's result."""
        leaves = (leaf for leaf in jax.tree.leaves(result) if not isinstance(leaf, nnx.Variable))
        self.results = frozenset(leaf.shape[-1] for leaf in leaves if getattr(leaf, "ndim", 0))


class Recorder:
    """A `Reader` that records the reads of one weight and computes the base model's results."""

    def __init__(self, log: ReadLog, key: Key, shape: tuple[int, ...]) -> None:
        self.log, self.key, self.shape = log, key, shape
        self.is_recorded = False

    def dot_general(self, weight: Weight, product: DotGeneral, x: jax.Array) -> jax.Array:
        contraction = product.contraction(x.ndim, len(weight.view))
        axes = contraction.labels("i"), contraction.labels("b")
        self._record_operation("dot_general", "product", weight, *axes)
        return product(
            x,
            weight.base(),
            precision=product.precision,
            preferred_element_type=product.dtype,
            out_sharding=product.out_sharding,
        )

    def ragged_dot(self, weight: Weight, product: RaggedDot, x: jax.Array) -> None:
        group = (product.group,)
        self._record_operation("ragged_dot_general", "product", weight, product.contracted, group)
        # Since this returns None, the caller asks for the whole array next. That is the same read.
        self.is_recorded = True

    def lookup(self, weight: Weight, lookup: Lookup, indices: jax.Array) -> None:
        order = self._record_operation("gather", "lookup", weight, (lookup.axis,), ())
        checkpoint_name(indices, f"dora_lookup[{order}]")  # for `ReadLog.run`
        self.is_recorded = True

    def other(self, weight: Weight, name: str) -> jax.Array:
        if not self.is_recorded:
            self._append(name, "other", "")
        self.is_recorded = False
        return weight.base()

    def _append(self, name: str, kind: str, axes: str, features: int = 0, width: int = 0) -> int:
        numbers = re.findall(r"dora\[(\d+)\]", current_scopes())
        scopes = frozenset(self.log.paths[int(number)] for number in numbers)
        read = Read(name, kind, axes, features, width, scopes, self.log.count())
        self.log.reads[self.key] += (read,)
        return read.order

    def _record_operation(
        self, name: str, kind: str, weight: Weight, contracted: Sequence[int], batch: Sequence[int]
    ) -> int:
        """Records a product or lookup along these axes of the weight's array; returns its order."""
        every = range(len(weight.view))
        contracted_axes, batch_axes, viewed_axes = (
            {weight.origins[part] for axis in axes for part in weight.view[axis]}
            for axes in (contracted, batch, every)
        )

        def role(axis: int) -> str:
            if axis in weight.stacked:
                return STACK_LETTERS[weight.stacked.index(axis)]
            if axis in contracted_axes:
                return "i"
            is_indexed = axis not in viewed_axes and self.shape[axis] != 1
            return "b" if axis in batch_axes or is_indexed else "o"

        roles = [role(axis) for axis in range(len(self.shape))]
        short = [axis for axis, size in enumerate(self.shape) if roles[axis] == "o" and size == 1]
        if "i" not in roles and short:
            # A reshape may drop axes of size 1, so the contracted axis is one of these.
            roles[short[0]] = "i"
        axes = "".join(roles)
        parts = [*zip(weight.sizes, weight.origins, strict=True)]
        sizes = {
            role: math.prod(size for size, axis in parts if axes[axis] == role) for role in "io"
        }
        is_lookup = kind == "lookup"
        features, width = (sizes["i"], sizes["o"]) if is_lookup else (sizes["o"], 0)
        return self._append(name, kind, axes, features, width)


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Splits a pytree of arrays, modules and other values into its arrays and a function that
    rebuilds a copy of the pytree from such arrays."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    parts: list[Any] = []
    merges: list[Any] = []
    for leaf in leaves:
        if is_node(leaf):
            graphdef, state = nnx.split(leaf)
            parts.append(state)
            merges.append(functools.partial(nnx.merge, graphdef))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            parts.append(leaf)
            merges.append(lambda array: array)
        else:
            parts.append(None)
            merges.append(lambda _, leaf=leaf: leaf)

    def rebuild(parts: list[Any]) -> Any:
        leaves = [merge(part) for merge, part in zip(merges, parts, strict=True)]
        return jax.tree.unflatten(structure, leaves)

    return parts, rebuild


def dependent_names(
    jaxpr: Any, arguments: Sequence[bool], *, has_constant_inputs: bool
) -> tuple[set[str], list[bool]]:
    """Returns the `jax.ad_checkpoint.checkpoint_name`s of the values that depend on inputs, and for
    each result of a jaxpr whether it does. `arguments` tells which arguments are inputs. Constant
    arrays of integers may be too: those of a function that the program calls and that holds its
    inputs."""
    constants = [has_constant_inputs and is_integer(x) for x in getattr(jaxpr, "consts", ())]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    pairs = [*zip(jaxpr.constvars, constants, strict=False)]
    pairs += zip(jaxpr.invars, arguments, strict=True)
    dependent = {variable for variable, is_input in pairs if is_input}
    names: set[str] = set()

    def depends(atoms: Iterable[Any]) -> list[bool]:
        return [
            has_constant_inputs and is_integer(atom.val)
            if isinstance(atom, core.Literal)
            else atom in dependent
            for atom in atoms
        ]

    for eqn in jaxpr.eqns:
        inputs = depends(eqn.invars)
        results = [any(inputs)] * len(eqn.outvars)
        if eqn.primitive.name == "name" and any(inputs):
            names.add(eqn.params["name"])
        for inner in _inner_jaxprs(eqn.params):
            count = len(inner.in_avals) if hasattr(inner, "in_avals") else len(inner.invars)
            # The operands before the arguments are those of a choice of the jaxpr, if any.
            is_loop = eqn.primitive.name == "while" or count > len(inputs)
            given = [any(inputs)] * count if is_loop else inputs[len(inputs) - count :]
            found, of_inner = dependent_names(inner, given, has_constant_inputs=has_constant_inputs)
            names |= found
            if eqn.primitive.name in ("jit", "remat2", "checkpoint"):
                results = of_inner
        dependent |= {var for var, flag in zip(eqn.outvars, results, strict=True) if flag}
    return names, depends(jaxpr.outvars)


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(part, "jaxpr", part), "eqns"):
                yield part


def is_integer(array: Any) -> bool:
    is_array = getattr(array, "ndim", 0) > 0 and hasattr(array, "dtype")
    return is_array and bool(jnp.issubdtype(array.dtype, jnp.integer))
