"""Adapters out of a model."""

from flax import nnx

from jax_dora.adapt.tree import check_model, find_modules, replace_modules
from jax_dora.layers import DoRALayer
from jax_dora.weights.module import as_plain, has_dora_type


def remove_dora[Model: nnx.Module](model: Model) -> Model:
    """Returns `model` without its adapters: the base model exactly, on its own arrays.

    The result is a model of its own, as `apply_dora`'s; one without adapters is copied as it is.

    Raises:
      TypeError: `model` is no nnx module.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    copy = nnx.clone(model)
    modules = [found.module for found in find_modules(copy)]
    for module in modules:
        if has_dora_type(module):
            as_plain(module)
    return replace_modules(
        copy, {id(one): one.base_layer() for one in modules if isinstance(one, DoRALayer)}
    )
