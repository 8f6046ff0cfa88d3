"""Finds which values of a program depend on its integer inputs.

The parameters of primitives that contain jaxprs are JAX internals, as in `jaxpr_interpreter`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core


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
