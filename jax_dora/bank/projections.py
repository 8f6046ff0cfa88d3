"""Finds the projections of a model for which a bank can hold adapters."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dora_common.rules import listing
from dora_common.slots import check_plain
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.tree import find_dora_layers, named_in_errors
from jax_dora.adapt.weight import AdaptableWeight, assign_rules, raise_for_no_parameters
from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.base_layer import pad_axes
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.einsum import DoRAProjection
from jax_dora.layers.linear import DoRALinear
from jax_dora.layers.quantised_kernel import check_kernel
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import Stack
from jax_dora.ops.bank_slots import Slots

# The maximum number of groups of projections, and the minimum number of kernel elements in a group.
# Computing the norms of so many elements takes about as long as launching the programs of a group.
MAX_GROUPS = 4
MIN_GROUP_SIZE = 1 << 29


@dataclasses.dataclass(frozen=True, eq=False)
class BankProjection:
    """An `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum` that a bank holds adapters for.

    Attributes:
      paths: the paths of the module; adapters in the bank are under the first.
      shape: the shape of the kernel.
      sharding: the kernel's sharding on a mesh, or None.
      stack: how layers are stacked in the kernel; in a bank they are stacked along leading axes.
      kind: the DoRA layer class for this projection.
      layer: one layer of the stack, as a base layer without arrays.
      dtype: the dtype of the projection's result, and of lora_a and lora_b in the bank.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding | None
    stack: Stack
    kind: type[DoRALayer]
    layer: Any
    dtype: Any

    @property
    def path(self) -> str:
        """The module's first path."""
        return self.paths[0]

    def layout(self, rank: int) -> Contraction:
        """Returns how one layer's kernel and adapter are viewed as matrices."""
        return self.kind.contraction_of(self.layer, rank)

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """The sizes (in, out) of the kernel as a matrix."""
        _, in_features, out = self.layout(1).kernel.matrices
        return in_features, out

    def shardings(self) -> Slots:
        """Returns the shardings of the bank's arrays, which follow the kernel's sharding.

        Each is None if the kernel has no mesh.
        """
        sharding = self.sharding
        if sharding is None:
            return Slots(None, None, None, None, None)
        spec = pad_axes(sharding.spec, self.stack.count + len(self.layout(1).kernel.stored))
        lead, names = self.stack.stack_part(spec), self.stack.layer_part(spec)
        kernel = self.layout(1).kernel
        # If several kernel axes form the feature axis, only the outermost of them may be sharded.
        rows, columns = names[kernel.rows[0]], names[kernel.columns[0]]

        def over(*axes: Any) -> NamedSharding:
            return NamedSharding(sharding.mesh, PartitionSpec(*lead, *axes))

        return Slots(
            lora_a=over(None, None, rows),
            lora_b=over(None, None, columns),
            g=over(None, columns),
            scale=over(None),
            rank=over(None),
        )


def projections(model: nnx.Module, path: str) -> dict[BankProjection, nnx.Variable]:
    """Returns the projections of a plain model with matching paths, and their kernels."""
    check_plain([path for path, *_ in find_dora_layers(model)], "jax_dora")
    matched = assign_rules(find_weights(model, is_leading=True), [DoRARule(path, rank=1, alpha=1)])
    raise_for_no_parameters(matched, "path matches layers that cannot be given a place in a bank")
    made = dict(_projection(weight) for weight in matched if rejection_reason(weight) is None)
    if not made:
        reasons = (f"{weight.path}: {rejection_reason(weight)}" for weight in matched)
        raise ValueError(
            f"path {path!r} matches no projection that a bank can hold adapters for:"
            f"{listing(reasons)}"
        )
    return made


def groups(projections: Iterable[BankProjection]) -> list[list[str]]:
    """Returns the paths in groups with about equal numbers of kernel elements.

    The largest kernels come first, so that only small norms remain to be computed when the last
    group's matrices have arrived on the device.
    """
    sizes = {projection.path: math.prod(projection.shape) for projection in projections}
    total, before = sum(sizes.values()), 0
    found: list[list[str]] = [[] for _ in range(max(1, min(MAX_GROUPS, total // MIN_GROUP_SIZE)))]
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        found[before * len(found) // total].append(path)
        before += sizes[path]
    return [paths for paths in found if paths]


def rejection_reason(weight: AdaptableWeight) -> str | None:
    """Returns why a bank cannot hold adapters for a weight, or None if it can."""
    kind = dora_class_of(weight.module)
    if not weight.is_layer or weight.refusal or kind is None:
        return weight.refusal or "its module keeps its class and computes the product itself"
    if not issubclass(kind, DoRALinear | DoRAProjection):
        return f"an nnx.{kind.base_type.__name__} is no projection"
    if not kind.is_linear(weight.module):
        return "its equation is no projection"
    if kind.contraction_of(weight.module).kernel.matrices[0] > 1:
        return "it has batch axes, with an adapter for each"
    return None


def _projection(weight: AdaptableWeight) -> tuple[BankProjection, nnx.Variable]:
    module: Any = weight.module
    kind = dora_class_of(module)
    assert kind is not None
    # The DoRA class derives the layout from the module's settings alone, so no arrays are needed.
    graphdef, state = nnx.split(module)
    layer = nnx.merge(graphdef, jax.tree.map(lambda _: None, state))
    kernel = getattr(module, kind.kernel_name)
    dtype = getattr(module, "dtype", None) or kernel.dtype
    with named_in_errors(weight.path, "given a place in a bank"):
        stack = weight.stack
        check_kernel(kernel.get_value(), kind.contraction_of(layer), stack)
    value = jax.tree.leaves(kernel.get_value())[0]
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        sharding = None
    projection = BankProjection(
        weight.module_paths, kernel.shape, sharding, stack, kind, layer, dtype
    )
    return projection, kernel
