"""Evaluates operations and whole jaxprs that have weights among their operands.

The parameters of primitives that contain jaxprs (jit, checkpoint, scan, while, cond) are JAX
internals. Only this module and `jax_dora.tracing.trace` use them.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util

from jax_dora.tracing.primitives import apply_reader, propagate
from jax_dora.tracing.weight_view import Weight

# The `checkpoint_name` of an array that an inner trace adapts already, so that an outer trace does
# not adapt it a second time.
_ADAPTED = "dora_adapted"


def mark_adapted(kernel: jax.Array) -> jax.Array:
    """Returns `kernel` with a mark that stops outer traces from adapting it a second time."""
    return cast(jax.Array, checkpoint_name(kernel, _ADAPTED))


# The scopes outside a function that JAX traces again: it starts such a trace without them.
_OUTER_SCOPES = contextvars.ContextVar("outer_scopes", default="")


def current_scopes() -> str:
    """Returns the names of all `jax.named_scope`s around the caller."""
    return f"{_OUTER_SCOPES.get()}/{source_info_util.current_name_stack()}"


def _with_current_scopes[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls `function` inside the scopes that are current now."""
    outer = current_scopes()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _OUTER_SCOPES.set(outer)
        try:
            return function(*args, **kwargs)
        finally:
            _OUTER_SCOPES.reset(token)

    return call


def evaluate_primitive(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Returns the results of one operation with weights among its operands; results may be weights
    too."""
    match primitive.name:
        case "jit":
            return evaluate_jaxpr(params["jaxpr"], operands)
        case "remat2" | "checkpoint":
            return _checkpoint(operands, params)
        case "scan":
            return _scan(operands, params)
        case "while":
            return _while(operands, params)
        case "cond":
            return _cond(operands, params)
        case "optimization_barrier":
            return operands
        case "name" if params["name"] == _ADAPTED:
            return [operands[0].base()]
    weights = [operand for operand in operands if isinstance(operand, Weight)]
    if len(weights) == 1:
        arguments = primitive.name, weights[0], operands, params
        results = propagate(*arguments) or apply_reader(*arguments)
        if results is not None:
            return list(results)
    elif primitive.name == "dot_general":
        # A product of two weights: the first one's adapted product with the second one's W'.
        operands = [operands[0], as_array(operands[1], primitive.name)]
        return evaluate_primitive(primitive, operands, params)
    return _bind(primitive, operands, params)


def _bind(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    arrays = [as_array(operand, primitive.name) for operand in operands]
    results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def as_array(value: Any, name: str) -> Any:
    """Returns the effective array of a weight, which the operation `name` reads; returns any other
    value unchanged."""
    return value.reader.other(value, name) if isinstance(value, Weight) else value


def evaluate_jaxpr(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr with weights among its operands; results may be weights
    too."""
    consts = jaxpr.consts
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, operands, strict=True)

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [value(atom) for atom in eqn.invars]
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=names):
            with eqn.ctx.manager:
                if any(isinstance(operand, Weight) for operand in inputs):
                    results = evaluate_primitive(eqn.primitive, inputs, eqn.params)
                else:
                    results = _bind(eqn.primitive, inputs, eqn.params)
        env |= zip(eqn.outvars, results, strict=True)
    return [value(atom) for atom in jaxpr.outvars]


def _evaluate_to_arrays(
    jaxpr: Any, operands: Sequence[Any], forwarded: dict[int, int]
) -> list[Any]:
    """Returns the results of a jaxpr as arrays. `forwarded` is filled with result index → operand
    index for each weight that is returned unchanged; the list has its array without the adapter."""
    results = evaluate_jaxpr(jaxpr, operands)
    sources = {
        id(operand): index for index, operand in enumerate(operands) if isinstance(operand, Weight)
    }
    forwarded.clear()
    forwarded |= {
        index: sources[id(result)] for index, result in enumerate(results) if id(result) in sources
    }
    return [
        result.base() if index in forwarded else as_array(result, "a result of a function")
        for index, result in enumerate(results)
    ]


def _restore_forwarded(
    operands: Sequence[Any], results: Sequence[Any], forwarded: dict[int, int]
) -> list[Any]:
    """Returns the results, with each forwarded weight in place of its array."""
    return [
        operands[forwarded[index]] if index in forwarded else result
        for index, result in enumerate(results)
    ]


def _checkpoint(operands: list[Any], params: dict[str, Any]) -> list[Any]:
    forwarded: dict[int, int] = {}

    @_with_current_scopes
    def run(operands: list[Any]) -> list[Any]:
        return _evaluate_to_arrays(params["jaxpr"], operands, forwarded)

    options = {name: params[name] for name in ("policy", "prevent_cse")}
    return _restore_forwarded(operands, jax.checkpoint(run, **options)(operands), forwarded)


def _cond(operands: list[Any], params: dict[str, Any]) -> list[Any]:
    index, *operands = operands

    def branch(jaxpr: Any) -> Callable[[list[Any]], list[Any]]:
        return _with_current_scopes(lambda operands: _evaluate_to_arrays(jaxpr, operands, {}))

    return list(lax.switch(index, [branch(jaxpr) for jaxpr in params["branches"]], operands))


def _scan(operands: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr = params["jaxpr"]
    n_consts, n_carry, _ = (len(part) for part in params["ft_in"].unpack())
    forwarded: dict[int, int] = {}
    consts, start = operands[:n_consts], operands[n_consts : n_consts + n_carry]
    carry = _Carry.of(start, jaxpr, n_consts, "scan's carry")
    scanned = [_ScannedOperand.of(operand) for operand in operands[n_consts + n_carry :]]

    @_with_current_scopes
    def step(moving: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [operand.at(x) for operand, x in zip(scanned, xs, strict=True)]
        results = _evaluate_to_arrays(jaxpr, [*consts, *carry.join(moving), *inputs], forwarded)
        return carry.select_moving(results[:n_carry]), results[n_carry:]

    options = (params["length"], params["reverse"], params["unroll"])
    moving = carry.select_moving(carry.operands)
    moving, ys = lax.scan(step, moving, [operand.xs for operand in scanned], *options)
    results = carry.join(moving) + ys
    stacked = {
        index: source
        for index, source in forwarded.items()
        if index >= n_carry and source >= n_consts + n_carry
    }
    return _restore_forwarded(operands, results, stacked)


def _while(operands: list[Any], params: dict[str, Any]) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    carry = _Carry.of(operands[n_cond + n_body :], params["body_jaxpr"], n_body, "while's carry")

    @_with_current_scopes
    def condition(moving: list[Any]) -> Any:
        [result] = _evaluate_to_arrays(
            params["cond_jaxpr"], [*cond_consts, *carry.join(moving)], {}
        )
        return result

    @_with_current_scopes
    def step(moving: list[Any]) -> list[Any]:
        results = _evaluate_to_arrays(params["body_jaxpr"], [*body_consts, *carry.join(moving)], {})
        return carry.select_moving(results)

    return carry.join(lax.while_loop(condition, step, carry.select_moving(carry.operands)))


def _sources(jaxpr: Any) -> list[int | None]:
    """Returns, for each result of a jaxpr, the index of the argument that it is; else None."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    same: dict[Any, Any] = {variable: index for index, variable in enumerate(jaxpr.invars)}

    def source(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else same.get(atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "remat2", "checkpoint"):
            arguments = [source(atom) for atom in eqn.invars]
            inner = _sources(eqn.params["jaxpr"])
            same |= {
                variable: arguments[index]
                for variable, index in zip(eqn.outvars, inner, strict=True)
                if index is not None
            }
    return [source(atom) for atom in jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class _Carry:
    """The carry of a loop: its initial values, and whether each stays unchanged in every step.
    Those that do are kept out of the loop's arrays."""

    operands: list[Any]
    fixed: list[bool]

    @classmethod
    def of(cls, operands: list[Any], jaxpr: Any, n_consts: int, name: str) -> "_Carry":
        """Returns the carry of these initial values. It is the inputs of a step's jaxpr after the
        first `n_consts`, and its first results. `name` is the operation that reads a weight whose
        value changes."""
        sources = _sources(jaxpr)[: len(operands)]
        fixed = [source == n_consts + number for number, source in enumerate(sources)]
        pairs = zip(operands, fixed, strict=True)
        values = [value if is_fixed else as_array(value, name) for value, is_fixed in pairs]
        return cls(values, fixed)

    def select_moving(self, values: list[Any]) -> list[Any]:
        """Returns the values of the carry that change."""
        pairs = zip(values, self.fixed, strict=True)
        return [value for value, is_fixed in pairs if not is_fixed]

    def join(self, moving: list[Any]) -> list[Any]:
        """Returns all values of the carry, given the values that change."""
        remaining = iter(moving)
        pairs = zip(self.operands, self.fixed, strict=True)
        return [value if is_fixed else next(remaining) for value, is_fixed in pairs]


@dataclasses.dataclass(frozen=True)
class _ScannedOperand:
    """An operand that a scan slices along its first axis: the arrays that it slices, `xs`, and for
    a weight the scanned axis of each of its arrays that has it (none if the program inserted the
    axis)."""

    operand: Any
    axes: dict[str, int] | None
    xs: Any

    @classmethod
    def of(cls, operand: Any) -> "_ScannedOperand":
        if isinstance(operand, Weight):
            part = operand.whole_part(0)
            axis = -1 if part is None else operand.origins[part]
            if part is not None and (operand.roles is None or operand.roles[axis] == "b"):
                array_axes = {name: operand.axis_in(name, axis) for name in operand.arrays}
                axes = {name: index for name, index in array_axes.items() if index is not None}
                xs = {
                    name: jnp.moveaxis(operand.arrays[name], index, 0)
                    for name, index in axes.items()
                }
                return cls(operand, axes, xs)
            if not operand.view[0]:
                return cls(operand, {}, {})
            operand = as_array(operand, "scan")
        return cls(operand, None, operand)

    def at(self, x: Any) -> Any:
        """Returns the operand of one step, given that step's slice of `xs`."""
        if self.axes is None:
            return x
        if not self.axes:
            return dataclasses.replace(self.operand, view=self.operand.view[1:])
        arrays = {name: jnp.expand_dims(x[name], index) for name, index in self.axes.items()}
        weight, (part,) = self.operand, self.operand.view[0]
        stacked = (*weight.stacked, weight.origins[part])
        weight = weight.with_part_size(part, arrays, weight.view[1:])
        return dataclasses.replace(weight, stacked=stacked)
