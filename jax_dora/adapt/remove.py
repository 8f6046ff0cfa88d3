"""Adapters out of a model."""

from flax import nnx

from jax_dora.adapt.tree import check_model, find_dora_layers, replace_modules


def remove_dora[Model: nnx.Module](model: Model) -> Model:
    """Returns `model` without its adapters: the base model exactly, on its own arrays.

    The result is a model of its own, as `apply_dora`'s; one without adapters is copied as it is.

    Raises:
      TypeError: `model` is no nnx module.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    copy = nnx.clone(model)
    return replace_modules(
        copy, {id(found.module): found.module.base_layer() for found in find_dora_layers(copy)}
    )
