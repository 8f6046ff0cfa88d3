"""Weights that their modules' own code reads, as PyTorch and PEFT have them: a Linear, or one
parameter with a matrix for each expert."""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

from dora_common.peft.layers import Layer
from jax_dora.adapt.adapter import AdaptedWeight, site_of
from jax_dora.adapt.sites import Site, sites
from jax_dora.adapt.tree import find_modules
from jax_dora.peft.names import Names


def layer_of(site: Site, names: Names, index: tuple[int, ...]) -> Layer:
    """Returns the layer that PyTorch would have in the place of one layer's part of a weight."""
    kernel = site.layout(1).kernel
    experts, features, width = kernel.matrices
    if not kernel.batch:
        return Layer(names.module(site.names[0], index), "linear", features, width)
    module = names.module(site.found.paths[0], index)
    param = names.parameter(site.param)
    return Layer(
        f"{module}.{param}".lstrip("."),
        "experts",
        features,
        width,
        experts=experts,
        is_in_order=param in names.experts,
    )


def torch_weights(model: nnx.Module, held: Iterable[AdaptedWeight] = ()) -> dict[str, Site]:
    """Returns the weights of a model that PEFT's format has a place for, by their paths: all that
    are registered or adapted, but embeddings.

    Args:
      held: further ones, which adapters stood beside.
    """
    found = {
        site.names[0]: site
        for site in sites(model)
        if site.param and not site.is_layer and site.axes and not site.refusal
    }
    by_path = {path: one for one in find_modules(model) for path in one.paths}
    for one in held:
        site = site_of(one.path, one, by_path)
        if site is not None:
            found[one.path] = site
    return {
        path: site
        for path, site in found.items()
        if not site.is_lookup and site.axes.count("b") <= 1
    }


def in_order(layers: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Returns layers by name, with packed experts as PyTorch registers them."""

    def place(name: str) -> int:
        param = name.rpartition(".")[2]
        is_one = layers[name].layer.kind == "experts" and param in names.experts
        return list(names.experts).index(param) if is_one else 0

    return {name: layers[name] for name in sorted(layers, key=place)}
