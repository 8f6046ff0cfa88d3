"""Operations, and whole jaxprs, some of whose operands are weights.

The parameters of primitives that hold jaxprs (jit, checkpoint, scan, while, cond) are JAX's
internals: here, and in `jax_dora.weights.trace`, is all that touches them.
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

from jax_dora.weights.primitives import apply_reader, propagate
from jax_dora.weights.weight import Weight

# Names an array that is adapted where it is read, so that no trace around adapts it once more.
_ADAPTED = "dora_adapted"


def mark_adapted(kernel: jax.Array) -> jax.Array:
    """Returns `kernel`, which traces around do not follow any further."""
    return cast(jax.Array, checkpoint_name(kernel, _ADAPTED))


# The scopes around a function that is traced anew, where JAX begins without them.
_OUTER_SCOPES = contextvars.ContextVar("around", default="")


def current_scopes() -> str:
    """Returns the names that `jax.named_scope` has given where this is called."""
    return f"{_OUTER_SCOPES.get()}/{source_info_util.current_name_stack()}"


def _with_current_scopes[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which is inside of the scopes of this moment whenever it is called."""
    around = current_scopes()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _OUTER_SCOPES.set(around)
        try:
            return function(*args, **kwargs)
        finally:
            _OUTER_SCOPES.reset(token)

    return call


def evaluate_primitive(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Returns the results of one operation, some of whose operands are weights; some of the results
    may be weights too."""
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
    weights = [one for one in operands if isinstance(one, Weight)]
    if len(weights) == 1:
        given = primitive.name, weights[0], operands, params
        found = propagate(*given) or apply_reader(*given)
        if found is not None:
            return list(found)
    elif primitive.name == "dot_general":  # of two weights: the effective one by the other
        operands = [operands[0], as_array(operands[1], primitive.name)]
        return evaluate_primitive(primitive, operands, params)
    return _bind(primitive, operands, params)


def _bind(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    arrays = [as_array(one, primitive.name) for one in operands]
    results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def as_array(value: Any, name: str) -> Any:
    return value.reader.other(value, name) if isinstance(value, Weight) else value


def evaluate_jaxpr(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr, some of whose operands, and perhaps results, are weights."""
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
                if any(isinstance(one, Weight) for one in inputs):
                    results = evaluate_primitive(eqn.primitive, inputs, eqn.params)
                else:
                    results = _bind(eqn.primitive, inputs, eqn.params)
        env |= zip(eqn.outvars, results, strict=True)
    return [value(atom) for atom in jaxpr.outvars]


def _evaluate_to_arrays(
    jaxpr: Any, operands: Sequence[Any], forwarded: dict[int, int]
) -> list[Any]:
    """Returns the results of a jaxpr as arrays.

    Args:
      handed: is set to the indices of the results that are weights which the jaxpr hands on as it
        got them, and of the operands that they are. They stand in the results without adapters.
    """
    results = evaluate_jaxpr(jaxpr, operands)
    sources = {id(one): index for index, one in enumerate(operands) if isinstance(one, Weight)}
    forwarded.clear()
    forwarded |= {
        index: sources[id(one)] for index, one in enumerate(results) if id(one) in sources
    }
    return [
        one.base() if index in forwarded else as_array(one, "a result of a function")
        for index, one in enumerate(results)
    ]


def _restore_forwarded(
    operands: Sequence[Any], results: Sequence[Any], forwarded: dict[int, int]
) -> list[Any]:
    """Returns the results, with every weight that is handed on as it is in its place."""
    return [
        operands[forwarded[index]] if index in forwarded else one
        for index, one in enumerate(results)
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
    rows = [_ScannedOperand.of(one) for one in operands[n_consts + n_carry :]]

    @_with_current_scopes
    def step(moving: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [row.at(x) for row, x in zip(rows, xs, strict=True)]
        results = _evaluate_to_arrays(jaxpr, [*consts, *carry.join(moving), *inputs], forwarded)
        return carry.select_moving(results[:n_carry]), results[n_carry:]

    options = (params["length"], params["reverse"], params["unroll"])
    moving = carry.select_moving(carry.operands)
    moving, ys = lax.scan(step, moving, [row.xs for row in rows], *options)
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


@dataclasses.dataclass(frozen=True)
class _Carry:
    """The carry of a loop; what each step hands on as it is stays out of the arrays that move.

    Attributes:
      operands: the first step's; those that move are arrays.
      fixed: whether each stays as it is.
    """

    operands: list[Any]
    fixed: list[bool]

    @classmethod
    def of(cls, operands: list[Any], jaxpr: Any, n_consts: int, name: str) -> "_Carry":
        """
        Args:
          jaxpr: of a step; its inputs after `n_consts` others are the carry, its first results too.
          name: of the operation that reads weights which move.
        """
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        pairs = zip(jaxpr.invars[n_consts:], jaxpr.outvars, strict=False)
        fixed = [before is after for before, after in pairs][: len(operands)]
        of_each = zip(operands, fixed, strict=True)
        return cls([one if stays else as_array(one, name) for one, stays in of_each], fixed)

    def select_moving(self, values: list[Any]) -> list[Any]:
        """Returns the carry's values that move."""
        return [one for one, stays in zip(values, self.fixed, strict=True) if not stays]

    def join(self, moving: list[Any]) -> list[Any]:
        """Returns the carry's values from those that move."""
        moved = iter(moving)
        of_each = zip(self.operands, self.fixed, strict=True)
        return [one if stays else next(moved) for one, stays in of_each]


@dataclasses.dataclass(frozen=True)
class _ScannedOperand:
    """The parts that a scan takes an operand apart into, along its first axis."""

    operand: Any
    axes: dict[str, int] | None
    xs: Any

    @classmethod
    def of(cls, operand: Any) -> "_ScannedOperand":
        if isinstance(operand, Weight):
            part = operand.whole_part(0)
            axis = -1 if part is None else operand.origins[part]
            if part is not None and (operand.roles is None or operand.roles[axis] == "b"):
                own_axes = {name: operand.axis_in(name, axis) for name in operand.arrays}
                axes = {name: own for name, own in own_axes.items() if own is not None}
                xs = {
                    name: jnp.moveaxis(operand.arrays[name], own, 0) for name, own in axes.items()
                }
                return cls(operand, axes, xs)
            operand = as_array(operand, "scan")
        return cls(operand, None, operand)

    def at(self, x: Any) -> Any:
        if self.axes is None:
            return x
        one = {name: jnp.expand_dims(x[name], own) for name, own in self.axes.items()}
        weight, (part,) = self.operand, self.operand.view[0]
        stacked = weight.stacked | {weight.origins[part]}
        weight = weight.with_part_size(part, one, weight.view[1:])
        return dataclasses.replace(weight, stacked=stacked)
