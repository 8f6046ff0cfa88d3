"""The adapter of one weight. Its arrays are attributes of the module that owns the weight."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.layers.adapter_arrays import make_adapter
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.magnitude import g_of_call
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.seeds import dropout_of_call
from jax_dora.layers.stack import (
    STACK_LETTERS,
    Stack,
    innermost,
    stack_axes_of,
    without_stack_axes,
)
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.tracing.adapted_products import AdaptedReader
from jax_dora.tracing.jaxpr_interpreter import mark_adapted
from jax_dora.tracing.trace import WeightTrace
from jax_dora.tracing.weight import Weight

ATTRIBUTES = (*ADAPTER_NAMES, "dropout", "given_norm", "given_g")


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """Describes an adapted weight and its adapter.

    Attributes:
      param: the name of the parameter in its module.
      axes: one letter for each axis, as in `jax_dora.register`.
      name: the weight's name in its path: `param`, or "" if the module has no other weight and the
        path is the module's.
      rule: the adapter's settings.
      is_lookup: whether the weight is an embedding.
    """

    param: str
    axes: str
    name: str
    rule: DoRARule
    is_lookup: bool = False

    def __post_init__(self) -> None:
        if self.rule.adapt_attend is not None:
            raise ValueError(
                f"adapt_attend is {self.rule.adapt_attend!r} for a weight that its module's own "
                "code reads; expected None, since this adapter applies wherever the weight is read"
            )

    def attribute(self, name: str) -> str:
        """Returns the attribute of the module that stores the adapter's `name`, such as
        "lora_a"."""
        return name if self.param == "kernel" else f"{self.param}_{name}"


class WeightAdapter:
    """An adapted weight with the interface of `jax_dora.DoRALayer`. All its state is in the module.

    Attributes:
      module: the module that owns the weight.
      spec: the weight and the adapter's settings.
      lora_a: [*stack, *b, *i, rank].
      lora_b: [*stack, *b, rank, *o].
      magnitude: [*stack, *b, *o].
      dropout, given_norm, given_g: see `DoRALayer`.
    """

    takes = frozenset({"keep_inner"})

    norm: Any = DoRALayer.norm

    def __init__(self, module: Any, spec: AdapterSpec) -> None:
        self.module = module
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the adapter, or else of the rule: rank, alpha, scale and so
        on."""
        if name in ATTRIBUTES:
            return getattr(self.module, self.spec.attribute(name))
        return getattr(self.spec.rule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ATTRIBUTES:
            setattr(self.module, self.spec.attribute(name), value)
        else:
            object.__setattr__(self, name, value)

    @property
    def kernel_name(self) -> str:
        return self.spec.param

    def path(self, module: str) -> str:
        """Returns the weight's path, given its module's path."""
        return "/".join(filter(None, (module, self.spec.name)))

    def module_path(self, path: str) -> str:
        """Returns the module's path, given the weight's path."""
        return path.removesuffix(self.spec.name).removesuffix("/")

    @property
    def kernel_param(self) -> nnx.Param:
        return getattr(self.module, self.spec.param)

    @property
    def result_dtype(self) -> Any:
        """The dtype of a product with an array of the weight's dtype."""
        return self.kernel_param.dtype

    def rule(self, path: str = "") -> DoRARule:
        return dataclasses.replace(self.spec.rule, path=path)

    @property
    def layout(self) -> Contraction:
        """How to view the arrays of a single layer as matrices."""
        return layout_of_weight(self.kernel_param.shape, self.spec.axes, self.rank)

    @property
    def stack(self) -> Stack:
        return stack_of_weight(self.kernel_param.shape, self.spec.axes)

    def eval(self) -> None:
        if self.dropout is not None:
            self.dropout.eval()

    def traced(self, trace: WeightTrace, kernel: jax.Array) -> Any:
        """Returns a tracer of `trace` for the weight. Nothing is computed until an operation reads
        it.

        Args:
          kernel: the parameter's current array: a whole stack's, or a single layer's inside a scan
            or `nnx.vmap`.
        """
        weight = functools.cache(functools.partial(self._make_weight, kernel))
        return trace.lift(jax.typeof(kernel), weight)

    def _make_weight(self, kernel: jax.Array) -> Weight:
        # The program may read the weight inside a region that leaves part of the mesh to XLA.
        with meshes.context_of(kernel):
            kernel = mark_adapted(kernel)
            # A scan removes the stack axis of the kernel; `nnx.vmap` may remove batch axes too.
            axes = self.spec.axes
            for role in (*STACK_LETTERS, "b"):
                axes = axes.replace(role, "", max(0, len(axes) - kernel.ndim))
            order = functools.partial(self._stack_to_batch, axes)
            axes = without_stack_axes(axes, "b")
            arrays = {"kernel": kernel}
            arrays |= {name: order(getattr(self, name)[...]) for name in ("lora_a", "lora_b")}
            layout = Contraction.of_weight(kernel.shape, axes, self.rank)
            arrays["g"] = g_of_call(self, self.result_dtype, [*arrays.values()], layout, order)
            reader = AdaptedReader(self.spec.rule, dropout_of_call(self, None, None))
            return Weight.of(axes, arrays, reader)

    def _stack_to_batch(self, axes: str, array: jax.Array) -> jax.Array:
        """Moves the stack axes of an adapter's array to their positions among the batch axes of a
        weight with these axes."""
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
        """Sets the adapter's attributes on the module: from these arrays, or fresh.

        Args:
          rngs: see `make_adapter`; with `arrays`, None omits dropout.

        Raises:
          ValueError: the module already has an attribute with one of these names.
        """
        taken = [n for n in map(self.spec.attribute, ATTRIBUTES) if hasattr(self.module, n)]
        if taken:
            raise ValueError(
                f"the module has an attribute {taken[0]!r}, a name that the adapter needs; "
                "expected another name: rename the attribute in the class"
            )
        self.given_norm, self.given_g = nnx.data(None), nnx.data(None)
        make_adapter(self, rule, rngs, DoRALayer.default_inits, arrays, by_layer=False)
        drops = rule.dropout and rngs is not None
        self.dropout = nnx.Dropout(rule.dropout, rngs=rngs) if drops else nnx.data(None)

    def delete_arrays(self) -> None:
        for name in ATTRIBUTES:
            delattr(self.module, self.spec.attribute(name))


def stack_of_weight(shape: tuple[int, ...], axes: str) -> Stack:
    """Returns how layers are stacked in a weight.

    `nnx.vmap` may have stacked whole models after they were adapted. Their axes come first.

    Args:
      shape: the weight's shape.
      axes: see `AdapterSpec.axes`.
    """
    count = len(shape) - len(without_stack_axes(axes))
    return Stack.of_kernel(
        shape, innermost(stack_axes_of(axes), count), sum(role in "bo" for role in axes)
    )


def layout_of_weight(shape: tuple[int, ...], axes: str, rank: int) -> Contraction:
    """Returns how to view a single layer of a weight, and an adapter of `rank`, as matrices."""
    return Contraction.of_weight(
        stack_of_weight(shape, axes).layer_part(shape), without_stack_axes(axes), rank
    )
