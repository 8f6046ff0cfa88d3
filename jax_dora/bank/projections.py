"""Finds the projections of a model for which a bank can hold adapters."""

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
from jax_dora.layers import dora_class_of
from jax_dora.layers.base_layer import pad_axes
from jax_dora.layers.dora_linear import DoRALinear
from jax_dora.layers.einsum import DoRAContraction
from jax_dora.layers.quantised_kernel import check_kernel
from jax_dora.layers.rule import DoRARule
from jax_dora.ops.bank_slots import Slots

# The maximum number of groups of projections, and the minimum number of kernel elements in a group.
# Computing the norms of so many elements takes about as long as launching the programs of a group.
MAX_GROUPS = 4
MIN_GROUP_SIZE = 1 << 29


def projections(model: nnx.Module, path: str) -> dict[AdaptableWeight, nnx.Variable]:
    """Returns the projections of a plain model with matching paths, without their arrays, and their
    kernels."""
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


def groups(projections: Iterable[AdaptableWeight]) -> list[list[str]]:
    """Returns the paths in groups with about equal numbers of kernel elements. The largest come
    first, so that only small norms remain when the last group's matrices have arrived."""
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
    if not issubclass(kind, DoRALinear | DoRAContraction):
        return f"an nnx.{kind.base_type.__name__} is no projection"
    if not kind.is_linear(weight.module):
        return "its equation is no projection"
    if kind.contraction_of(weight.module).kernel.matrices[0] > 1:
        return "it has batch axes, with an adapter for each"
    return None


def shardings_of(projection: AdaptableWeight) -> Slots:
    """Returns the shardings of the bank's arrays, which follow the kernel's, or None each."""
    sharding = jax.tree.leaves(projection.parameter.get_value())[0].sharding
    if not isinstance(sharding, NamedSharding):
        return Slots(None, None, None, None, None)
    kernel, stack = projection.contraction(1).kernel, projection.stack
    spec = pad_axes(sharding.spec, len(projection.shape))
    lead, names = stack.stack_part(spec), stack.layer_part(spec)
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


def _projection(weight: AdaptableWeight) -> tuple[AdaptableWeight, nnx.Variable]:
    kernel = weight.parameter
    with named_in_errors(weight.path, "given a place in a bank"):
        abstract = weight.abstract()
        check_kernel(kernel.get_value(), weight.contraction(1), weight.stack)
    return abstract, kernel
