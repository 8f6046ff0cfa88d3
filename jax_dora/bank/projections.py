"""The projections of a model that a bank has room for."""

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
from jax_dora.adapt.find_sites import find_sites
from jax_dora.adapt.site import Site, assign_rules
from jax_dora.adapt.tree import find_dora_layers, named_in_errors
from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.base_layer import pad_axes
from jax_dora.layers.layout import Layout
from jax_dora.layers.linear import DoRALinear
from jax_dora.layers.projection import DoRAProjection
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import Stack
from jax_dora.ops.bank_slots import Slots

# How many groups of projections there are at most, and how many numbers the kernels of a group have
# at least. The norms of so many take about as long as the further launches for a group.
GROUPS = 4
LEAST_NUMBERS = 1 << 29


@dataclasses.dataclass(frozen=True, eq=False)
class BankProjection:
    """A projection that adapters are put on: `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum`.

    Attributes:
      paths: of its module; the first is its own.
      shape: the kernel's.
      sharding: the kernel's on a mesh, or None.
      stack: how layers are stacked in the kernel; in a bank they always lie along leading axes.
      kind: the class that adapts it.
      layer: a base layer without arrays, of one layer of the stack.
      dtype: of the projection's result, and of the adapters in the bank.
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
        """Returns the module's own path."""
        return self.paths[0]

    def layout(self, rank: int) -> Layout:
        """Returns how kernel and adapter are matrices, in one layer of a stack."""
        return self.kind.layout_of(self.layer, rank)

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """Returns (in, out) of the kernel as a matrix."""
        _, in_features, out = self.layout(1).kernel.matrices
        return in_features, out

    def shardings(self) -> Slots:
        """Returns the shardings of the projection's part of a bank, on the kernel's mesh and along
        its axes; None for each where the kernel has no mesh."""
        sharding = self.sharding
        if sharding is None:
            return Slots(None, None, None, None, None)
        spec = pad_axes(sharding.spec, self.stack.count + len(self.layout(1).kernel.stored))
        lead, names = self.stack.stack_part(spec), self.stack.layer_part(spec)
        kernel = self.layout(1).kernel
        # Of several axes that are one feature axis here, the outermost may be sharded.
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
    """Returns the projections of a plain model whose paths match, and their kernels."""
    check_plain([found.paths[0] for found in find_dora_layers(model)], "jax_dora")
    matched = [
        site
        for site, _ in assign_rules(
            find_sites(model, stack_axis=0), [DoRARule(path, rank=1, alpha=1)]
        )
    ]
    made = dict(_projection(site) for site in matched if why_not(site) is None)
    if not made:
        told = (f"{site.names[0]}: {why_not(site)}" for site in matched)
        raise ValueError(
            f"path {path!r} matches no projection that a bank holds adapters of:{listing(told)}"
        )
    return made


def groups(projections: Iterable[BankProjection]) -> list[list[str]]:
    """Returns the paths in groups of about as many numbers in their kernels, the largest kernels
    first: when the last group's matrices have come, only small norms are left to take."""
    sizes = {projection.path: math.prod(projection.shape) for projection in projections}
    total, before = sum(sizes.values()), 0
    found: list[list[str]] = [[] for _ in range(max(1, min(GROUPS, total // LEAST_NUMBERS)))]
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        found[before * len(found) // total].append(path)
        before += sizes[path]
    return [paths for paths in found if paths]


def why_not(site: Site) -> str | None:
    """Returns why a bank has no room for adapters of a weight, or None."""
    kind = dora_class_of(site.found.module)
    if not site.is_layer or site.refusal or kind is None:
        return site.refusal or "its module keeps its class, and multiplies by itself"
    if not issubclass(kind, DoRALinear | DoRAProjection):
        return f"an nnx.{kind.base_type.__name__} is no projection"
    if not kind.is_linear(site.found.module):
        return "its equation is no projection"
    if kind.layout_of(site.found.module, 1).kernel.matrices[0] > 1:
        return "it has batch axes, with an adapter for each"
    return None


def _projection(site: Site) -> tuple[BankProjection, nnx.Variable]:
    module: Any = site.found.module
    kind = dora_class_of(module)
    assert kind is not None
    # The class that adapts it knows the layout by the settings, and reads no array.
    graphdef, state = nnx.split(module)
    layer = nnx.merge(graphdef, jax.tree.map(lambda _: None, state))
    kernel = getattr(module, kind.kernel_name)
    dtype = getattr(module, "dtype", None) or kernel.dtype
    with named_in_errors(site.names[0], "given a place in a bank"):
        stack = site.stack
    value = jax.tree.leaves(kernel.get_value())[0]
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        sharding = None
    projection = BankProjection(site.found.paths, kernel.shape, sharding, stack, kind, layer, dtype)
    return projection, kernel
