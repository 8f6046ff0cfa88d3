"""What reads each parameter of a linen model, in one abstract call of it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, traverse_util

from jax_dora.adapt.sites import Site, sites
from jax_dora.layers import DORA_CLASSES
from jax_dora.linen.layer import COUNTERPARTS
from jax_dora.linen.params import params_path
from jax_dora.weights.reads import Key, Read, Recorder, Traced
from jax_dora.weights.trace import weight_trace
from jax_dora.weights.view import View
from jax_dora.weights.weight import Weight

_RECORDS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Example:
    """What a linen model is called with.

    Attributes:
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s or whatever else.
      method: a function of the bound model and these, or None for `__call__`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: Any = None

    @classmethod
    def of(cls, example: Any) -> "Example":
        """Returns an example as `apply_dora` takes it.

        Raises:
          TypeError: it is none.
        """
        if isinstance(example, Mapping):
            return cls((), example)
        if isinstance(example, tuple | list):
            return cls(tuple(example), {})
        if callable(example):
            return cls((), {}, example)
        raise TypeError(
            f"example is a {type(example).__name__}; expected a tuple of arguments such as "
            "(tokens,), a dict of keyword arguments, or a function that takes the model and calls "
            "it"
        )

    def apart(self) -> tuple[list[Any], Callable[[list[Any]], "Example"]]:
        """Returns its arrays, and what puts such arrays into their places."""
        leaves, structure = jax.tree.flatten((self.args, dict(self.kwargs)))
        is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

        def together(arrays: list[Any]) -> Example:
            given = iter(arrays)
            parts = [
                next(given) if dynamic else leaf
                for leaf, dynamic in zip(leaves, is_array, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(structure, parts)
            return Example(args, kwargs, self.method)

        return [leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic], together


class _Observed(nn.Module):
    """Calls a model, and notes which module's methods run where."""

    model: nn.Module
    record: int

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    def __call__(self, note: Callable[..., Any], example: Example) -> Any:
        scope: Any = self.scope
        # What nn.jit has traced for another record would name the scopes of that.
        scope.flags = {**scope.flags, "jax_dora": self.record}
        with nn.intercept_methods(note), jax.named_scope("dora[0]"):
            if callable(example.method):
                return example.method(self.model, *example.args, **example.kwargs)
            return self.model(*example.args, **example.kwargs)


def linen_sites(model: nn.Module, example: Example) -> list[Site]:
    """Returns every parameter of two axes or more of a linen model, and every other module that
    holds parameters, in the order of their paths; those of layers that have a counterpart in
    `jax_dora.layers` are `is_layer`.

    Raises:
      Whatever the call raises.
    """
    arrays, together = example.apart()
    observed = _Observed(model, next(_RECORDS))
    classes: dict[str, type[Any]] = {"": type(model)}
    linear: dict[str, bool] = {}
    numbers: dict[str, int] = {"": 0}
    paths = [""]

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name == "setup" or isinstance(module, _Observed):
            return next_fun(*args, **kwargs)
        if path not in numbers:
            numbers[path] = len(paths)
            paths.append(path)
        counterpart = COUNTERPARTS.get(type(module))
        classes.setdefault(path, type(module))
        if counterpart is not None:
            classes[path] = type(module)  # rather than one that shares its scope
            linear[path] = DORA_CLASSES[counterpart[0]].is_linear(module)
        with jax.named_scope(f"dora[{numbers[path]}]"):
            return next_fun(*args, **kwargs)

    def made(arrays: Any) -> Any:
        rngs = {"params": jax.random.key(0)}
        return observed.init(rngs, note, together(arrays))

    variables = jax.eval_shape(made, arrays)
    flat = traverse_util.flatten_dict(variables.get("params", {}))
    weights = {path: leaf for path, leaf in flat.items() if nn.unbox(leaf).ndim > 1}
    reads: dict[Key, list[Read]] = {params_path(path): [] for path in weights}
    count = functools.partial(next, itertools.count())
    results: set[int] = set()

    def run(variables: Any, arrays: Any) -> None:
        params = traverse_util.flatten_dict(variables.get("params", {}))
        with weight_trace() as trace:
            for path in weights:
                raw = nn.unbox(params[path])
                recorder = Recorder(raw.shape, paths, reads[params_path(path)], count)
                weight = Weight(View.of(raw.shape), None, {"kernel": raw}, recorder)
                value = trace.lift(jax.typeof(raw), lambda weight=weight: weight)
                params[path] = nn.meta.replace_boxed(params[path], value)
            given = {**variables, "params": traverse_util.unflatten_dict(params)}
            result, _ = observed.apply(
                given,
                note,
                together(arrays),
                rngs={"params": jax.random.key(0)},
                mutable=nn.DenyList("params"),
            )
        for leaf in jax.tree.leaves(result):
            if getattr(leaf, "ndim", 0):
                results.add(leaf.shape[-1])

    jax.eval_shape(run, variables, arrays)
    # A stack's layers have adapters of their own, as experts have.
    once = {
        key: tuple(dataclasses.replace(one, axes=one.axes.replace("s", "b")) for one in found)
        for key, found in reads.items()
    }
    traced = Traced(once, frozenset(results))
    found = sites(_mirror(flat, classes), traced)
    for site in found:
        path = site.found.paths[0]
        known = COUNTERPARTS.get(classes.get(path, nn.Module))
        if known is None:
            continue
        if site.param != DORA_CLASSES[known[0]].kernel_name:
            site.is_matched = not site.refusal  # a stacked bias is none of the layer's weights
            continue
        of_site = traced.reads[path, site.param]
        if of_site and all(path in read.scopes for read in of_site):
            site.is_layer, site.refusal, site.how = True, "", f"linen.{classes[path].__name__}"
            site.is_linear = linear[path] and site.is_linear
    return found


def lora_a_path(site: Site) -> tuple[str, ...]:
    """Returns where in params an adapted weight's lora_a lies."""
    path = site.found.paths[0]
    is_plain = site.is_layer or site.param == "kernel"
    name = "lora_a" if is_plain else f"{site.param}_lora_a"
    return (*(path.split("/") if path else ()), name)


class _Params(nnx.Module):
    """Parameters of a linen module, and of those in it."""


def _mirror(flat: Mapping[tuple[str, ...], Any], classes: Mapping[str, type[Any]]) -> Any:
    """Returns an nnx module with the parameters of a linen model."""
    made: dict[tuple[str, ...], Any] = {}

    def module(path: tuple[str, ...]) -> Any:
        if path not in made:
            kind = classes.get("/".join(path), _Params)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            made[path] = type(kind.__name__, (_Params,), names)()
            if path:
                setattr(module(path[:-1]), path[-1], made[path])
        return made[path]

    root = module(())
    for path, leaf in flat.items():
        setattr(module(path[:-1]), path[-1], nnx.Param(nn.unbox(leaf)))
    return root
