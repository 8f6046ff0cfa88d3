"""Adapters out of a model."""

import inspect
from collections.abc import Callable
from typing import Any, cast

from flax import nnx

from jax_dora.adapt.kinds import Kind, kind_of_adapted
from jax_dora.adapt.tree import Found, find_modules, replace_modules
from jax_dora.model import check_model


def remove_dora[Model: nnx.Module](model: Model) -> Model:
    """`model` without its adapters: the base model exactly, on its own arrays.

    The result is a model of its own, as `apply_dora`'s; one without adapters is copied as it is.

    Raises:
      TypeError: `model` is no nnx module.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    copy = nnx.clone(model)
    return replace_modules(
        copy, {id(found.module): plain_layer(found.module, kind) for found, kind in adapted(copy)}
    )


def adapted(model: nnx.Module) -> list[tuple[Found, Kind]]:
    """The DoRA layers of a model."""
    kinds = ((found, kind_of_adapted(found.module)) for found in find_modules(model))
    return [(found, kind) for found, kind in kinds if kind is not None]


def plain_layer(layer: Any, kind: Kind) -> Any:
    """The Flax layer that the DoRA layer `layer` was made of, over the very same parameters."""
    make = cast(Callable[..., Any], kind.base)
    settings = {
        name: getattr(layer, name)
        for name in inspect.signature(kind.base.__init__).parameters
        if name not in ("self", "rngs") and hasattr(layer, name)
    }
    # Abstract, since what it would draw is not wanted.
    plain = nnx.eval_shape(lambda: make(**settings, rngs=nnx.Rngs(0)))
    for name in vars(plain):
        if isinstance(getattr(plain, name), nnx.Variable):
            setattr(plain, name, getattr(layer, name))
    return plain
