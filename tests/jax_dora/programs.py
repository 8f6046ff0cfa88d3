"""What a program is made of, before XLA compiles it and after."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def aval(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns an array without numbers."""
    return jax.ShapeDtypeStruct(shape, dtype)


def for_cuda(function: Any, *arguments: Any, **options: Any) -> str:
    """Returns the program of `function` for a GPU that need not be there."""
    traced = jax.jit(functools.partial(function, **options)).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# "f32[64,8]{1,0}", and "f8e4m3fn[64,8]", whose elements may be codes.
_FLOATS = re.compile(r"\b(?:bf16|f16|f32|f64)\[([\d,]+)\]")


def largest_floats(text: str) -> int:
    """Returns the number of elements of the largest array of floats, of 16 bits or more, in the
    text of a compiled program."""
    return max(math.prod(map(int, sizes.split(","))) for sizes in _FLOATS.findall(text))


_FUNCTION = re.compile(r'func\.func \w+ @"?([\w.$-]+)"?\(')
_CALL = re.compile(r'\bcall @"?([\w.$-]+)"?\(')


def operations(text: str) -> int:
    """Returns the number of operations of a lowered program, those of a function as often as it is
    called."""
    own: dict[str, int] = {}
    calls: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := _FUNCTION.search(line):
            name = found[1]
            own[name], calls[name] = 0, []
        elif found := _CALL.search(line):
            calls[name].append(found[1])
        elif name:
            own[name] += "stablehlo." in line or "chlo." in line

    def count(name: str) -> int:
        return own[name] + sum(map(count, calls[name]))

    return count("main")


def equations(function: Any, *arguments: Any) -> Iterator[Any]:
    """Yields every equation of the program of `function`, those of loops and calls too."""
    yield from _of(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        parts = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda part: hasattr(part, "jaxpr") or hasattr(part, "eqns"),
        )
        for part in parts:
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from _of(part)


def gradient_of_logits(model: nnx.Module, tokens: Any) -> tuple[Callable[[Any], Any], Any]:
    """Returns a function of the adapters' parameters, the gradient of a mean over a decoder's
    logits, and the parameters."""
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def gradient(trained: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            logits = nnx.merge(graphdef, trained, frozen)(tokens)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        return jax.grad(loss)(trained)

    return gradient, trained
