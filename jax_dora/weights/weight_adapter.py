"""One adapted weight of a module: its arrays lie beside it, as attributes of the module."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.layers.adapter_arrays import make_adapter
from jax_dora.layers.base import DoRALayer
from jax_dora.layers.call import dropout_of_call, g_of_call
from jax_dora.layers.layout import Layout, projection_layout
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import Stack
from jax_dora.ops import mesh as meshes
from jax_dora.weights.jaxpr_interpreter import mark_adapted
from jax_dora.weights.products import AdaptedReader
from jax_dora.weights.trace import WeightTrace
from jax_dora.weights.weight import Weight

ATTRIBUTES = (*ADAPTER_NAMES, "dropout", "given_norm", "given_g")


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """Names an adapted weight of a module, and says how it is adapted.

    Attributes:
      param: the name of the parameter in its module.
      axes: a letter for each of its axes, as `jax_dora.register`'s.
      name: what its path has behind its module's: `param`, or "" where the module has no other
        weight.
      rule: the adapter's settings.
      is_lookup: whether it is an embedding.
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
                "code reads, which is adapted wherever it is read; expected None"
            )

    def attribute(self, name: str) -> str:
        """Returns by which name the module has the adapter's `name`."""
        return name if self.param == "kernel" else f"{self.param}_{name}"


class WeightAdapter:
    """An adapted weight, seen as `jax_dora.DoRALayer` is; the module holds all that it has.

    Attributes:
      module: that owns the weight.
      spec: which weight it is, and its settings.
      lora_a: [*stack, *b, *i, rank].
      lora_b: [*stack, *b, rank, *o].
      magnitude: [*stack, *b, *o].
      dropout, given_norm, given_g: as `DoRALayer`'s.
    """

    takes = frozenset({"keep_inner"})

    norm: Any = DoRALayer.norm

    def __init__(self, module: Any, spec: AdapterSpec) -> None:
        self.module = module
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the adapter, else rank, alpha, scale and the rule's other
        attributes."""
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
        """Returns the weight's path, given its module's."""
        return "/".join(filter(None, (module, self.spec.name)))

    def module_path(self, path: str) -> str:
        """Returns the module's path, given the weight's."""
        return path.removesuffix(self.spec.name).removesuffix("/")

    @property
    def kernel_param(self) -> nnx.Param:
        return getattr(self.module, self.spec.param)

    @property
    def result_dtype(self) -> Any:
        """Returns the dtype of a product with an array of the weight's dtype."""
        return self.kernel_param.dtype

    def rule(self, path: str = "") -> DoRARule:
        return dataclasses.replace(self.spec.rule, path=path)

    @property
    def layout(self) -> Layout:
        """Returns how the arrays are matrices, of one layer of a stack."""
        return layout_of_weight(self.kernel_param.shape, self.spec.axes, self.rank)

    @property
    def stack(self) -> Stack:
        return stack_of_weight(self.kernel_param.shape, self.spec.axes)

    def eval(self) -> None:
        if self.dropout is not None:
            self.dropout.eval()

    def traced(self, trace: WeightTrace, kernel: jax.Array) -> Any:
        """Returns the weight's array as `trace` follows it; nothing is computed unless it is read.

        Args:
          kernel: the parameter's array as the module holds it now: a whole stack's, or one layer's
            inside of a scan or `nnx.vmap`.
        """
        weight = functools.cache(functools.partial(self._weight, kernel))
        return trace.lift(jax.typeof(kernel), weight)

    def _weight(self, kernel: jax.Array) -> Weight:
        # A program may read it where a part of the mesh is left to XLA.
        with meshes.context_of(kernel):
            kernel = mark_adapted(kernel)
            # One layer of a scan's, then one matrix of those that `nnx.vmap` has taken apart.
            axes = self.spec.axes
            for role in "sb":
                axes = axes.replace(role, "", max(0, len(axes) - kernel.ndim))
            order = self._stack_to_batch if "s" in axes else lambda array: array
            axes = axes.replace("s", "b")
            arrays = {"kernel": kernel}
            arrays |= {name: order(getattr(self, name)[...]) for name in ("lora_a", "lora_b")}
            layout = projection_layout(kernel.shape, axes, self.rank)
            arrays["g"] = g_of_call(self, self.result_dtype, [*arrays.values()], layout, order)
            reader = AdaptedReader(self.spec.rule, dropout_of_call(self, None, None))
            return Weight.of(axes, arrays, reader)

    def _stack_to_batch(self, array: jax.Array) -> jax.Array:
        """Returns an adapter's array of a whole stack whose axis stands among the batch axes."""
        stack = self.stack
        before = sum(role == "b" for role in self.spec.axes[: self.spec.axes.index("s")])
        return jnp.moveaxis(array, stack.axis, before) if stack.axis else array

    def create_arrays(
        self,
        rule: DoRARule,
        rngs: nnx.Rngs | None,
        arrays: Mapping[str, jax.Array] | None = None,
    ) -> None:
        """Puts these arrays, or a fresh adapter, beside the weight.

        Args:
          rngs: as `make_adapter`'s; None, where there are arrays, leaves dropout out.
        """
        taken = [n for n in map(self.spec.attribute, ATTRIBUTES) if hasattr(self.module, n)]
        if taken:
            raise ValueError(
                f"the module has an attribute {taken[0]!r}, which is a name of the adapter's; "
                "expected another name: rename it in the class"
            )
        self.given_norm, self.given_g = nnx.data(None), nnx.data(None)
        make_adapter(self, rule, rngs, DoRALayer.default_inits, arrays, by_layer=False)
        drops = rule.dropout and rngs is not None
        self.dropout = nnx.Dropout(rule.dropout, rngs=rngs) if drops else nnx.data(None)

    def delete_arrays(self) -> None:
        for name in ATTRIBUTES:
            delattr(self.module, self.spec.attribute(name))


def stack_of_weight(shape: tuple[int, ...], axes: str) -> Stack:
    """Returns how layers are stacked in a weight of these axes (as `AdapterSpec.axes`), perhaps
    behind those of models that `nnx.vmap` has stacked after they were adapted."""
    count, axis = len(shape) - len(axes.replace("s", "")), axes.find("s")
    if axis <= 0:
        return Stack(shape[:count])
    least = sum(role in "bo" for role in axes)
    return Stack.of_kernel(shape[axis], axis, len(axes), least)


def layout_of_weight(shape: tuple[int, ...], axes: str, rank: int) -> Layout:
    """Returns how one layer of a weight of these axes and an adapter of `rank` are matrices."""
    return projection_layout(
        stack_of_weight(shape, axes).layer_part(shape), axes.replace("s", ""), rank
    )
