"""Parameters of a linen model that products read, adapted wherever the model reads them.

While the model runs, each is followed from the model's variables through casts, transposes, scans
and the like to the products that read it, which become adapted ones; see `jax_dora.weights`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from flax import linen as nn
from flax import nnx, traverse_util

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.adapt.site import Site
from jax_dora.layers.rule import DoRARule
from jax_dora.linen.layer import boxed_like
from jax_dora.weights.trace import WeightTrace
from jax_dora.weights.weight_adapter import AdapterSpec, WeightAdapter

Params = dict[tuple[str, ...], Any]
"""The leaves of a collection, by their paths."""


@dataclasses.dataclass(frozen=True)
class LinenWeight:
    """Names an adapted parameter of a linen model, and says how it is adapted.

    Attributes:
      path: of the parameter, in the collection "params".
      names: the paths by which rules know it; the first is its own.
      is_linear: whether "all-linear" means it.
      spec: the parameter in its module, with the rule that adapts it; a stack's axes are "b" too.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    is_linear: bool
    spec: AdapterSpec

    @classmethod
    def of(cls, site: Site, rule: DoRARule) -> Self:
        path = site.found.paths[0]
        path = (*(path.split("/") if path else ()), site.param)
        return cls(path, site.names, site.is_linear, AdapterSpec(site.param, site.axes, "", rule))

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Returns the path of each parameter of the adapter."""
        attribute = self.spec.attribute
        return {name: (*self.path[:-1], attribute(name)) for name in ADAPTER_NAMES}

    def adapter(
        self, params: Mapping[tuple[str, ...], Any], rngs: nnx.Rngs | None = None
    ) -> WeightAdapter:
        """Returns the adapter, with its arrays in `params`; without dropout if `rngs` is None."""
        arrays = {name: nn.unbox(params[path]) for name, path in self.paths().items()}
        return self._adapter(params, rngs, arrays)

    def create_params(self, params: Mapping[tuple[str, ...], Any], key: jax.Array) -> Params:
        """Returns the parameters of a fresh adapter, boxed as the weight is."""
        made = boxed_like(params[self.path], self._adapter(params, nnx.Rngs(key)))
        return {path: made[name] for name, path in self.paths().items()}

    def _adapter(
        self, params: Mapping[tuple[str, ...], Any], rngs: nnx.Rngs | None, arrays: Any = None
    ) -> WeightAdapter:
        adapter = WeightAdapter(_Holder(), self.spec)
        setattr(adapter.module, self.path[-1], nnx.Param(nn.unbox(params[self.path])))
        adapter.create_arrays(self.spec.rule, rngs, arrays)
        return adapter


class _Holder(nnx.Module):
    """Holds a weight and its adapter for the time of a call."""


def weights_without_adapter(
    weights: Sequence[LinenWeight], params: Mapping[tuple[str, ...], Any]
) -> list[Any]:
    """Returns the weights without an adapter in `params`."""
    return [one for one in weights if not params.keys() >= {one.path, *one.paths().values()}]


def trace_adapted_params(
    weights: Sequence[LinenWeight],
    trace: WeightTrace,
    key: jax.Array | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns variables whose adapted weights `trace` follows, without their adapters.

    Args:
      key: of the masks of dropout; None turns it off.
    """
    params = traverse_util.flatten_dict(variables["params"])
    given = dict(params)
    for number, one in enumerate(weights):
        rngs = None
        if key is not None and one.spec.rule.dropout:
            rngs = nnx.Rngs(dropout=jax.random.fold_in(key, number))
        adapter = one.adapter(params, rngs)
        value = adapter.traced(trace, nn.unbox(params[one.path]))
        given[one.path] = nn.meta.replace_boxed(params[one.path], value)
        for path in one.paths().values():
            del given[path]
    return {**variables, "params": traverse_util.unflatten_dict(given)}
