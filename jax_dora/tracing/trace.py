"""The JAX trace that propagates weights through a program.

While it is the current trace, every operation without a weight among its operands runs as usual.
Operations on weights are handled one by one. For `jax.jit`, `jax.checkpoint`, `jax.lax.scan`,
`while_loop`, `cond` and the like, the trace evaluates their jaxprs.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax.extend import core

from jax_dora.tracing.jaxpr_interpreter import as_array, evaluate_primitive
from jax_dora.tracing.weight_view import Weight


class WeightTracer(jax.core.Tracer):
    """An array that is a weight, as the traced program holds it. `weight` returns the `Weight`,
    under the outer trace, when an operation first needs it."""

    def __init__(self, trace: "WeightTrace", aval: Any, weight: Callable[[], Weight]) -> None:
        super().__init__(trace, aval)
        self.weight = weight

    def full_lower(self) -> "WeightTracer":
        return self


class WeightTrace(jax.core.Trace):
    """Handles operations on weights, and leaves all other operations to the outer trace,
    `parent`."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = parent
        # Flax allows writes to a variable only at the trace level where it was created. This trace
        # writes values of the outer trace, so it pretends to be the same level.
        self._weakref = parent._weakref

    def lift(self, aval: Any, weight: Callable[[], Weight]) -> WeightTracer:
        return WeightTracer(self, aval, weight)

    def stage_value(self, val: Any) -> Any:
        return val if self._owns(val) else self.parent.stage_value(val)

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        if not any(map(self._owns, args)):
            return primitive.bind_with_trace(
                self.parent, args, [jax.typeof(arg) for arg in args], params
            )
        with core.set_current_trace(self.parent):
            results = evaluate_primitive(primitive, self._weights(args), params)
        results = [self._result(result) for result in results]
        return results if primitive.multiple_results else results[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, args: Any, /, **options):
        args = self._arrays(args)
        return self.parent.process_custom_jvp_call(primitive, fun, jvp, args, **options)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Any, /, **options
    ):
        args = self._arrays(args)
        return self.parent.process_custom_vjp_call(primitive, fun, fwd, bwd, args, **options)

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, /, **options):
        # The body may close over weights, which are not among `args`; jax.jit finds them.
        results: Any = None

        def run(*args: Any) -> list[Any]:
            nonlocal results
            results = primitive.bind(*args, subfuns=(fun,), **options)
            return list(results)

        with core.set_current_trace(self):
            arrays = jax.jit(run)(*args)
        return results.update(arrays)

    def array(self, value: Any) -> Any:
        """Returns a value for use in the outer trace: a weight becomes its effective array."""
        return self._arrays([value], "a result of the method")[0]

    def _owns(self, value: Any) -> bool:
        return isinstance(value, WeightTracer) and value._trace is self

    def _weights(self, args: Sequence[Any]) -> list[Any]:
        return [arg.weight() if self._owns(arg) else arg for arg in args]

    def _arrays(self, args: Sequence[Any], name: str = "a custom derivative") -> list[Any]:
        if not any(map(self._owns, args)):
            return list(args)
        with core.set_current_trace(self.parent):
            return [as_array(arg, name) for arg in self._weights(args)]

    def _result(self, value: Any) -> Any:
        if not isinstance(value, Weight):
            return value
        return self.lift(value.aval, lambda: value)


@contextlib.contextmanager
def weight_trace() -> Iterator[WeightTrace]:
    """Makes a new `WeightTrace` the current trace."""
    with core.take_current_trace() as parent:
        trace = WeightTrace(parent)
        try:
            with core.set_current_trace(trace):
                yield trace
        finally:
            trace.invalidate()


def is_weight_tracer(value: Any) -> bool:
    """Returns whether a value is a weight that a trace propagates."""
    return isinstance(value, WeightTracer)
