"""Adapted parameters of a linen model outside layers with a DoRA class.

While the model runs, a JAX trace propagates each of them from the model's variables through casts,
transposes, scans and so on to the operations that read it; see `jax_dora.tracing`.
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
from jax_dora.tracing.trace import WeightTrace
from jax_dora.tracing.weight_adapter import AdapterSpec, WeightAdapter

Params = dict[tuple[str, ...], Any]
"""The leaves of a collection, by their paths."""


@dataclasses.dataclass(frozen=True)
class LinenWeight:
    """Describes an adapted parameter of a linen model and its adapter.

    Attributes:
      path: the parameter's path in the collection "params".
      names: the paths by which rules match it; the first is its own.
      is_linear: whether "all-linear" selects it.
      spec: the parameter and the adapter's settings. Stack axes are batch axes, "b".
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
        """Returns the path of each of the adapter's parameters."""
        attribute = self.spec.attribute
        return {name: (*self.path[:-1], attribute(name)) for name in ADAPTER_NAMES}

    def adapter(
        self, params: Mapping[tuple[str, ...], Any], rngs: nnx.Rngs | None = None
    ) -> WeightAdapter:
        """Returns the adapter with its arrays in `params`; without dropout if `rngs` is None."""
        arrays = {name: nn.unbox(params[path]) for name, path in self.paths().items()}
        return self._adapter(params, rngs, arrays)

    def create_params(self, params: Mapping[tuple[str, ...], Any], key: jax.Array) -> Params:
        """Returns the parameters of a fresh adapter, in the same kind of boxes as the weight; only
        its magnitude if `params` has the others."""
        arrays = {n: nn.unbox(params[path]) for n, path in self.paths().items() if path in params}
        has_others = arrays.keys() == {"lora_a", "lora_b"}
        adapter = self._adapter(params, nnx.Rngs(key), arrays if has_others else None)
        boxed = boxed_like(params[self.path], adapter)
        names = ["magnitude"] if has_others else ADAPTER_NAMES
        return {self.paths()[name]: boxed[name] for name in names}

    def _adapter(
        self, params: Mapping[tuple[str, ...], Any], rngs: nnx.Rngs | None, arrays: Any = None
    ) -> WeightAdapter:
        adapter = WeightAdapter(_Holder(), self.spec)
        setattr(adapter.module, self.path[-1], nnx.Param(nn.unbox(params[self.path])))
        adapter.create_arrays(self.spec.rule, rngs, arrays)
        return adapter


class _Holder(nnx.Module):
    """Holds a weight and its adapter during a call."""


def weights_without_adapter(
    weights: Sequence[LinenWeight], params: Mapping[tuple[str, ...], Any]
) -> list[Any]:
    """Returns the weights whose adapter is missing in `params`."""
    return [w for w in weights if not params.keys() >= {w.path, *w.paths().values()}]


def trace_adapted_params(
    weights: Sequence[LinenWeight],
    trace: WeightTrace,
    key: jax.Array | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the variables without adapters, with a tracer of `trace` in place of each adapted
    weight.

    Args:
      key: the key for the dropout masks; None turns dropout off.
    """
    params = traverse_util.flatten_dict(variables["params"])
    traced = dict(params)
    for number, weight in enumerate(weights):
        rngs = None
        if key is not None and weight.spec.rule.dropout:
            rngs = nnx.Rngs(dropout=jax.random.fold_in(key, number))
        adapter = weight.adapter(params, rngs)
        value = adapter.traced(trace, nn.unbox(params[weight.path]))
        traced[weight.path] = nn.meta.replace_boxed(params[weight.path], value)
        for path in weight.paths().values():
            del traced[path]
    return {**variables, "params": traverse_util.unflatten_dict(traced)}
