"""The adapter of one weight. Its arrays are attributes of the module that owns the weight."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.adapt.weight import AdaptableWeight, contraction_of_weight, stack_of_weight
from jax_dora.layers.adapter_arrays import make_adapter
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.magnitude import g_of_call
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.seeds import dropout_of_call
from jax_dora.layers.stack import STACK_LETTERS, Stack, without_stack_axes
from jax_dora.ops import quantised
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.tracing.adapted_products import AdaptedReader
from jax_dora.tracing.jaxpr_interpreter import mark_adapted
from jax_dora.tracing.trace import WeightTrace
from jax_dora.tracing.weight_view import Weight

# The attributes of an adapter in the module that owns the weight.
ATTRIBUTES = (*ADAPTER_NAMES, "dropout", "given_norm", "given_g")


def _in_module(name: str) -> Any:
    """Returns a property that is the attribute of the adapter in the weight's module."""
    return property(
        lambda self: getattr(self.module, self.weight.attribute(name)),
        lambda self, value: setattr(self.module, self.weight.attribute(name), value),
    )


def _of_rule(name: str) -> Any:
    return property(lambda self: getattr(self._rule, name))


class WeightAdapter:
    """An adapted weight with the interface of `jax_dora.DoRALayer`, whose state is in the module
    that owns it: lora_a [*stack, *b, *i, rank], lora_b [*stack, *b, rank, *o], magnitude [*stack,
    *b, *o], and the rest. `weight` has paths from the module, and the rule."""

    takes = frozenset({"keep_inner"})

    norm: Any = DoRALayer.norm
    lora_a, lora_b, magnitude, dropout, given_norm, given_g = map(_in_module, ATTRIBUTES)
    rank, alpha, scale = map(_of_rule, ("rank", "alpha", "scale"))
    use_rslora, dropout_mode = map(_of_rule, ("use_rslora", "dropout_mode"))
    implementation = _of_rule("implementation")

    def __init__(self, module: Any, weight: AdaptableWeight) -> None:
        self.module = module
        self.weight = weight

    @property
    def _rule(self) -> DoRARule:
        assert self.weight.rule is not None
        return self.weight.rule

    @property
    def kernel_name(self) -> str:
        return self.weight.param

    def path(self, module: str) -> str:
        """Returns the weight's path, given its module's path."""
        return "/".join(filter(None, (module, self.weight.path)))

    def module_path(self, path: str) -> str:
        """Returns the module's path, given the weight's path."""
        return path.removesuffix(self.weight.path).removesuffix("/")

    @property
    def kernel_param(self) -> nnx.Param:
        return getattr(self.module, self.weight.param)

    @property
    def result_dtype(self) -> Any:
        """The dtype of a product with an array of the weight's dtype."""
        return self.kernel_param.dtype

    def rule(self, path: str = "") -> DoRARule:
        return dataclasses.replace(self._rule, path=path)

    @property
    def contraction(self) -> Contraction:
        """How to view the arrays of a single layer as matrices."""
        return contraction_of_weight(self.kernel_param.shape, self.weight.axes, self.rank)

    @property
    def stack(self) -> Stack:
        return stack_of_weight(self.kernel_param.shape, self.weight.axes)

    def eval(self) -> None:
        if self.dropout is not None:
            self.dropout.eval()

    def traced(self, trace: WeightTrace, kernel: jax.Array) -> Any:
        """Returns a tracer of `trace` for the weight: nothing is computed until an operation reads
        it. `kernel` is the parameter's current array, of one layer inside a scan or `nnx.vmap`; a
        quantised one is dequantised where it is read."""
        weight = functools.cache(functools.partial(self._make_weight, kernel))
        aval = jax.typeof(quantised.stored(kernel))
        if quantised.is_quantised(kernel):
            aval = aval.update(dtype=jnp.dtype(self.result_dtype), weak_type=False)
        return trace.lift(aval, weight)

    def _make_weight(self, parameter: Any) -> Weight:
        # The program may read the weight inside a region that leaves part of the mesh to XLA.
        with meshes.context_of(quantised.stored(parameter)):
            kernel = mark_adapted(quantised.dense(parameter, self.result_dtype))
            # A scan removes the stack axis of the kernel; `nnx.vmap` may remove batch axes too.
            axes = self.weight.axes
            for role in (*STACK_LETTERS, "b"):
                axes = axes.replace(role, "", max(0, len(axes) - kernel.ndim))
            order = functools.partial(self._stack_to_batch, axes)
            axes = without_stack_axes(axes, "b")
            arrays = {"kernel": kernel}
            arrays |= {name: order(getattr(self, name)[...]) for name in ("lora_a", "lora_b")}
            contraction = Contraction.of_weight(kernel.shape, axes, self.rank)
            # The norm of a quantised kernel is that of its exact values.
            of_norm = [
                parameter if quantised.is_quantised(parameter) else kernel,
                *(arrays[name] for name in ("lora_a", "lora_b")),
            ]
            arrays["g"] = g_of_call(self, self.result_dtype, of_norm, contraction, order)
            reader = AdaptedReader(self._rule, dropout_of_call(self, None, None))
            return Weight.of(axes, arrays, reader)

    def _stack_to_batch(self, axes: str, array: jax.Array) -> jax.Array:
        """Moves the stack axes of an adapter's array among the batch axes of a weight."""
        letters = [one for one in axes if one in STACK_LETTERS or one == "b"]
        stacked = sorted({*letters} - {"b"})
        batch = iter(range(len(stacked), len(letters)))
        order = [next(batch) if one == "b" else stacked.index(one) for one in letters]
        array = self.stack.move_to_front(array)
        return array.transpose((*order, *range(len(order), array.ndim)))

    def create_arrays(
        self,
        rule: DoRARule,
        rngs: nnx.Rngs | None,
        arrays: Mapping[str, jax.Array] | None = None,
    ) -> None:
        """Sets the adapter's attributes on the module: from these arrays, or fresh. `rngs` is as
        for `make_adapter`; with `arrays`, None omits dropout. Raises ValueError if an attribute
        exists already."""
        taken = [n for n in map(self.weight.attribute, ATTRIBUTES) if hasattr(self.module, n)]
        if taken:
            raise ValueError(
                f"the module has an attribute {taken[0]!r}, a name that the adapter needs; "
                "expected another name: rename the attribute in the class"
            )
        self.given_norm, self.given_g = nnx.data(None), nnx.data(None)
        dropouts = make_adapter(self, rule, rngs, DoRALayer.default_inits, arrays)
        self.dropout = dropouts[0] if dropouts and rngs is not None else nnx.data(None)

    def delete_arrays(self) -> None:
        for name in ATTRIBUTES:
            delattr(self.module, self.weight.attribute(name))
